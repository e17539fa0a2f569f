"""Weights that change in memory: what a version tells at once, what only the probe sees, and what neither does.

The table of docs/identity.md, row by row.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvouch.contract import Arithmetic, Grade
from kvouch.engine.backend import RollbackBackend, UncachedBackend
from kvouch.engine.model import Model, load
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from kvouch.numerics.bits import same_bits
from kvouch.numerics.probe import ProbeResult, probe_ids
from tiny_models import random_ids, tiny_directory, write_model

pytestmark = pytest.mark.law(1)
PREFIX: list[int] = random_ids(20, seed=3)[0].tolist()
FAMILIES = ["gpt2", "smollm2"]


@pytest.fixture(params=[(family, path) for family in FAMILIES for path in ("auto", "torch")], ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    family, path = request.param
    return load(tiny_directory(tmp_path / "model", family), path=path)


def loaded_again(model: Model, directory: Path) -> Model:
    family = "gpt2" if model.config.family == "gpt2" else "smollm2"
    return load(tiny_directory(directory, family), path="torch" if model.path == "torch" else "auto")


def product(model: Model) -> Any:
    return model.weights.blocks[1].linears()[-1]


def scale_a_product(model: Model) -> None:
    product(model).weight.mul_(1.02)


def write_one_number(model: Model) -> None:
    with torch.no_grad():
        weights: Any = model.weights
        weights.embedding[5, 7] += 1e-3


def write_a_row_of_positions(model: Model) -> None:
    """Far beyond the probe."""
    with torch.no_grad():
        model.weights.tables[0][1000] *= 1.5


def replace_the_tensor(model: Model) -> None:
    held = product(model)
    held.weight = held.weight.clone()


def replace_by_assignment(model: Model) -> None:
    """What `load_state_dict(assign=True)` does: other tensors in the place of these."""
    weights: Any = model.weights
    holder = nn.Module()
    holder.weight = nn.Parameter(weights.embedding.clone())
    holder.load_state_dict({"weight": weights.embedding + 1e-3}, assign=True)
    if weights.head.tensors[0] is weights.embedding:  # the packed head is what embeddings are looked up in
        weights.head.weight = holder.weight.detach()
        weights.embedding = weights.head.weight
    else:
        weights.embedding = holder.weight.detach()


def load_state_dict_in_place(model: Model) -> None:
    """A module around the very tensor: its state is copied into it."""
    weights: Any = model.weights
    holder = nn.Module()
    holder.register_buffer("embedding", weights.embedding)
    holder.load_state_dict({"embedding": weights.embedding * 2})


SEEN_AT_ONCE = [
    scale_a_product,
    write_one_number,
    write_a_row_of_positions,
    replace_the_tensor,
    replace_by_assignment,
    load_state_dict_in_place,
]


@pytest.mark.parametrize("change", SEEN_AT_ONCE)
def test_a_write_that_torch_sees_changes_the_identity_on_the_next_call(
    model: Model, change: Callable[[Model], None]
) -> None:
    backend = RollbackBackend(model)
    backend.prefill(PREFIX)
    before = model.identity()
    change(model)
    scores = backend.next_logits([*PREFIX, 7])
    assert (backend.verdict.kind, backend.verdict.reason.field) == ("miss", "weights")
    assert model.identity().weights.startswith("memory:")
    assert same_bits(scores, UncachedBackend(model).next_logits([*PREFIX, 7]))
    assert model.identity() != before
    backend.next_logits([*PREFIX, 7, 9])
    assert backend.verdict.kind == "hit"


def test_the_digest_of_memory_is_that_of_the_bytes(model: Model, tmp_path: Path) -> None:
    """The same change in another copy of the model gives the same identity, and back again is still another."""
    twin = loaded_again(model, tmp_path / "twin")
    for one in (model, twin):
        scale_a_product(one)
    assert model.identity() == twin.identity()
    write_one_number(twin)
    assert model.identity().weights != twin.identity().weights


def test_without_a_change_the_identity_is_the_same_object(model: Model) -> None:
    assert model.identity() is model.identity()
    assert model.identity(salt="a") == model.identity(salt="a")
    assert model.identity(salt="a") != model.identity(salt="b") != model.identity()


def data_of_a_product(model: Model) -> None:
    product(model).weight.data.mul_(1.02)


def data_of_a_row_of_positions(model: Model) -> None:
    """Beyond the probe: the tables have a digest of their own."""
    model.weights.tables[0].data[1000] *= 1.5


@pytest.mark.parametrize("change", [data_of_a_product, data_of_a_row_of_positions])
def test_a_write_through_data_is_seen_by_the_fingerprint_alone(model: Model, change: Callable[[Model], None]) -> None:
    backend = RollbackBackend(model)
    backend.prefill(PREFIX)
    before = model.identity()
    change(model)
    assert model.identity() is before
    taken = model.fingerprint()
    assert model.identity().numerics == f"bits:{model.weights.path.kernels}{taken}" != before.numerics
    backend.next_logits([*PREFIX, 7])
    assert (backend.verdict.kind, backend.verdict.reason.field) == ("miss", "numerics")


def test_a_row_that_the_probe_does_not_read_is_not_seen_through_data(tmp_path: Path) -> None:
    """As documented: neither a version nor the probe tells."""
    config = {**TINY_CONFIGS["llama2"], "vocab_size": 1024}
    model = load(write_model(tmp_path / "model", config, tiny_tensors(config)))
    asked = set(probe_ids(1024, 1024, torch.device("cpu"))[0].tolist())
    before, taken = model.identity(), model.fingerprint()
    weights: Any = model.weights
    weights.embedding.data[next(one for one in range(1024) if one not in asked)] *= 2
    assert model.fingerprint() == taken
    assert model.identity() is before


def test_the_fingerprint_is_the_same_in_every_load(model: Model, tmp_path: Path) -> None:
    twin = loaded_again(model, tmp_path / "twin")
    assert model.identity() == twin.identity()
    assert model.fingerprint() == twin.fingerprint()


def test_another_number_of_threads_with_the_same_bits_is_a_hit(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.prefill(PREFIX)
    torch.set_num_threads(3 if torch.get_num_threads() != 3 else 2)
    backend.next_logits([*PREFIX, 7])
    assert backend.verdict.kind == "hit"


def test_a_model_loaded_in_inference_mode_still_has_versions(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = load(tiny_directory(tmp_path / "model", "smollm2"))
    before = model.identity()
    scale_a_product(model)
    assert model.identity() != before


def test_at_grade_within_a_change_that_was_seen_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of threads the probe is taken again, and compared with the first one still."""
    within = ProbeResult(arithmetic=Arithmetic(), grade=Grade(name="within", tolerance=1e-3))
    monkeypatch.setattr("kvouch.engine.computation.probe", lambda *arguments, **named: within)
    model = load(tiny_directory(tmp_path / "model", "smollm2"), path="torch")
    before = model.identity()
    assert before.numerics.startswith("names:")
    model.fingerprint()
    assert model.identity() is before
    model.weights.tables[0].data.mul_(1.5)
    model.fingerprint()
    assert model.identity().numerics.startswith("moved:")
    torch.set_num_threads(3 if torch.get_num_threads() != 3 else 2)
    assert model.identity().numerics.startswith("moved:")
