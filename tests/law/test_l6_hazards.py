"""L6: for every field of an identity, one change that must be refused with the reason that names it."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvouch.artefact.manifest import Manifest
from kvouch.contract import Miss
from kvouch.engine.backend import CachedBackend, RollbackBackend, UncachedBackend
from kvouch.engine.bound import BoundModel
from kvouch.engine.model import Model, load
from kvouch.engine.state import State
from kvouch.errors import KvouchError
from kvouch.identity.identity import Identity
from kvouch.models.tiny import LAYERS
from kvouch.numerics.bits import same_bits
from tiny_adapters import lora_tensors, write_adapter
from tiny_models import random_ids, tiny_directory
from tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.law(6)

PREFIX: list[int] = random_ids(24, seed=1)[0].tolist()
ASKED = [*PREFIX, 7]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tiny_directory(tmp_path_factory.mktemp("base") / "model", "llama2"))


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """The model's directory once more, to be changed."""
    return shutil.copytree(directory, tmp_path / "copy")


def fresh(directory: Path, **options: Any) -> Model:
    return load(directory, **options)


def state_of(model: Model | BoundModel) -> State:
    backend = RollbackBackend(model)
    backend.prefill(PREFIX)
    return backend.state


def judged(state: State, model: Model | BoundModel) -> CachedBackend:
    """A backend of `model` that was given the state, and was then asked one id more."""
    backend = CachedBackend(model)
    backend.adopt(state)
    scores = backend.next_logits(ASKED)
    assert same_bits(scores, UncachedBackend(model).next_logits(ASKED))
    return backend


