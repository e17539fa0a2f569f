"""A tokenizer of 257 ids that fits the tiny models: one id a byte, and one that ends a turn."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvouch.artefact.files import ArtefactFiles
from kvouch.loader.tokenizer import Tokenizer, load_tokenizer
from kvouch.models.tiny import VOCABULARY

END, END_ID = "<|end|>", 256
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
CONFIG = {"vocab_size": VOCABULARY, "eos_token_id": END_ID}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Each byte is an id; `<|end|>` is one more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True)])
    return core


def write_tokenizer(
    directory: Path,
    *,
    core: tokenizers.Tokenizer | None = None,
    template: str | None = TEMPLATE,
    fields: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """The tokenizer's files, written into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text((core or byte_tokenizer()).to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} if fields is None else fields))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def read_tokenizer(directory: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    found = load_tokenizer(ArtefactFiles(directory), CONFIG if config is None else config)
    if found is None:
        raise FileNotFoundError(directory / "tokenizer.json")
    return found


def tiny_tokenizer(directory: Path, **files: Any) -> Tokenizer:
    """Written and read."""
    return read_tokenizer(write_tokenizer(directory, **files))
