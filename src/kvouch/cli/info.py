"""`kvouch info`: the machine as kvouch sees it, and a model as it is loaded. Knows what to print; measures nothing."""

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvouch.cli import options
from kvouch.cli.opening import open_model, set_threads

if TYPE_CHECKING:
    from kvouch.engine.model import Model

VERSIONS = ("kvouch", "torch", "tokenizers", "safetensors", "numpy")


def info(
    model_name: Annotated[str | None, typer.Option("--model", help="A model to load and describe as well.")] = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    path: options.PathOption = "auto",
    allow_nonfinite: options.NonfiniteOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, instead of lines.")] = False,
) -> None:
    set_threads(threads)
    fields: dict[str, Any] = {"machine": machine_fields()}
    if model_name is not None:
        fields["model"] = model_fields(
            open_model(
                model_name, dtype=dtype, device=device, threads=threads, path=path, allow_nonfinite=allow_nonfinite
            )
        )
    if as_json:
        typer.echo(json.dumps(fields))
        return
    width = max(len(name) for part in fields.values() for name in part)
    typer.echo("\n\n".join(_lines(part, width) for part in fields.values()))


def machine_fields() -> dict[str, Any]:
    """Versions, devices and what the CPU path computes with."""
    import torch

    from kvouch.kernels.binding import library

    kernels = library()
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.is_available(),
        "compiled_step": kernels if isinstance(kernels, str) else list(kernels.variants),
        "cuda_devices": cuda,
    }


def model_fields(model: "Model") -> dict[str, Any]:
    """Sizes, memory and exactness of a loaded model."""
    config, cache = model.config, model.new_cache(1)
    rows = {} if model.weights.path.exact else asdict(model.weights.arithmetic)
    return {
        "model": model.name,
        "family": config.family,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_tokens": config.max_position_embeddings,
        "tokenizer": model.tokenizer is not None,
        "chat_template": model.tokenizer is not None and model.tokenizer.has_chat_template,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "weights_bytes": model.weights.nbytes,
        "cache_bytes_per_position": cache.nbytes // cache.capacity,
        "path": model.path,
        **({"not_compiled": model.not_compiled} if model.not_compiled else {}),
        "grade": str(model.grade),
        "identity": model.identity().to_dict(),
        **rows,
    }


def _lines(fields: dict[str, Any], width: int) -> str:
    """A name and a value a line, aligned."""
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {_readable(value)}" for name, value in fields.items())


def _readable(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(str, value)) or "none"
        case dict():
            return f"{value['digest'][:24]}... (--json: all of it)"
        case _:
            return str(value)
