"""Weights as they compute here and now: how exact they are, what they compute, and whether they were changed.

Knows packed weights and what they give; knows nothing of requests. What is seen when is written down in
docs/identity.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from threading import Lock, RLock

import torch
from torch import Tensor

from kvouch.contract import Grade, KVCache, LayerWatch, Rows
from kvouch.digest import Digest, canonical_json
from kvouch.errors import UsageError
from kvouch.loader.probed import Probed
from kvouch.models.forward import forward_cached
from kvouch.models.step import ModelWeights
from kvouch.numerics.fingerprint import Fingerprint, add_tensor, fingerprint
from kvouch.numerics.probe import probe, probe_ids

PROBED_LAYERS = 2  # the second layer's keys depend on everything that the first one computes
MEMORY_SCHEMA = "kvouch/memory/1"


class Watch:
    """Tells whether tensors are those that were read from files: the same objects, at the same versions.

    Every write that torch sees counts, for as long as the tensors live.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        self._tensors = tensors
        self._seen = tensors()
        self._versions = [tensor._version for tensor in self._seen]
        self._changed: str | None = None
        self._lock = Lock()

    def look(self) -> str | None:
        """None as long as nothing was written to or replaced, and afterwards a digest of the bytes in memory.

        Raises UsageError for a tensor without a version. Whatever raises leaves the change to be found again.
        """
        with self._lock:
            now = self._tensors()
            try:
                versions = [tensor._version for tensor in now]
            except RuntimeError as error:
                raise UsageError("a weight was replaced by one made in inference mode, which has no version") from error
            if versions != self._versions or not all(map(is_, now, self._seen)):
                self._changed = memory_digest(now)
                self._seen, self._versions = now, versions
            return self._changed


def memory_digest(tensors: Iterable[Tensor]) -> str:
    """Digest of the bytes in memory, packed ones in their plain form: dtype, shape and numbers of each, in order."""
    digest = Digest(MEMORY_SCHEMA)
    for tensor in tensors:
        add_tensor(digest, tensor)
    return digest.hex()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found out about weights, and of which state of them."""

    changes: tuple[str | None, ...]  # of each watch
    threads: int
    grade: Grade
    baseline: Fingerprint  # the first of these changes: at grade `within` later ones are compared with it
    numerics: str  # the identity's


class Computation:
    """The weights of a model, with or without an adapter; measured when made, and again when something moved."""

    def __init__(
        self, weights: ModelWeights, dtype: torch.dtype, device: torch.device, watches: Sequence[Watch]
    ) -> None:
        """`watches` look at all tensors of the weights: the base's first."""
        self.weights, self._dtype, self._device, self._watches = weights, dtype, device, watches
        self._lock = RLock()  # who comes while another thread measures waits for what it finds
        self.measured = self._measure(self._look(), None)

    def settle(self) -> Measured:
        """Looks at every tensor's version and at the number of threads; measures again where either moved.

        Threads share out the rows and outputs of a step that is exact by construction: it is not measured again.
        """
        with self._lock:
            changes, before = self._look(), self.measured
            if changes != before.changes:
                self.measured = self._measure(changes, None)
            elif torch.get_num_threads() != before.threads:
                again = not self.weights.path.exact
                now = self._measure(changes, before.baseline) if again else before
                self.measured = replace(now, threads=torch.get_num_threads())
            return self.measured

    def settle_threads(self) -> None:
        """The same for the number of threads alone."""
        if torch.get_num_threads() != self.measured.threads:
            self.settle()

    def take_fingerprint(self) -> str:
        """Computes the probe again; the identity's numerics become what it says. Returns its digest."""
        with self._lock:
            before, taken = self.settle(), self._fingerprint()
            numerics = self._numerics(before.grade, taken, before.baseline)
            if numerics != before.numerics:
                self.measured = replace(before, numerics=numerics)
            return taken.digest

    def forward(self, ids: Tensor, cache: KVCache, scores: Rows, watch: LayerWatch | None = None) -> Tensor | None:
        """`forward_cached` on ids [B, T]."""
        return forward_cached(ids, self.weights, self.weights.config, cache, scores=scores, watch=watch)

    def _look(self) -> tuple[str | None, ...]:
        return tuple(watch.look() for watch in self._watches)

    def _measure(self, changes: tuple[str | None, ...], baseline: Fingerprint | None) -> Measured:
        threads, exact = torch.get_num_threads(), self.weights.path.exact
        probed = None if exact else self._probe()
        taken = self._fingerprint()
        grade = probed if probed is not None else taken.grade
        if baseline is None:  # bits need no scores to be compared, and those of a large vocabulary take megabytes
            baseline = taken if grade.name == "within" else replace(taken, scores=torch.empty(0))
        numerics = self._numerics(grade, taken, baseline)
        return Measured(changes=changes, threads=threads, grade=grade, baseline=baseline, numerics=numerics)

    def _probe(self) -> Grade:
        """Finds the quanta of rows under which the weights are exact here, and sets them."""
        layers = self.weights.config.num_hidden_layers
        first, whole = (Probed(self.weights, count, self._dtype, self._device) for count in (PROBED_LAYERS, layers))
        result = probe(self._ids(), layers=first, model=whole)
        self.weights.arithmetic = result.arithmetic
        return result.grade

    def _numerics(self, grade: Grade, taken: Fingerprint, baseline: Fingerprint) -> str:
        if grade.name == "bitwise":
            return f"bits:{self.weights.path.kernels}{taken.digest}"
        if taken.difference(baseline) <= grade.tolerance:
            return f"names:{self.weights.path.kernels}{numerics_names(self._device)}"
        return f"moved:{taken.digest}"

    def _fingerprint(self) -> Fingerprint:
        config, ids = self.weights.config, self._ids()
        cache = self.weights.path.new_cache(config, ids.shape[1], dtype=self._dtype, device=self._device)
        return fingerprint(self.forward, cache, ids, self.weights.tables)

    def _ids(self) -> Tensor:
        return probe_ids(self.weights.config.vocab_size, self.weights.config.max_position_embeddings, self._device)


def numerics_names(device: torch.device) -> str:
    """What stands for the bits where they are not exact: device, kernels and library, as canonical JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return canonical_json({"device": f"{device.type} {name}", "torch": torch.__version__, "path": "torch"})
