"""A GGUF file, once, into an ordinary bf16 directory. Knows GGUF's metadata; leaves tensors and tokenizer to others.

The file is parsed a single time, with the `gguf` package (the reader and the dequantisation that transformers uses
too). Only the Llama family with a byte-level BPE is converted, and everything in the file must be understood: a key
or a tensor that is not is an error, never dropped. The same file gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvouch.errors import ConfigError, FileError, MissingExtra
from kvouch.loader.gguf_config import llama_config
from kvouch.loader.gguf_tokenizer import build_tokenizer, tokenizer_config

if TYPE_CHECKING:
    from kvouch.contract import Progress

CHAT_TEMPLATE = "tokenizer.chat_template"


def require_gguf() -> None:
    """Raises MissingExtra, which names the command to run, where the `gguf` extra is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "converting a GGUF needs the extra `gguf`, which is not installed: run pip install 'kvouch[gguf]'"
        ) from None


def convert(source: Path, into: Path, progress: Progress) -> None:
    """Fills `into` with config, weights (bf16), tokenizer, chat template and generation config."""
    require_gguf()
    from kvouch.loader.gguf_tensors import llama_tensors, write_tensors

    progress("parse", 0, 1)
    reader = _read(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    progress("parse", 1, 1)
    config = llama_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(into / "config.json", config)
    _write_json(into / "generation_config.json", _generation_config(config))
    build_tokenizer(fields).save(str(into / "tokenizer.json"))
    _write_json(into / "tokenizer_config.json", tokenizer_config(fields))
    _write_chat_template(into / "chat_template.jinja", fields)
    write_tensors(into / "model.safetensors", llama_tensors(reader.tensors, config, progress))
    # the safetensors library makes its file readable by its owner alone
    (into / "model.safetensors").chmod((into / "config.json").stat().st_mode)


def _read(source: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise FileError(f"{source.name}: not a readable GGUF file ({error}); download it again") from None


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if name in config}


def _write_chat_template(path: Path, fields: Mapping[str, Any]) -> None:
    template = fields.get(CHAT_TEMPLATE)
    if template is None:  # a base model
        return
    if not isinstance(template, str):
        raise ConfigError(f"GGUF field {CHAT_TEMPLATE}: want text, found {type(template).__name__}")
    path.write_text(template, encoding="utf-8")


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
