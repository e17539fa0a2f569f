"""The transformers library behind the stateless contract, on the full sequence every time: the chapter's baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvouch.contract import Grade, Miss, Reason, Verdict
from kvouch.engine.backend import NOTHING_ASKED, Counters
from kvouch.errors import ContextOverflow, InvalidIds, MissingExtra


class TransformersBackend:
    """`AutoModelForCausalLM` of a model directory, without a cache."""

    def __init__(self, directory: str | Path, *, dtype: torch.dtype, device: str = "cpu") -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise MissingExtra("transformers is not installed: pip install 'kvouch[transformers]'") from error
        self._model: Any = (
            AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True, use_safetensors=True)
            .to(device)
            .eval()
        )
        self._device = device
        self.counters = Counters()
        self.verdict: Verdict = NOTHING_ASKED

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows."""
        asked, config = list(ids), self._model.config
        self.verdict = NOTHING_ASKED
        if not asked or not all(type(one) is int and 0 <= one < config.vocab_size for one in asked):
            raise InvalidIds(f"ids must be whole numbers in [0, {config.vocab_size}), at least one")
        if len(asked) > config.max_position_embeddings:
            raise ContextOverflow(f"{len(asked):,} ids asked, {config.max_position_embeddings:,} in the context")
        with torch.inference_mode():
            found = self._model(torch.tensor([asked], device=self._device), use_cache=False, logits_to_keep=1).logits
        self.counters.calls += 1
        self.counters.positions += len(asked)
        self.verdict = Miss(
            reused_tokens=0, computed_tokens=len(asked), reason=Reason(cause="reuse off"), grade=Grade()
        )
        scores: Tensor = found[0, -1].float()
        return scores
