"""The models and ids that every peer is given. Knows where they come from; knows no peer and no clock."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct-q4_1"
LABELS = {"smollm2": "SmolLM2 135M", "gpt2": "GPT-2 124M"}
ABOUT = {"smollm2": f"{SMOLLM2}, real weights", "gpt2": "GPT-2 small, default config, random weights of seed 0"}
CONTEXT_TOKENS = {"smollm2": 8192, "gpt2": 1024}
SMALLEST_VOCABULARY = 49_152
NOT_IN_EVERY_ROW = ("embed_tokens.", "wte.", "wpe.", "lm_head.")  # looked up, or multiplied for the last row alone


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many numbers a model has, and how many of them multiply every position of a prefill."""

    total: int
    every_row: int


def count_parameters(directory: Path) -> Parameters:
    """From the headers of the safetensors files."""
    total = every_row = 0
    for file in sorted(directory.glob("*.safetensors")):
        for name, numbers in _shapes(file).items():
            total += numbers
            if not any(part in name for part in NOT_IN_EVERY_ROW):
                every_row += numbers
    return Parameters(total=total, every_row=every_row)


def prompt_ids(root: Path, tokenizer_file: Path | None, count: int) -> tuple[list[int], str]:
    """The first ids of the example document, else random ones; and which it was."""
    documents = sorted((root / "examples").glob("*.txt"))
    if documents and tokenizer_file is not None and tokenizer_file.is_file():
        from tokenizers import Tokenizer

        document = max(documents, key=lambda path: path.stat().st_size)
        ids = list(Tokenizer.from_file(str(tokenizer_file)).encode(document.read_text(encoding="utf-8")).ids)
        if len(ids) >= count:
            return ids[:count], f"examples/{document.name}"
    chosen = random.Random(0)
    return [chosen.randrange(1, SMALLEST_VOCABULARY) for _ in range(count)], "random, seed 0"


def _shapes(file: Path) -> dict[str, int]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    found = {}
    for name, field in header.items():
        if name != "__metadata__":
            found[name] = 1
            for size in field["shape"]:
                found[name] *= size
    return found
