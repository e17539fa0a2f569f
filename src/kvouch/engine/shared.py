"""Several prompts over one beginning: it is computed once, and forked for each. Knows ids; knows no text."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvouch.contract import Verdict
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.loop import Clock
from kvouch.engine.prefix import common_ids
from kvouch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The common ids of several prompts, held by a backend that is forked and never asked itself."""

    backend: RollbackBackend
    ids: tuple[int, ...]
    verdict: Verdict
    prefill_s: float

    def fork(self) -> RollbackBackend:
        """A backend of one's own that holds the shared ids."""
        return self.backend.fork()


def prefill_shared(backend: RollbackBackend, prompts: Sequence[Sequence[int]], *, clock: Clock) -> SharedPrefix:
    """Computes what all prompts begin with, at most all but the last id of the shortest. Raises as `prefill` does."""
    if not prompts:
        raise UsageError("prompts are empty: give at least one")
    ids = common_ids(prompts)
    started = clock()
    verdict = backend.prefill(ids) if ids else backend.verdict
    return SharedPrefix(backend=backend, ids=tuple(ids), verdict=verdict, prefill_s=clock() - started)
