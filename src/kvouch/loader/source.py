"""A checkpoint's tensors, each taken exactly once. Knows names, shapes and where known buffers may be ignored."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.artefact.manifest import INDEX, READERS, SINGLE, weight_files
from kvouch.errors import FileError, NonFinite, TensorError
from kvouch.loader.safetensors import read_safetensors
from kvouch.models.config import Family, ModelConfig
from kvouch.numerics.bits import same_bits

IGNORED_BUFFERS = re.compile(
    r"(h\.\d+\.attn\.(bias|masked_bias)|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq)"
)
"""Buffers that old checkpoints carry and that no computation here reads: masks and rope frequencies."""

LISTED = 12
MOST_FAULTS = 1000  # a config that far off is not walked to its end: it may name a billion layers
MOST_NUMBERS = 2**48  # no file holds such a tensor


def read_tensors(files: ArtefactFiles, family: Family) -> dict[str, Tensor]:
    """All tensors of a directory by name, GPT-2's without the `transformer.` prefix; known buffers left out."""
    names = weight_files(files)
    if not names:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in files.directory.glob(pattern))
        hint = f"; {pickles} are pickles, which are never opened: convert them to safetensors" if pickles else ""
        raise FileError(f"{files.directory}: neither {SINGLE} nor {INDEX}{hint}")
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(READERS) as pool:
        for name, found in zip(names, pool.map(lambda name: _read_file(files, name), names), strict=True):
            for tensor_name, tensor in found:
                plain = tensor_name.removeprefix("transformer.") if family == "gpt2" else tensor_name
                if plain in tensors:
                    raise TensorError(f"{files.directory / name}: tensor {tensor_name} appears twice")
                if not IGNORED_BUFFERS.fullmatch(plain):
                    tensors[plain] = tensor
    return tensors


def _read_file(files: ArtefactFiles, name: str) -> list[tuple[str, Tensor]]:
    with files.open(name) as file:
        return list(read_safetensors(file))


class CheckpointSource:
    """Hands each tensor out once, cast and moved."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        where: str,
        allow_nonfinite: bool = False,
    ) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._where, self._allow_nonfinite = where, allow_nonfinite

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises NonFinite for an infinity or a NaN, which would make nothing of every position that meets it."""
        tensor = self._tensors.pop(name).to(self._device, self._dtype)
        if not self._allow_nonfinite and not all(edge.isfinite() for edge in tensor.aminmax()):
            raise NonFinite(
                f"{self._where}: {name} holds an infinity or a NaN in {self._dtype}; --allow-nonfinite loads it "
                "all the same"
            )
        return tensor


class ShapeCheck:
    """Stands in for a source, on no device: notes every tensor that is taken, and finds all faults at once."""

    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        self._tensors, self._where = tensors, where
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or name in self._taken:
            self._missing.append(f"{name} {list(shape)}")
        elif tuple(tensor.shape) != shape:
            self._wrong.append(f"{name} {list(tensor.shape)}, by the config {list(shape)}")
        elif not tensor.is_floating_point():
            self._wrong.append(f"{name} of dtype {tensor.dtype}, a floating point dtype is needed")
        self._taken.add(name)
        if len(self._missing) + len(self._wrong) > MOST_FAULTS or math.prod(shape) > MOST_NUMBERS:
            self._refuse(leftover=[], more="; the rest was not looked at")
        return torch.empty(shape, device="meta")

    def finish(self) -> None:
        """TensorError that lists every missing, left-over and misshapen tensor, if there is one."""
        leftover = [f"{name} {list(t.shape)}" for name, t in self._tensors.items() if name not in self._taken]
        if self._missing or self._wrong or leftover:
            self._refuse(leftover=leftover)

    def _refuse(self, *, leftover: list[str], more: str = "") -> None:
        faults = {"missing": self._missing, "left over": leftover, "wrong": self._wrong}
        text = "; ".join(f"{kind}: {_listed(names)}" for kind, names in faults.items() if names)
        raise TensorError(f"{self._where}: the tensors do not fit the config; {text}{more}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def drop_tied_head(tensors: dict[str, Tensor], config: ModelConfig, where: str) -> None:
    """Takes a tied model's `lm_head.weight` away, if it is the embedding bit for bit."""
    head = tensors.get("lm_head.weight")
    embedding = tensors.get("wte.weight" if config.family == "gpt2" else "model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None and embedding is not None:
        if not same_bits(head, embedding):
            raise TensorError(f"{where}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
        del tensors["lm_head.weight"]


def checkpoint_dtypes(tensors: dict[str, Tensor]) -> list[str]:
    """The floating point dtypes of a checkpoint, by name."""
    return sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    )
