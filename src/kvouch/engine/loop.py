"""The loop: ask the backend, choose an id, give out its text, until something ends it.

Knows a backend and a request; knows nothing of caches, models and where the time comes from.
"""

from collections.abc import Callable, Iterator

from kvouch.contract import Verdict
from kvouch.engine.backend import Backend
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
    stream = AnswerStream(tokenizer, request.ids, request.stop_texts)
    return _steps(backend, request, stream, context_tokens, clock, cancelled)


def _steps(
    backend: Backend,
    request: Request,
    stream: AnswerStream,
    context_tokens: int,
    clock: Clock,
    cancelled: Callable[[], bool],
) -> Iterator[Token | Answer]:
    ids, text, verdict = list(request.ids), "", backend.verdict
    started = first_token = clock()
    finish: Finish | None = None
    while finish is None:
        step = len(ids) - len(request.ids)
        scores = backend.next_logits(ids)
        choice = sample(scores, request.sampling, step=step, ids=ids)
        token_id = choice.id
        if step == 0:
            verdict, first_token = backend.verdict, clock()
        ids.append(token_id)
        piece = "" if token_id in request.stop_ids else stream.step(token_id)
        finish = _finish(request, ids, stream, context_tokens) or ("cancelled" if cancelled() else None)
        if finish is not None:
            piece += stream.finish()
            finish = "stop" if stream.stopped else finish
        text += piece
        yield Token(id=token_id, text=piece, logprob=choice.logprob)
    yield _answer(request, ids, text, finish, verdict, first_token - started, clock() - first_token)


def _finish(request: Request, ids: list[int], stream: AnswerStream, context_tokens: int) -> Finish | None:
    """What ends the answer after the last of `ids`, if anything does."""
    if ids[-1] in request.stop_ids or stream.stopped:
        return "stop"
    if len(ids) - len(request.ids) >= request.max_new_tokens:
        return "length"
    return "context" if len(ids) > context_tokens else None


def _answer(
    request: Request,
    ids: list[int],
    text: str,
    finish: Finish,
    verdict: Verdict,
    first_token_s: float,
    rest_s: float,
) -> Answer:
    new = ids[len(request.ids) :]
    stop_id = new[-1] if new[-1] in request.stop_ids else None
    return Answer(
        text=text,
        ids=tuple(new if stop_id is None else new[:-1]),
        stop_id=stop_id,
        finish=finish,
        verdict=verdict,
        prompt_tokens=len(request.ids),
        first_token_s=first_token_s,
        tokens_per_s=(len(new) - 1) / rest_s if len(new) > 1 and rest_s > 0 else None,
    )
