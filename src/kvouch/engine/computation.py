"""Weights as they compute here and now: how exact they are, what they compute, and whether they were changed.

Knows packed weights and what they give; knows nothing of requests. What is seen when is written down in
docs/identity.md.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.contract import Grade, KVCache, Rows
from kvouch.digest import Digest, canonical_json
from kvouch.loader.probed import Probed
from kvouch.models.forward import forward_cached
from kvouch.models.step import TorchWeights
from kvouch.numerics.fingerprint import Fingerprint, add_tensor, fingerprint
from kvouch.numerics.probe import probe, probe_ids

PROBED_LAYERS = 2  # the second layer's keys depend on everything that the first one computes
MEMORY_SCHEMA = "kvouch/memory/1"


class Computation:
    """The weights of a model, with or without an adapter; measured when made, and again when something moved.

    `changed` is None as long as the tensors are those that were loaded, and afterwards a digest of their bytes.
    """

    def __init__(self, weights: TorchWeights, dtype: torch.dtype, device: torch.device) -> None:
        self.weights, self._dtype, self._device = weights, dtype, device
        self.changed: str | None = None
        self._watch = Watch(weights.tensors)
        self._measure()

    def settle(self) -> None:
        """Looks at every tensor's version and at the number of threads; measures again where either moved."""
        moved = self._watch.moved()
        if moved:
            self.changed = memory_digest(self.weights.tensors())
        if moved or torch.get_num_threads() != self.threads:
            self._measure()

    def take_fingerprint(self) -> str:
        """Computes the probe again; `numerics` becomes what it says. Returns its digest."""
        taken = self._fingerprint()
        self._take(taken)
        return taken.digest

    def forward(self, ids: Tensor, cache: KVCache, scores: Rows) -> Tensor | None:
        """`forward_cached` on ids [B, T]."""
        return forward_cached(ids, self.weights, self.weights.config, cache, scores=scores)

    def _measure(self) -> None:
        config = self.weights.config
        first = Probed(self.weights, PROBED_LAYERS, self._dtype, self._device)
        whole = Probed(self.weights, config.num_hidden_layers, self._dtype, self._device)
        result = probe(self._ids(), layers=first, model=whole)
        self.weights.arithmetic = result.arithmetic
        self.grade: Grade = result.grade
        self.threads = torch.get_num_threads()
        self._first: Fingerprint = self._fingerprint()
        self._take(self._first)

    def _take(self, taken: Fingerprint) -> None:
        if self.grade.name == "bitwise":
            self.numerics = f"bits:{taken.digest}"
        elif taken.difference(self._first) <= self.grade.tolerance:
            self.numerics = f"names:{numerics_names(self._device)}"
        else:
            self.numerics = f"moved:{taken.digest}"

    def _fingerprint(self) -> Fingerprint:
        cache = ConcatCache(self.weights.config, dtype=self._dtype, device=self._device)
        return fingerprint(self.forward, cache, self._ids(), self.weights.tables)

    def _ids(self) -> Tensor:
        return probe_ids(self.weights.config.vocab_size, self.weights.config.max_position_embeddings, self._device)


class Watch:
    """Tells whether tensors are still the same objects, at the same versions: every write that torch sees counts."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._seen: list[Tensor] = []
        self._versions: list[int] = []
        self.moved()

    def moved(self) -> bool:
        """Whether any tensor was written to, or replaced, since the last look."""
        now = list(self._tensors())
        versions = [tensor._version for tensor in now]
        same = versions == self._versions and all(map(_is, now, self._seen))
        self._seen, self._versions = now, versions
        return not same


def _is(a: Tensor, b: Tensor) -> bool:
    return a is b


def memory_digest(tensors: Iterable[Tensor]) -> str:
    """Digest of the bytes in memory, packed ones in their plain form: dtype, shape and numbers of each, in order."""
    digest = Digest(MEMORY_SCHEMA)
    for tensor in tensors:
        add_tensor(digest, tensor)
    return digest.hex()


def numerics_names(device: torch.device) -> str:
    """What stands for the bits where they are not exact: device, kernels and library, as canonical JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return canonical_json({"device": f"{device.type} {name}", "torch": torch.__version__, "path": "torch"})
