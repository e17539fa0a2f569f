"""Options that several commands share, and what they default to. Knows their names and help; imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from kvouch.engine.request import Request

DEFAULT_MODEL = "smollm2-135m-instruct-q4_1"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
PathName = Literal["auto", "torch", "avx2", "avx512", "avx512_bf16"]

ModelOption = Annotated[str, typer.Option("--model", help="A model directory, a catalogue name, or a hub id.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="What to compute in; auto is the checkpoint's own.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where to compute, as torch names it: cpu, cuda, ...")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads; as many as torch takes by default.")]
PathOption = Annotated[
    PathName, typer.Option("--path", help="What computes: auto is the compiled step's best, and torch elsewhere.")
]
NonfiniteOption = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Load weights that hold an infinity or a NaN.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 takes the best token always.")]
AdapterOption = Annotated[Path | None, typer.Option("--adapter", help="A LoRA adapter's directory (PEFT layout).")]
AdapterScaleOption = Annotated[float, typer.Option("--adapter-scale", help="What its corrections are multiplied by.")]
FingerprintOption = Annotated[
    int, typer.Option("--fingerprint-every", help="Compute the probe again after so many requests; 0 never.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Sample from so many of the likeliest tokens; 0 from all.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Only tokens this times as likely as the likeliest.")]
RepetitionOption = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1, what came before is less likely.")
]
TopPOption = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens of this share.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed gives the same answer.")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="The longest answer, in tokens.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]


def plan_of(*, max_new_tokens: int, stop: list[str] | None, **sampling_params: Any) -> "Request":
    """The request that these options ask for, still without a prompt; UsageError names the one that is wrong."""
    from kvouch.engine.request import Request
    from kvouch.engine.sampling import SamplingParams

    sampling = SamplingParams(**sampling_params)
    return Request(ids=(), sampling=sampling, max_new_tokens=max_new_tokens, stop_texts=tuple(stop or ()))