def edited(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path.parent


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


Change = Callable[[Path, Path], tuple[State, Model | BoundModel]]
"""From the base's directory and a copy of it: a state, and the model that must refuse it."""


def one_bit_of_a_weight(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    flip_bit(copy / "model.safetensors", 8 * (copy / "model.safetensors").stat().st_size - 32)
    return state_of(fresh(base)), fresh(copy)


def one_layer_scaled_in_memory(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    model = fresh(base)
    state = state_of(model)
    down: Any = model.weights.blocks[1].linears()[-1]
    down.weight.mul_(1.02)
    return state, model


def another_adapter_under_the_same_name(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    model = fresh(base)
    model.load_adapter(write_adapter(copy / "a"), name="a")
    bound = model.bind(adapter="a")
    state = state_of(bound)
    tensors = lora_tensors({"self_attn.q_proj": (48, 48), "mlp.down_proj": (48, 80)}, seed=1)
    model.load_adapter(write_adapter(copy / "a", tensors), name="a")
    return state, bound


def the_same_adapter_with_another_scale(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    model = fresh(base)
    bound = model.bind(adapter=model.load_adapter(write_adapter(copy / "a")))
    state = state_of(bound)
    model.set_scale("a", 0.5)
    return state, bound


def no_adapter(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    model = fresh(base)
    name = model.load_adapter(write_adapter(copy / "a"))
    return state_of(model.bind(adapter=name)), model


def another_tokenizer(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.rstrip() + "\n\n")
    return state_of(fresh(base)), fresh(copy)


def another_norm(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    return state_of(fresh(base)), fresh(edited(copy / "config.json", rms_norm_eps=1e-6))


def another_rope(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    return state_of(fresh(base)), fresh(edited(copy / "config.json", rope_theta=10001.0))


def another_dtype(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    return state_of(fresh(base, dtype="float16")), fresh(base, dtype="bfloat16")


def labelled(**fields: Any) -> Change:
    """A state that says of itself what these models never do."""

    def change(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
        model = fresh(base)
        state = state_of(model)
        state.identity = dataclasses.replace(state.identity, **fields)
        return state, model

    return change


def other_numbers_on_this_machine(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    """A write that no version tells, and the probe computed again."""
    model = fresh(base)
    state = state_of(model)
    down: Any = model.weights.blocks[1].linears()[-1]
    down.weight.data.mul_(1.02)
    before = model.identity()
    model.fingerprint()
    assert model.identity().weights == before.weights
    return state, model


def another_tenant(base: Path, copy: Path) -> tuple[State, Model | BoundModel]:
    model = fresh(base)
    return state_of(model.bind(salt="tenant-1")), model.bind(salt="tenant-2")


REFUSED: list[tuple[str, Change]] = [
    ("weights", one_bit_of_a_weight),
    ("weights", one_layer_scaled_in_memory),
    ("adapters", another_adapter_under_the_same_name),
    ("adapters", the_same_adapter_with_another_scale),
    ("adapters", no_adapter),
    ("tokenizer", another_tokenizer),
    ("config", another_norm),
    ("positions", another_rope),
    ("weights_dtype", another_dtype),
    ("cache_dtype", labelled(cache_dtype="float16")),
    ("numerics", labelled(numerics="bits:" + "0" * 64)),
    ("numerics", other_numbers_on_this_machine),
    ("salt", another_tenant),
]


@pytest.mark.parametrize(("field", "change"), REFUSED, ids=[f"{f}-{c.__name__}" for f, c in REFUSED])
def test_a_state_of_another_computation_is_a_miss_that_names_the_field(
    field: str, change: Change, directory: Path, copy: Path
) -> None:
    state, model = change(directory, copy)
    backend = judged(state, model)
    verdict = backend.verdict
    assert isinstance(verdict, Miss)
    assert (verdict.reused_tokens, verdict.computed_tokens) == (0, len(ASKED))
    if field == "salt":
        assert verdict.reason.cause == "no entry"
        assert "salt" not in verdict.explain()
        assert "tenant" not in json.dumps(verdict.to_dict())
        assert "salt" in verdict.explain(operator=True)
    else:
        assert (verdict.reason.cause, verdict.reason.field) == ("identity", field)
        assert field in verdict.explain()
    assert backend.counters.reuses == 0


def test_every_field_has_a_row() -> None:
    """A field that is added without a change that it refuses is not believed."""
    assert {field for field, _ in REFUSED} == {field.name for field in dataclasses.fields(Identity)}


def moved(base: Path, copy: Path) -> Path:
    return copy.rename(copy.parent / "elsewhere")


def readme_edited(base: Path, copy: Path) -> Path:
    (copy / "README.md").write_text("better words")
    return copy


def says_where_it_came_from(base: Path, copy: Path) -> Path:
    return edited(copy / "config.json", _name_or_path="/home/me/model", transformers_version="9.9.9")


def config_laid_out_otherwise(base: Path, copy: Path) -> Path:
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()), indent=7))
    return copy


@pytest.mark.law(9)
@pytest.mark.parametrize("change", [moved, readme_edited, says_where_it_came_from, config_laid_out_otherwise])
def test_a_state_of_the_same_computation_is_a_hit(
    change: Callable[[Path, Path], Path], directory: Path, copy: Path
) -> None:
    state = state_of(fresh(directory))
    backend = judged(state, fresh(change(directory, copy)))
    assert backend.verdict.kind == "hit"
    assert backend.verdict.reused_tokens == len(PREFIX)


@pytest.mark.law(9)
def test_another_name_for_the_same_adapter_is_a_hit(directory: Path, copy: Path) -> None:
    model = fresh(directory)
    state = state_of(model.bind(adapter=model.load_adapter(write_adapter(copy / "a"))))
    write_adapter(copy / "b", base_model_name_or_path="another/base")
    backend = judged(state, model.bind(adapter=model.load_adapter(copy / "b", name="tuned")))
    assert backend.verdict.kind == "hit"


@pytest.mark.law(9)
def test_loading_and_unloading_adapters_leaves_the_base_alone(directory: Path, copy: Path) -> None:
    model = fresh(directory)
    state = state_of(model)
    model.load_adapter(write_adapter(copy / "a"))
    assert judged(state, model).verdict.kind == "hit"
    model.unload_adapter("a")
    assert judged(state, model).verdict.kind == "hit"


def test_a_b_a_with_the_state_given_up_between(directory: Path, copy: Path) -> None:
    """Checked against the restored entry, not against the last request."""
    model = fresh(directory)
    bound = model.bind(adapter=model.load_adapter(write_adapter(copy / "a"), scale=0.0))
    evicted = state_of(bound).fork()
    model.set_scale("a", 1.0)
    other = RollbackBackend(bound)
    other.next_logits(list(range(40)))
    other.adopt(evicted)
    other.next_logits(ASKED)
    assert (other.verdict.kind, other.verdict.reason.field) == ("miss", "adapters")


def test_no_flipped_bit_of_a_weight_file_has_the_same_digest(tmp_path: Path) -> None:
    """Every bit of a file of 1.2 kB, header and numbers."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(140, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(140)}, path)
    whole = path.read_bytes()
    digests = {Manifest.of(tmp_path).part("weights")}
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        digests.add(Manifest.of(tmp_path).part("weights"))
    assert len(digests) == 8 * len(whole) + 1 > 9_900


@pytest.mark.parametrize("part", range(12))
def test_no_model_with_a_flipped_bit_hits(part: int, directory: Path, copy: Path) -> None:
    """Loaded and asked: refused by the loader, or a miss."""
    path = copy / "model.safetensors"
    bits = 8 * path.stat().st_size
    flip_bit(path, 40 if part == 0 else bits - 1 - part * (bits // 13))
    try:
        model = fresh(copy)
    except KvouchError:
        return
    state = state_of(fresh(directory))
    backend = CachedBackend(model)
    backend.adopt(state)
    backend.next_logits(ASKED)
    assert (backend.verdict.kind, backend.verdict.reason.field) == ("miss", "weights")
    assert len(model.weights.blocks) == LAYERS


@pytest.mark.law(9)
def test_another_process_gives_the_same_identity(directory: Path) -> None:
    """Restarted, with another hash seed and assertions off: what it stored would be a hit here."""
    program = "import sys, kvouch; print(kvouch.load(sys.argv[1]).identity().digest)"
    ran = subprocess.run(
        [sys.executable, "-O", "-c", program, str(directory)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == fresh(directory).identity().digest
