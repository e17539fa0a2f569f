"""Text on its way out: whole characters, and never a part of a stop text. Knows text; knows no model.

What could still become a stop text is held back until it cannot. The result does not depend on how the text was cut
into pieces: the stop text that is complete first counts, and of those complete at once the longest.
"""

from collections.abc import Sequence

from kvouch.errors import UsageError
from kvouch.loader.tokenizer import Tokenizer


class StopFilter:
    """Lets text through up to the first stop text."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = tuple(stop_texts)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What of the text so far can go out now; nothing more once `stopped`."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stop_texts if (start := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends)[1])
        return self._release(len(self._held) - self._possible_stop())

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        return "" if self.stopped else self._release(len(self._held))

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that a stop text begins with."""
        longest = max((len(stop) - 1 for stop in self._stop_texts), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_texts):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class AnswerStream:
    """The text of an answer, id by id; without a tokenizer there is none."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop_texts: Sequence[str]) -> None:
        if tokenizer is None and stop_texts:
            raise UsageError("stop texts need a tokenizer, and this model has none; leave --stop away")
        self._characters = tokenizer.stream(prompt_ids) if tokenizer is not None else None
        self._filter = StopFilter(stop_texts)

    @property
    def stopped(self) -> bool:
        """Whether a stop text came."""
        return self._filter.stopped

    def step(self, token_id: int) -> str:
        """The text that this id sets free."""
        return self._filter.feed(self._characters.step(token_id)) if self._characters is not None else ""

    def finish(self) -> str:
        """The text that still waited, at the end of the answer."""
        if self._characters is None:
            return ""
        return self._filter.feed(self._characters.finish()) + self._filter.flush()
