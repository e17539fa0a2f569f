"""transformers as a peer, with either of its caches, eager (no torch.compile). Knows transformers 5, nothing of us."""

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.utils.logging import disable_progress_bar

from benchmarks.peers.peer import Peer

CacheKind = Literal["dynamic", "static"]


class TransformersPeer(Peer[Any]):
    """AutoModelForCausalLM in its default (sdpa) attention, over one kind of cache."""

    copying, cutting = "deepcopy", "crop"

    def __init__(self, directory: Path, dtype: str, kind: CacheKind) -> None:
        disable_progress_bar()
        self._kind = kind
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        # The name of the argument changed within version 5.
        named = "cache" in inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if named else "past_key_values"

    def new_cache(self, capacity_tokens: int) -> Any:
        if self._kind == "static":
            return StaticCache(config=self._model.config, max_cache_len=capacity_tokens)
        return DynamicCache(config=self._model.config)

    def feed(self, ids: Sequence[int], cache: Any) -> int:
        with torch.inference_mode():
            held = {self._cache_argument: cache}
            out = self._model(torch.tensor([list(ids)]), **held, use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax())

    def cut(self, cache: Any, length_tokens: int) -> None:
        """In version 5 `crop` takes minus the number of positions to drop; before, it took the length to keep."""
        with torch.inference_mode():
            cache.crop(length_tokens - int(cache.get_seq_length()))
        _check_length(cache, length_tokens)

    def copy(self, cache: Any) -> Any:
        with torch.inference_mode():
            return copy.deepcopy(cache)

    def stretch(self, source: Any, cache: Any, length_tokens: int) -> None:
        held = int(source.get_seq_length())
        times = -(-length_tokens // held)
        with torch.inference_mode():
            for number, layer in enumerate(source.layers):
                both = (one[:, :, :held].repeat(1, 1, times, 1) for one in (layer.keys, layer.values))
                cache.update(*(one[:, :, :length_tokens] for one in both), number)
        _check_length(cache, length_tokens)


def _check_length(cache: Any, length_tokens: int) -> None:
    if int(cache.get_seq_length()) != length_tokens:
        raise RuntimeError("the caches of this version of transformers work in another way: version 5 is needed")


def save_random_gpt2(directory: Path) -> None:
    """GPT-2 small (124M) with random weights from seed 0, in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    disable_progress_bar()
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(directory)
