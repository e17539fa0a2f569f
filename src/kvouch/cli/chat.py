"""`kvouch chat`: a conversation, each turn on top of all turns before. Knows terminals and interrupts; no cache.

From a terminal it asks for lines; from a pipe each line is a turn, and no prompt is written.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvouch.cli import answers, options
from kvouch.cli.opening import Served, bind, open_model, tokenizer_of
from kvouch.cli.prefill_bar import PrefillBar
from kvouch.errors import FileError, KvouchError

if TYPE_CHECKING:
    from kvouch.engine.backend import RollbackBackend
    from kvouch.engine.conversation import Conversation
    from kvouch.engine.model import Model
    from kvouch.engine.request import Request, Token
    from kvouch.loader.tokenizer import Tokenizer

PROMPT = "> "
SystemOption = Annotated[str | None, typer.Option("--system", help="The system message; by default the template's.")]


def chat(
    system: SystemOption = None,
    model_name: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    path: options.PathOption = "auto",
    allow_nonfinite: options.NonfiniteOption = False,
    adapter: options.AdapterOption = None,
    adapter_scale: options.AdapterScaleOption = 1.0,
    fingerprint_every: options.FingerprintOption = 0,
    temperature: options.TemperatureOption = 0.0,
    top_k: options.TopKOption = 0,
    top_p: options.TopPOption = 1.0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionOption = 1.0,
    seed: options.SeedOption = 0,
    max_new_tokens: options.MaxNewTokensOption = 256,
    stop: options.StopOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON a turn, instead of text.")] = False,
) -> None:
    from kvouch.engine.backend import RollbackBackend
    from kvouch.engine.conversation import Conversation

    plan = options.plan_of(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
    )
    model = open_model(
        model_name, dtype=dtype, device=device, threads=threads, path=path, allow_nonfinite=allow_nonfinite
    )
    tokenizer = tokenizer_of(model, "`kvouch generate --ids` takes ids")
    tokenizer.render([{"role": "user", "content": "?"}])  # a model that cannot chat says so before the first line
    served = bind(model, adapter=adapter, scale=adapter_scale, fingerprint_every=fingerprint_every)
    bar, interactive = PrefillBar(), sys.stdin.isatty()
    session = _Session(
        model=model,
        tokenizer=tokenizer,
        plan=replace(plan, stop_ids=tokenizer.stop_ids),
        served=served,
        backend=RollbackBackend(served.model, progress=bar),
        bar=bar,
        interactive=interactive,
        as_json=as_json,
    )
    if interactive:
        answers.note(f"{model.name}, {served.model.grade}. Ctrl-C stops an answer, Ctrl-D ends.")
    conversation = Conversation.begin(system)
    for line in _terminal_lines() if interactive else _piped_lines():
        if line.strip() == "/exit":
            return
        if line.strip():
            conversation = _turn(session, conversation, line.strip())


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What stays the same from turn to turn."""

    model: "Model"
    tokenizer: "Tokenizer"
    plan: "Request"
    served: Served
    backend: "RollbackBackend"
    bar: PrefillBar
    interactive: bool
    as_json: bool


def _turn(session: _Session, conversation: "Conversation", text: str) -> "Conversation":
    """Answers one line; the conversation with it, or as it was where nothing was answered."""
    came: list[Token] = []

    def write(token: "Token") -> None:
        came.append(token)
        if not session.as_json:
            answers.write_text(token)

    try:
        asked = conversation.asked(text, session.tokenizer)
        answer = answers.run(session.model, session.backend, replace(session.plan, ids=asked.ids), write)
    except KeyboardInterrupt:
        ids = [token.id for token in came if token.id not in session.plan.stop_ids]
        written = "".join(token.text for token in came)
        _print(session, written, {"question": text, "text": written, "ids": ids, "finish": "interrupted"})
        answers.note("  stopped" if ids else "  stopped before the first token; the question is forgotten")
        return asked.answered(ids, written) if ids else conversation
    except KvouchError as error:
        if not session.interactive:
            raise
        answers.note(f"  {error}; the question is forgotten")
        return conversation
    finally:
        session.bar.close()
    _print(session, answer.text, {"question": text, **answers.answer_fields(answer)})
    answers.note_answer(answer, session.served.model.grade, first_token_s=answer.first_token_s)
    session.served.answered()
    return asked.answered(answer.ids, answer.text)


def _print(session: _Session, text: str, fields: dict[str, Any]) -> None:
    """The end of an answer on stdout: its object with --json, else what its last line lacks."""
    if session.as_json:
        typer.echo(json.dumps(fields, ensure_ascii=False))
    else:
        answers.end_line(text)


def _terminal_lines() -> Iterator[str]:
    """What is typed, line by line; Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` its line editing)
    while True:
        try:
            if sys.stdout.isatty():
                yield input(PROMPT)
            else:  # `input` would write its prompt among the answers
                sys.stderr.write(PROMPT)
                sys.stderr.flush()
                yield input()
        except EOFError:
            answers.note("")
            return
        except KeyboardInterrupt:
            answers.note("\nCtrl-D or /exit ends the chat")


def _piped_lines() -> Iterator[str]:
    lines = 0
    try:
        for line in sys.stdin:
            line.encode()  # a pipe in the C locale lets bytes through that are not UTF-8
            yield line
            lines += 1
    except UnicodeError as error:
        raise FileError(f"standard input: not UTF-8 after line {lines}; convert it first") from error
