"""Options that several commands share, and what they default to. Knows their names and help; imports no torch."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from kvouch.engine.request import Request

DEFAULT_MODEL = "smollm2-135m-instruct-q4_1"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

ModelOption = Annotated[str, typer.Option("--model", help="A model directory, a catalogue name, or a hub id.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="What to compute in; auto is the checkpoint's own.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where to compute, as torch names it: cpu, cuda, ...")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads; torch's own choice by default.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 takes the best token always.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens of this share.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed gives the same answer.")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="The longest answer, in tokens.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]


def plan_of(*, temperature: float, top_p: float, seed: int, max_new_tokens: int, stop: list[str] | None) -> "Request":
    """The request that these options ask for, still without a prompt; UsageError names the one that is wrong."""
    from kvouch.engine.request import Request
    from kvouch.engine.sampling import SamplingParams

    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    return Request(ids=(), sampling=sampling, max_new_tokens=max_new_tokens, stop_texts=tuple(stop or ()))
