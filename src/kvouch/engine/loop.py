"""The loop: ask the backend, choose an id, give out its text, until something ends it.

Knows a backend and a request; knows nothing of caches, models and where the time comes from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from kvouch.contract import Verdict
from kvouch.engine.backend import Backend
from kvouch.engine.batch import BatchedBackend, Prompt
from kvouch.engine.request import Answer, Finish, Request, Token
from kvouch.engine.sampling import sample
from kvouch.engine.stream import AnswerStream
from kvouch.loader.tokenizer import Tokenizer

Clock = Callable[[], float]
"""Seconds from some fixed moment, as `time.perf_counter` gives them."""


def generate(
    backend: Backend,
    request: Request,
    *,
    tokenizer: Tokenizer | None,
    context_tokens: int,
    clock: Clock,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Token | Answer]:
    """Each token as it is chosen, then the Answer. Raises what the backend raises, and UsageError for stop texts.

    `cancelled` is asked after each token. The iterator can also be left at any token: the backend then holds the prompt
    and all tokens but the last.
    """
    return _tokens(backend, Answering(request, tokenizer, context_tokens, clock, cancelled))


def _tokens(backend: Backend, answering: "Answering") -> Iterator[Token | Answer]:
    while answering.finish is None:
        yield answering.take(backend.next_logits(answering.ids), backend.verdict)
    yield answering.answer()


def generate_many(
    backend: BatchedBackend,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None,
    context_tokens: int,
    clock: Clock,
    adapters: Sequence[str | None] = (),
) -> list[Answer]:
    """The answers of many requests, each the one that it would get alone; a step computes all that are not done.

    `adapters`: one for each request, or none. Raises what `generate` raises, and PoolFull.
    """
    running = [Answering(one, tokenizer, context_tokens, clock) for one in requests]
    chosen = dict(zip(map(id, running), adapters or [None] * len(running), strict=True))
    while going := [one for one in running if one.finish is None]:
        scores = backend.next_logits([Prompt(ids=one.ids, adapter=chosen[id(one)]) for one in going])
        for one, found, verdict in zip(going, scores, backend.verdicts, strict=True):
            one.take(found, verdict)
    return [one.answer() for one in running]


def continuations(request: Request, count: int) -> list[Request]:
    """The same prompt so many times, with seeds from its own on: their prompt is computed once."""
    seeds = range(request.sampling.seed, request.sampling.seed + count)
    return [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]


class Answering:
    """A request under way: scores in, tokens out, until `finish` says what ended it."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        context_tokens: int,
        clock: Clock,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ids = list(request.ids)
        self.finish: Finish | None = None
        self._request, self._context_tokens, self._clock, self._cancelled = request, context_tokens, clock, cancelled
        self._stream = AnswerStream(tokenizer, request.ids, request.stop_texts)
        self._text = ""
        self._verdict: Verdict | None = None
        self._started = self._first_token = clock()

    def take(self, scores: Tensor, verdict: Verdict) -> Token:
        """Chooses an id from the scores that follow `ids`."""
        step = len(self.ids) - len(self._request.ids)
        choice = sample(scores, self._request.sampling, step=step, ids=self.ids)
        if step == 0:
            self._verdict, self._first_token = verdict, self._clock()
        self.ids.append(choice.id)
        piece = "" if choice.id in self._request.stop_ids else self._stream.step(choice.id)
        self.finish = self._ended() or ("cancelled" if self._cancelled() else None)
        if self.finish is not None:
            piece += self._stream.finish()
            self.finish = "stop" if self._stream.stopped else self.finish
        self._text += piece
        return Token(id=choice.id, text=piece, logprob=choice.logprob)

    def answer(self) -> Answer:
        """What came of it; `finish` is there."""
        if self.finish is None or self._verdict is None:
            raise RuntimeError("the answer is not finished")
        rest_s, new = self._clock() - self._first_token, self.ids[len(self._request.ids) :]
        stop_id = new[-1] if new[-1] in self._request.stop_ids else None
        return Answer(
            text=self._text,
            ids=tuple(new if stop_id is None else new[:-1]),
            stop_id=stop_id,
            finish=self.finish,
            verdict=self._verdict,
            prompt_tokens=len(self._request.ids),
            first_token_s=self._first_token - self._started,
            tokens_per_s=(len(new) - 1) / rest_s if len(new) > 1 and rest_s > 0 else None,
        )

    def _ended(self) -> Finish | None:
        """What ends the answer after the last of `ids`, if anything does."""
        if self.ids[-1] in self._request.stop_ids or self._stream.stopped:
            return "stop"
        if len(self.ids) - len(self._request.ids) >= self._request.max_new_tokens:
            return "length"
        return "context" if len(self.ids) > self._context_tokens else None
