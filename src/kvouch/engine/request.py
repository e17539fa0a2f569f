"""What is asked of the loop and what it gives back. Values only: no model, no clock, no tensor."""

from dataclasses import dataclass, field
from typing import Literal

from kvouch.contract import Verdict
from kvouch.engine.sampling import SamplingParams
from kvouch.errors import UsageError

Finish = Literal["stop", "length", "context", "cancelled"]
"""A stop id or text came; `max_new_tokens` were made; the model's context is full; the caller wanted no more."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how it is to be continued."""

    ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens!r}; give a whole number, 1 or more")
        if isinstance(self.stop_texts, str) or not all(isinstance(text, str) and text for text in self.stop_texts):
            raise UsageError(f"stop_texts is {self.stop_texts!r}; give a tuple of texts, none of them empty")


@dataclass(frozen=True, kw_only=True)
class Token:
    """One id that was chosen, and the text that it set free: often its own, sometimes none, or that of several."""

    id: int
    text: str
    logprob: float  # of the id, by the scores that it was chosen from


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The end of an answer. Its text is that of its tokens, joined."""

    text: str
    ids: tuple[int, ...]  # without the stop id
    stop_id: int | None
    finish: Finish
    verdict: Verdict  # of the first call, which reads the prompt
    prompt_tokens: int
    first_token_s: float
    tokens_per_s: float | None  # after the first token; None for an answer of one

    @property
    def new_tokens(self) -> int:
        """How many ids were chosen, the stop id included."""
        return len(self.ids) + (self.stop_id is not None)
