"""The compiled step's library: built from these sources, refused where it is another's, right product by product."""

import ctypes
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvouch.contract import TILE
from kvouch.engine.model import load
from kvouch.errors import NonFinite, TensorError, UsageError
from kvouch.kernels import binding
from kvouch.kernels.binding import VARIANTS, Library, has_step, library, packed_shape, unpack
from kvouch.loader.config import parse_config
from kvouch.models import paths
from kvouch.models.compiled import CompiledPath, StepLinear
from kvouch.models.paths import choose_path
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from kvouch.numerics.bits import same_bits
from kvouch.numerics.probe import probe_ids
from tiny_models import random_ids, tiny_directory, tiny_model, write_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
LLAMA = parse_config(TINY_CONFIGS["llama2"], "config.json")


@pytest.fixture
def step() -> Library:
    found = library()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_it_was_built_from_the_sources_that_are_here() -> None:
    """Where it can be, it must have been: a test that is skipped would hide that nothing was compiled."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("the compiled step is built on x86-64 Linux")
    folder = Path(__file__).parents[3] / "src" / "kvouch" / "kernels"
    text = b"".join(path.read_bytes() for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]))
    found = library()
    assert isinstance(found, Library), found
    assert found.sources == hashlib.sha256(text).hexdigest(), "install again: the kernels were edited"
    assert found.variants[0] == "avx2"


# Weights.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (1, 1), (40, 33), (257, 48), (48, 80), (5, 300)])
def test_packing_loses_nothing_and_pads_with_zeros(
    step: Library, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = step.pack(weight)
    assert packed.shape == packed_shape(outputs, inputs, dtype)
    assert same_bits(unpack(packed, outputs, inputs), weight)
    assert packed.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (1, 1), (40, 33), (257, 48), (80, 600)])
def test_a_product_is_that_of_exact_numbers(
    step: Library, variant: Any, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    if variant not in step.variants or not has_step(variant, dtype):
        pytest.skip(f"no {dtype} product in {variant} here")
    linear = StepLinear(
        CompiledPath(step, variant, dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    )
    rows = torch.randn(200, inputs)
    assert linear.bias is not None
    exact = rows.double() @ linear.plain().double().T + linear.bias[:outputs].double()
    together = linear(rows)
    rounding = 2**-8 if variant == "avx512_bf16" else 2**-20
    size = rows.abs().double() @ linear.plain().abs().double().T + 1
    assert float(((together - exact).abs() / size).max()) < rounding
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 97):
        assert same_bits(linear(rows[:count]), together[:count])


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, path: Any, value: float) -> None:
    config = {**TINY_CONFIGS["llama2"], "vocab_size": 1024}
    asked = set(probe_ids(1024, 1024, CPU)[0].tolist())
    unasked = next(one for one in range(1024) if one not in asked)
    tensors = tiny_tensors(config)
    tensors["model.embed_tokens.weight"][unasked, 3] = value
    directory = write_model(tmp_path / "model", config, tensors)
    with pytest.raises(NonFinite, match=r"model\.embed_tokens\.weight holds an infinity or a NaN.*--allow-nonfinite"):
        load(directory, path=path)
    model = load(directory, path=path, allow_nonfinite=True)  # the probe does not meet that row
    assert model.forward([1, 2, 3], model.new_cache(4)) is not None
    with pytest.raises(NonFinite, match="positions 1 to 1"):
        model.forward([unasked], advanced(model))


def advanced(model: Any) -> Any:
    cache = model.new_cache(4)
    model.forward([1], cache)
    return cache


def wrong_dtype(weights: Any) -> None:
    weights.norm = weights.norm.double()


def wrong_shape(weights: Any) -> None:
    weights.blocks[1].down.weight = weights.blocks[1].down.weight[:, :-1].contiguous()


def not_contiguous(weights: Any) -> None:
    weights.norm = torch.stack([weights.norm, weights.norm], dim=1)[:, 0]


def misaligned(weights: Any) -> None:
    raw = torch.zeros(weights.norm.nbytes + 1, dtype=torch.uint8).numpy()[1:]
    weights.norm = torch.from_numpy(raw.view("float32"))


def plain_for_packed(weights: Any) -> None:
    weights.head.weight = torch.zeros(257, 48)


@pytest.mark.parametrize("spoil", [wrong_dtype, wrong_shape, not_contiguous, misaligned, plain_for_packed])
def test_a_tensor_that_the_kernels_would_misread_is_refused(
    step: Library, spoil: Callable[[Any], None], tmp_path: Path
) -> None:
    model = load(tiny_directory(tmp_path / "model", "llama2"))
    cache = model.new_cache(8)
    spoil(model.weights)
    with pytest.raises(TensorError, match=r"compiled step reads|do not begin"):
        model.forward(random_ids(3), cache)
    assert cache.length == 0


# The choice of a path.


def test_the_best_variant_is_taken(step: Library) -> None:
    for dtype in DTYPES:
        choice = choose_path("auto", LLAMA, dtype, CPU)
        able = [variant for variant in step.variants if has_step(variant, dtype)]
        assert (choice.path.name, choice.reason) == (f"compiled {able[-1]}", None)


def test_without_a_library_torch_computes_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "library", lambda: "no compiled step was built")
    model = load(tiny_directory(tmp_path / "model", "gpt2"))
    assert (model.path, model.not_compiled) == ("torch", "no compiled step was built")
    with pytest.raises(UsageError, match="path 'avx2' cannot be taken: no compiled step was built"):
        load(tiny_directory(tmp_path / "model", "gpt2"), path="avx2")


@pytest.mark.parametrize(
    ("config", "device", "said"),
    [
        ({"head_dim": 512}, "cpu", "head_dim is 512; the compiled step takes 256 at most"),
        ({}, "meta", "the compiled step is for the CPU; this model is on meta"),
    ],
)
def test_what_it_cannot_compute_goes_to_torch(config: dict[str, Any], device: str, said: str) -> None:
    parsed = parse_config({**TINY_CONFIGS["llama2"], **config}, "config.json")
    choice = choose_path("auto", parsed, torch.float32, torch.device(device))
    assert (choice.path.name, choice.reason) == ("torch", said)


def test_a_path_that_does_not_exist_or_run_is_refused(step: Library) -> None:
    wrong: Any = "avx9"
    with pytest.raises(UsageError, match=r"path is 'avx9'; give one of"):
        choose_path(wrong, LLAMA, torch.float32, CPU)
    with pytest.raises(UsageError, match=r"path 'avx512_bf16' cannot be taken: in torch\.float32"):
        choose_path("avx512_bf16", LLAMA, torch.float32, CPU)


def test_a_library_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "step.so"
    foreign.write_bytes(b"\x7fELF of another processor")
    monkeypatch.setattr(binding, "LIBRARY", foreign)
    found = library.__wrapped__()
    assert isinstance(found, str)
    assert found.startswith("the compiled step cannot be used: ")
    monkeypatch.setattr(binding, "LIBRARY", tmp_path / "absent.so")
    assert "no compiled step was built" in str(library.__wrapped__())


def test_a_library_of_other_structs_is_refused(step: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(binding.Call):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(binding, "STRUCTS", (*binding.STRUCTS[:-1], Longer))
    with pytest.raises(OSError, match="built from other sources"):
        Library(binding.LIBRARY)


def test_the_variant_and_the_build_are_in_the_identity(step: Library) -> None:
    model = tiny_model("gpt2")
    other = tiny_model("gpt2", path="torch")
    assert model.identity().numerics.startswith(f"bits:{model.path.removeprefix('compiled ')}:float32:{step.build}:")
    difference = model.identity().diff(other.identity())
    assert difference is not None
    assert difference.field == "numerics"


# Caches of another layout.


@pytest.mark.law(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_kind_of_cache_holds_the_same_bits(step: Library, dtype: Any) -> None:
    model, ids = tiny_model("smollm2", dtype), random_ids(TILE + 20)
    caches: list[Any] = [model.new_cache(TILE + 20), model.concat_cache(), model.static_cache(TILE + 20)]
    for start in range(0, TILE + 20, 46):
        scores = [model.forward(ids[:, start : start + 46], cache) for cache in caches]
        assert all(same_bits(scores[0], one) for one in scores[1:] if scores[0] is not None and one is not None)
    for layer in range(model.config.num_hidden_layers):
        first, *others = (cache.read(layer) for cache in caches)
        assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))
