"""Opening a model for a command. Knows devices, threads and the bar of a download; computes nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvouch.cli.answers import note
from kvouch.cli.options import Dtype, PathName
from kvouch.cli.progress import progress_on_stderr
from kvouch.errors import UsageError

if TYPE_CHECKING:
    from kvouch.engine.bound import BoundModel
    from kvouch.engine.model import Model
    from kvouch.loader.tokenizer import Tokenizer

MOST_THREADS = 1024


def open_model(
    name: str, *, dtype: Dtype, device: str, threads: int | None, path: PathName, allow_nonfinite: bool
) -> "Model":
    """The loaded model; UsageError for a device, a path or a number of threads that cannot be."""
    import torch

    from kvouch.engine.model import load
    from kvouch.models.linear import can_pack

    set_threads(threads)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device {device!r} cannot be used ({reason}); cpu always can") from error
    with progress_on_stderr() as progress:
        model = load(name, dtype=dtype, device=device, path=path, allow_nonfinite=allow_nonfinite, progress=progress)
    slow = model.path == "torch" and model.device.type == "cpu"
    if slow and model.dtype != torch.float32 and not can_pack(model.dtype, model.device):
        short = str(model.dtype).removeprefix("torch.")
        note(f"this CPU has no fast {short} product: --dtype float32 reads a prompt several times faster")
    return model


def bind(model: "Model", *, adapter: Path | None, scale: float, fingerprint_every: int = 0) -> "Served":
    """The model with an adapter, if one is asked for; UsageError for a number of requests that cannot be."""
    if fingerprint_every < 0:
        raise UsageError(f"fingerprint-every is {fingerprint_every}; give 0 (never) or a number of requests")
    if adapter is None and scale != 1.0:
        raise UsageError("--adapter-scale needs an --adapter")
    name = model.load_adapter(adapter, scale=scale) if adapter is not None else None
    return Served(model.bind(adapter=name), fingerprint_every)


class Served:
    """A bound model, whose probe is computed again after every so many requests."""

    def __init__(self, model: "BoundModel", every: int) -> None:
        self.model, self._every, self._requests = model, every, 0

    def answered(self) -> None:
        """Counts a request; says so where the probe now gives other bits than before."""
        self._requests += 1
        if self._every and self._requests % self._every == 0:
            before = self.model.identity()
            self.model.fingerprint()
            if self.model.identity() != before:
                note("  the model computes other numbers than before: nothing that was held is reused")


def set_threads(threads: int | None) -> None:
    """How many threads are computed with, from here on: torch's number is that of the compiled step, too."""
    import torch

    if threads is None:
        return
    if not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"threads is {threads}; give 1 to {MOST_THREADS}")
    torch.set_num_threads(threads)


def tokenizer_of(model: "Model", instead: str) -> "Tokenizer":
    """The model's tokenizer; UsageError that says what to do `instead` where it has none."""
    if model.tokenizer is None:
        raise UsageError(f"{model.name} has no tokenizer.json, so it takes no text; {instead}")
    return model.tokenizer
