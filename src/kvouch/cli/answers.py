"""Answers on the screen: the text on stdout as it comes, what it cost on stderr. Knows tokens and verdicts; no cache.

What was reused, computed and why is printed from the verdict alone.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kvouch.contract import Grade
    from kvouch.engine.backend import Backend
    from kvouch.engine.model import Model
    from kvouch.engine.request import Answer, Request, Token

Write = Callable[["Token"], None]


def run(model: "Model", backend: "Backend", request: "Request", write: Write) -> "Answer":
    """Answers a request, writing each token as it comes."""
    from kvouch.engine.loop import generate
    from kvouch.engine.request import Answer

    events: Iterator[Token | Answer] = generate(
        backend,
        request,
        tokenizer=model.tokenizer,
        context_tokens=model.config.max_position_embeddings,
        clock=time.perf_counter,
    )
    for event in events:
        if isinstance(event, Answer):
            return event
        write(event)
    raise RuntimeError("the events ended without an Answer")


def write_text(token: "Token") -> None:
    """The token's text on stdout, at once."""
    sys.stdout.write(token.text)
    sys.stdout.flush()


def write_nothing(token: "Token") -> None:
    """For --json: the text is in the object."""


def end_line(text: str) -> None:
    """A newline on stdout where the text has none at its end."""
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def note(text: str) -> None:
    """A line on stderr, dimmed on a terminal."""
    typer.secho(text, err=True, dim=True)


def note_answer(answer: "Answer", grade: "Grade", *, first_token_s: float, cold_s: float | None = None) -> None:
    """Two lines on stderr: what was reused and why; how long it took, and at what grade."""
    cold = f" (cold {cold_s:.2f} s)" if cold_s is not None else ""
    speed = f", {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s is not None else ""
    note(f"  {answer.verdict}")
    note(f"  first token {first_token_s:.2f} s{cold}, {answer.new_tokens} tokens{speed}, {answer.finish}, {grade}")


def answer_fields(answer: "Answer") -> dict[str, Any]:
    """What --json prints of an answer."""
    return {
        "text": answer.text,
        "ids": list(answer.ids),
        "stop_id": answer.stop_id,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "verdict": answer.verdict.to_dict(),
        "first_token_s": answer.first_token_s,
        "tokens_per_s": answer.tokens_per_s,
    }


def model_fields(model: "Model", grade: "Grade") -> dict[str, Any]:
    """What --json prints of a model."""
    return {"model": model.name, "dtype": str(model.dtype).removeprefix("torch."), "grade": str(grade)}
