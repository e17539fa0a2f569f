"""The bar of a long prefill. Opens when one begins and closes when it ends, so that the answer has the terminal."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvouch.cli.progress import progress_on_stderr

if TYPE_CHECKING:
    from kvouch.contract import Progress


class PrefillBar:
    """A `Progress` for a backend; `close` ends a bar whose prefill was interrupted."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._report: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._report is None:
            self._report = self._stack.enter_context(progress_on_stderr())
        self._report(stage, done, total)
        if done >= total:
            self.close()

    def close(self) -> None:
        self._stack.close()
        self._report = None
