"""The real model: the same greedy tokens without reuse, with every cache, and from transformers; and how near."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.contract import KVCache
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.model import Model, load
from kvouch.loader.source import read_tensors
from kvouch.models.oracle import forward_uncached

pytestmark = pytest.mark.real_model

PROMPT = "The lighthouse keeper climbed the stairs one last time, and at the top he found"
STEPS = 48


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> Model:
    return load(smollm2_dir, dtype="float32")


@pytest.fixture(scope="module")
def prompt(model: Model) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def reference(model: Model, prompt: list[int], smollm2_dir: Path) -> list[Tensor]:
    """Scores [V] of each step without any reuse: the whole sequence again, through the plain pass."""
    files = ArtefactFiles(smollm2_dir)
    tensors = {name: tensor.float() for name, tensor in read_tensors(files, "llama").items()}
    return greedy(lambda ids: forward_uncached(torch.tensor([ids]), tensors, model.config)[0, -1], prompt)


def greedy(scores_of: Callable[[list[int]], Tensor], prompt: list[int]) -> list[Tensor]:
    ids, found = list(prompt), []
    for _ in range(STEPS):
        found.append(scores_of(ids))
        ids.append(int(found[-1].argmax()))
    return found


def cached(model: Model, cache: KVCache) -> Callable[[list[int]], Tensor]:
    def scores_of(ids: list[int]) -> Tensor:
        scores = model.forward(ids[cache.length :], cache)
        assert scores is not None
        return scores[0]

    return scores_of


def check(name: str, found: list[Tensor], reference: list[Tensor], report: Callable[[str], None]) -> None:
    """Equal tokens, and scores that differ by rounding only; the differences are reported."""
    differences = [float((ours - plain).abs().max()) for ours, plain in zip(found, reference, strict=True)]
    size = max(float(plain.abs().max()) for plain in reference)
    report(
        f"SmolLM2 float32, {STEPS} greedy tokens, {name} against no reuse: largest score difference of a step "
        f"{median(differences):.1e} (median), {max(differences):.1e} (maximum); scores reach {size:.0f}"
    )
    assert [int(scores.argmax()) for scores in found] == [int(scores.argmax()) for scores in reference]
    assert max(differences) < 1e-3


@pytest.mark.parametrize("kind", ["concat", "static", "new"])
def test_cached_greedy_decoding_equals_the_uncached_one(
    kind: str, model: Model, prompt: list[int], reference: list[Tensor], report: Callable[[str], None]
) -> None:
    cache: KVCache = model.concat_cache()
    if kind != "concat":
        cache = getattr(model, f"{kind}_cache")(len(prompt) + STEPS)
    check(kind, greedy(cached(model, cache), prompt), reference, report)
    assert cache.length == len(prompt) + STEPS - 1


def test_greedy_decoding_equals_that_of_transformers(
    model: Model, prompt: list[int], reference: list[Tensor], smollm2_dir: Path, report: Callable[[str], None]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra: pip install 'kvouch[test]'")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    cache = transformers.DynamicCache()

    def scores_of(ids: list[int]) -> Tensor:
        new = torch.tensor([ids[cache.get_seq_length() :]])
        scores: Tensor = theirs(new, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        return scores

    with torch.no_grad():
        check("transformers", greedy(scores_of, prompt), reference, report)


TEXTS = [
    PROMPT,
    "def fibonacci(n):",
    "Question: why is the sky blue?\nAnswer:",
    "1, 2, 3, 5, 8, 13,",
    "Dear editor, I write",
]


def test_how_near_the_scores_are_to_exact_ones(
    smollm2_dir: Path, prompt: list[int], report: Callable[[str], None]
) -> None:
    """Against the plain pass in float32: closer than transformers in bfloat16, within 2e-5 of the size in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is an extra: pip install 'kvouch[test]'")
    files = ArtefactFiles(smollm2_dir)
    tensors = {name: tensor.float() for name, tensor in read_tensors(files, "llama").items()}
    ids = torch.tensor([[*prompt, *range(1000, 1400)]])
    full = load(smollm2_dir, dtype="float32")
    exact = forward_uncached(ids, tensors, full.config)
    size = float(exact.abs().max())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        far = float((theirs(ids).logits.float() - exact).abs().max())
    half = load(smollm2_dir, dtype="bfloat16")
    errors = []
    for model in (full, half):
        found = model.forward(ids, model.new_cache(ids.shape[1]), scores="all")
        assert found is not None
        errors.append(float((found - exact).abs().max()))
    report(
        f"SmolLM2, {ids.shape[1]} positions, {full.path}, largest difference from the plain float32 pass: float32 "
        f"{errors[0]:.1e}, bfloat16 {errors[1]:.2f}; transformers in bfloat16 {far:.2f}; scores reach {size:.0f}"
    )
    if full.path != "torch":
        assert errors[0] < 2e-5 * size
        assert errors[1] < far


def test_greedy_text_beside_that_of_transformers(smollm2_dir: Path, report: Callable[[str], None]) -> None:
    """128 tokens on five prompts, reported: in bfloat16 two right computations may choose differently."""
    transformers = pytest.importorskip("transformers", reason="transformers is an extra: pip install 'kvouch[test]'")
    model = load(smollm2_dir, dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16).eval()
    assert model.tokenizer is not None
    same = []
    for text in TEXTS:
        ids = model.tokenizer.encode(text)
        backend, ours = RollbackBackend(model), list(ids)
        for _ in range(128):
            ours.append(int(backend.next_logits(ours).numpy().argmax()))
        with torch.no_grad():
            found = theirs.generate(torch.tensor([ids]), max_new_tokens=128, min_new_tokens=128, do_sample=False)
        pairs = zip(ours[len(ids) :], found[0, len(ids) :].tolist(), strict=True)
        same.append(next((at for at, (a, b) in enumerate(pairs) if a != b), 128))
    report(f"SmolLM2 bfloat16, five prompts: greedy tokens equal to those of transformers up to {same} of 128")
    assert len(same) == len(TEXTS)
