"""`kvouch generate`: continues a text, or ids, as they are. Knows no chat template."""

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvouch.cli import answers, options
from kvouch.cli.opening import bind, open_model, tokenizer_of
from kvouch.cli.prefill_bar import PrefillBar
from kvouch.errors import InvalidIds, UsageError

if TYPE_CHECKING:
    from kvouch.engine.request import Token

MOST_DIGITS = 20  # of an id; Python refuses thousands


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    ids_text: Annotated[
        str | None, typer.Option("--ids", help="Token ids instead of a text, as in 504,3575,282.")
    ] = None,
    model_name: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    path: options.PathOption = "auto",
    allow_nonfinite: options.NonfiniteOption = False,
    adapter: options.AdapterOption = None,
    adapter_scale: options.AdapterScaleOption = 1.0,
    temperature: options.TemperatureOption = 0.0,
    top_k: options.TopKOption = 0,
    top_p: options.TopPOption = 1.0,
    min_p: options.MinPOption = 0.0,
    repetition_penalty: options.RepetitionOption = 1.0,
    seed: options.SeedOption = 0,
    max_new_tokens: options.MaxNewTokensOption = 256,
    stop: options.StopOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end, instead of text.")] = False,
) -> None:
    from kvouch.engine.backend import RollbackBackend

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
    given = _given_ids(prompt, ids_text)
    model = open_model(
        model_name, dtype=dtype, device=device, threads=threads, path=path, allow_nonfinite=allow_nonfinite
    )
    if given is None:
        given = tokenizer_of(model, "give token ids with --ids").encode(prompt or "")
    stop_ids = model.tokenizer.stop_ids if model.tokenizer is not None else plan.stop_ids
    request = replace(plan, ids=tuple(given), stop_ids=stop_ids)
    served = bind(model, adapter=adapter, scale=adapter_scale)
    bar = PrefillBar()
    backend = RollbackBackend(served.model, capacity=len(given) + max_new_tokens, progress=bar)
    write = answers.write_nothing if as_json else answers.write_text if model.tokenizer is not None else _write_id
    try:
        answer = answers.run(model, backend, request, write)
    finally:
        bar.close()
    if as_json:
        fields = {
            **answers.model_fields(model, served.model.grade),
            "prompt_ids": given,
            **answers.answer_fields(answer),
        }
        typer.echo(json.dumps(fields, ensure_ascii=False))
        return
    answers.end_line(answer.text)
    answers.note_answer(answer, served.model.grade, first_token_s=answer.first_token_s)


def parse_ids(text: str) -> list[int]:
    """Ids from a list with commas; InvalidIds names the item that is none."""
    ids = []
    for number, item in enumerate(text.split(","), start=1):
        if not (item.strip().isascii() and item.strip().isdigit()):
            raise InvalidIds(f"--ids: item {number} is {item.strip()!r}; a whole number, 0 or more, is needed")
        if len(item) > MOST_DIGITS:
            raise InvalidIds(f"--ids: item {number} has {len(item)} digits; no vocabulary is so large")
        ids.append(int(item))
    return ids


def _given_ids(prompt: str | None, ids_text: str | None) -> list[int] | None:
    """The ids of --ids, or None where a text is given; UsageError for both, neither, or nothing in them."""
    if (prompt is None) == (ids_text is None):
        raise UsageError("give either PROMPT or --ids" if prompt is None else "give PROMPT or --ids, not both")
    if ids_text is not None:
        return parse_ids(ids_text)
    if not prompt:
        raise UsageError("PROMPT is empty; give some text to continue")
    return None


def _write_id(token: "Token") -> None:
    sys.stdout.write(f"{token.id} ")
    sys.stdout.flush()
