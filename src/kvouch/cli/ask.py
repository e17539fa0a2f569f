"""`kvouch ask`: questions about documents that are read once. Knows how the prompt is laid out and printed."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvouch.cli import answers, options
from kvouch.cli.opening import Served, bind, open_model, tokenizer_of
from kvouch.cli.prefill_bar import PrefillBar
from kvouch.errors import ContextOverflow, FileError, UsageError

if TYPE_CHECKING:
    from kvouch.engine.model import Model
    from kvouch.engine.request import Request
    from kvouch.engine.shared import SharedPrefix
    from kvouch.loader.chat_template import Message


def ask(
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help="What to ask; one or more.")],
    documents: Annotated[list[Path], typer.Option("--doc", help="A UTF-8 text file; may be repeated.")],
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
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object when all is answered: the shared part, and the answers.")
    ] = False,
) -> None:
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
    for number, question in enumerate(questions, start=1):
        if not question.strip():
            raise UsageError(f"question {number} is empty")
    texts = [read_document(path) for path in documents]
    model = open_model(
        model_name, dtype=dtype, device=device, threads=threads, path=path, allow_nonfinite=allow_nonfinite
    )
    served = bind(model, adapter=adapter, scale=adapter_scale, fingerprint_every=fingerprint_every)
    requests, shared = _share(model, served, plan, documents, texts, questions)
    if not as_json:
        names = ", ".join(path.name for path in documents)
        answers.note(f"{names}: {len(shared.ids):,} tokens in {shared.prefill_s:.2f} s ({shared.verdict})")
    fields = [
        _answer(model, served, request, shared, question, as_json)
        for question, request in zip(questions, requests, strict=True)
    ]
    if as_json:
        head = answers.model_fields(model, served.model.grade)
        typer.echo(json.dumps({**head, **_all_fields(documents, shared, fields)}, ensure_ascii=False))


def read_document(path: Path) -> str:
    """The text of a UTF-8 file; FileError where it is none, or holds nothing."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 (byte {error.start}); convert it first") from error
    if not text.strip():
        raise FileError(f"{path}: empty, so there is nothing to ask about")
    return text


def layout(texts: list[str], question: str) -> "list[Message]":
    """The chat of one question: every document, then the question, in one message."""
    parts = [text.strip() for text in texts]
    if len(parts) > 1:
        parts = [f"Document {number}:\n{part}" for number, part in enumerate(parts, start=1)]
    document = "\n\n".join(parts)
    return [{"role": "user", "content": f"{document}\n\nAnswer from the text above: {question.strip()}"}]


def _share(
    model: "Model", served: Served, plan: "Request", documents: list[Path], texts: list[str], questions: list[str]
) -> "tuple[list[Request], SharedPrefix]":
    """The request of each question, and their common beginning, computed."""
    from dataclasses import replace

    from kvouch.engine.backend import RollbackBackend
    from kvouch.engine.shared import prefill_shared

    tokenizer = tokenizer_of(model, "`kvouch generate --ids` takes ids")
    prompts = [tokenizer.encode(tokenizer.render(layout(texts, one)), special=False) for one in questions]
    _check_fit(model, documents, max(len(prompt) for prompt in prompts))
    capacity = max(len(prompt) for prompt in prompts) + plan.max_new_tokens
    bar = PrefillBar()
    backend = RollbackBackend(served.model, capacity=capacity, progress=bar)
    # one question alone shares what any other would: the documents
    others = [] if len(prompts) > 1 else [tokenizer.encode(tokenizer.render(layout(texts, "")), special=False)]
    try:
        shared = prefill_shared(backend, [*prompts, *others], clock=time.perf_counter)
    finally:
        bar.close()
    requests = [replace(plan, ids=tuple(prompt), stop_ids=tokenizer.stop_ids) for prompt in prompts]
    return requests, shared


def _check_fit(model: "Model", documents: list[Path], prompt_tokens: int) -> None:
    context = model.config.max_position_embeddings
    if prompt_tokens > context:
        names = ", ".join(str(path) for path in documents)
        raise ContextOverflow(
            f"{names}: with the question {prompt_tokens:,} tokens, and the context of {model.name} is {context:,}: "
            f"{prompt_tokens - context:,} too many; give less text"
        )


def _answer(
    model: "Model", served: Served, request: "Request", shared: "SharedPrefix", question: str, as_json: bool
) -> dict[str, Any]:
    """Answers one question from a fork, prints it, and returns what --json says of it."""
    if not as_json:
        answers.note(f"\n{question.strip()}")
    started = time.perf_counter()
    backend = shared.fork()
    fork_s = time.perf_counter() - started
    write = answers.write_nothing if as_json else answers.write_text
    answer = answers.run(model, backend, request, write)
    served.answered()
    first_token_s = fork_s + answer.first_token_s
    cold_s = shared.prefill_s + answer.first_token_s
    if not as_json:
        answers.end_line(answer.text)
        answers.note_answer(answer, served.model.grade, first_token_s=first_token_s, cold_s=cold_s)
    times = {"first_token_s": first_token_s, "cold_first_token_s": cold_s}
    return {"question": question, **answers.answer_fields(answer), **times}


def _all_fields(documents: list[Path], shared: "SharedPrefix", fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "documents": [str(path) for path in documents],
        "shared": {
            "tokens": len(shared.ids),
            "verdict": shared.verdict.to_dict(),
            "prefill_s": shared.prefill_s,
        },
        "answers": fields,
    }
