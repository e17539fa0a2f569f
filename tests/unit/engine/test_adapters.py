"""LoRA adapters: the arithmetic against merged weights, several at once, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvouch.engine import computation
from kvouch.engine.backend import CachedBackend, RollbackBackend, UncachedBackend
from kvouch.engine.model import Model, load
from kvouch.errors import AdapterError, FileError, KvouchError, UnknownAdapter, UsageError
from kvouch.models.oracle import forward_uncached
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from kvouch.numerics.bits import same_bits
from kvouch.numerics.probe import probe_ids
from tiny_adapters import CONFIG, LLAMA_TARGETS, lora_tensors, write_adapter, write_gpt2_adapter
from tiny_models import own_weights, random_ids, tiny_directory, write_model

IDS: list[int] = random_ids(300, seed=5)[0].tolist()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {family: tiny_directory(root / family, family) for family in ("llama2", "gpt2")}


@pytest.fixture
def model(bases: dict[str, Path]) -> Model:
    return load(bases["llama2"])


def merged(family: str, adapter: dict[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The base's tensors with W + s B A in the place of W."""
    tensors = tiny_tensors(TINY_CONFIGS[family])
    for name, a in adapter.items():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").removeprefix("transformer.")
        change = scaling * adapter[name.replace("lora_A", "lora_B")] @ a
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + (change.T if family == "gpt2" else change)
    return tensors


@pytest.mark.parametrize("family", ["llama2", "gpt2"])
@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_scores_are_those_of_merged_weights(family: str, scale: float, bases: dict[str, Path], tmp_path: Path) -> None:
    directory = write_gpt2_adapter(tmp_path / "a") if family == "gpt2" else write_adapter(tmp_path / "a")
    model = load(bases[family])
    backend = UncachedBackend(model.bind(adapter=model.load_adapter(directory, scale=scale)))
    found = backend.next_logits(IDS[:40])
    tensors = merged(family, load_file(directory / "adapter_model.safetensors"), scale * 2.0)  # alpha 8, rank 4
    wanted = forward_uncached(torch.tensor([IDS[:40]]), tensors, model.config)[0, -1]
    assert torch.allclose(found, wanted, atol=2e-4)
    plain = UncachedBackend(model).next_logits(IDS[:40])
    assert (found - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    ("fields", "rank", "scaling"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        ({"lora_alpha": 6, "r": 3}, 3, 2.0),
        ({"alpha_pattern": {"down_proj": 16, "q_proj": 16}}, 4, 4.0),
        ({"rank_pattern": {r".*(q|down)_proj": 2}}, 2, 4.0),
        ({"target_modules": r".*\.(q_proj|down_proj)"}, 4, 2.0),
        ({"target_modules": ["model.layers.0.self_attn.q_proj", "q_proj", "mlp.down_proj"]}, 4, 2.0),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_the_options_that_plain_lora_has(
    fields: dict[str, Any], rank: int, scaling: float, model: Model, tmp_path: Path
) -> None:
    tensors = lora_tensors(LLAMA_TARGETS, rank=rank)
    backend = UncachedBackend(model.bind(adapter=model.load_adapter(write_adapter(tmp_path / "a", tensors, **fields))))
    wanted = forward_uncached(torch.tensor([IDS[:20]]), merged("llama2", tensors, scaling), model.config)[0, -1]
    assert torch.allclose(backend.next_logits(IDS[:20]), wanted, atol=2e-4)


@pytest.mark.law(1)
@pytest.mark.parametrize("family", ["llama2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_change_no_bit_with_an_adapter(family: str, dtype: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    directory = write_gpt2_adapter(tmp_path / "a") if family == "gpt2" else write_adapter(tmp_path / "a")
    model = load(bases[family], dtype=dtype)
    bound = model.bind(adapter=model.load_adapter(directory))
    assert bound.grade.name == "bitwise"
    wanted = UncachedBackend(bound).next_logits(IDS)
    backend = RollbackBackend(bound)
    stops = [1, 2, 5, 9, 40, 41, 73, 256, 257, 290, 299]
    for stop in stops:
        backend.prefill(IDS[:stop])
    assert same_bits(backend.next_logits(IDS), wanted)
    assert backend.verdict.reused_tokens == 299


def test_several_at_once_and_the_base_held_once(model: Model, tmp_path: Path) -> None:
    other = lora_tensors(LLAMA_TARGETS, seed=9)
    names = [
        model.load_adapter(write_adapter(tmp_path / "a")),
        model.load_adapter(write_adapter(tmp_path / "b", other)),
    ]
    backends = {name: RollbackBackend(model.bind(adapter=name)) for name in (None, *names)}
    wanted = {name: UncachedBackend(model.bind(adapter=name)).next_logits(IDS[:30]) for name in backends}
    for stop in (5, 17, 30):
        for name, backend in backends.items():
            found = backend.next_logits(IDS[:stop])
            assert stop < 30 or same_bits(found, wanted[name])
    assert not same_bits(wanted["a"], wanted["b"])
    held = {id(tensor) for tensor in model.weights.tensors()}
    for name in names:
        adapted = list(model._adapters[name].computation.weights.tensors())
        assert held <= {id(tensor) for tensor in adapted}


def test_a_backend_of_one_adapter_refuses_the_state_of_another(model: Model, tmp_path: Path) -> None:
    other = lora_tensors(LLAMA_TARGETS, seed=9)
    a = model.load_adapter(write_adapter(tmp_path / "a"))
    b = model.load_adapter(write_adapter(tmp_path / "b", other))
    one, two = CachedBackend(model.bind(adapter=a)), CachedBackend(model.bind(adapter=b))
    one.prefill(IDS[:10])
    two.adopt(one.state)
    two.next_logits(IDS[:11])
    assert (two.verdict.kind, two.verdict.reason.field) == ("miss", "adapters")


def test_what_is_bound_to_an_unloaded_adapter_refuses(model: Model, tmp_path: Path) -> None:
    bound = model.bind(adapter=model.load_adapter(write_adapter(tmp_path / "a")))
    backend = RollbackBackend(bound)
    backend.next_logits(IDS[:4])
    model.unload_adapter("a")
    for use in (lambda: backend.next_logits(IDS[:5]), bound.identity, lambda: model.set_scale("a", 1.0)):
        with pytest.raises(UnknownAdapter, match="'a' is not loaded"):
            use()
    with pytest.raises(UnknownAdapter):
        model.bind(adapter="a")


def test_a_weight_of_an_adapter_that_is_written_to_is_seen(model: Model, tmp_path: Path) -> None:
    bound = model.bind(adapter=model.load_adapter(write_adapter(tmp_path / "a")))
    backend, plain = RollbackBackend(bound), RollbackBackend(model)
    for one in (backend, plain):
        one.prefill(IDS[:10])
    part: Any = next(iter(model._adapters["a"].parts.values()))[0]
    part.up.weight.mul_(1.5)
    backend.next_logits(IDS[:11])
    plain.next_logits(IDS[:11])
    assert (backend.verdict.kind, plain.verdict.kind) == ("miss", "hit")


Spoil = Callable[[dict[str, Any], dict[str, Tensor]], None]


def field(name: str, value: Any) -> Spoil:
    return lambda fields, tensors: fields.update({name: value})


def tensor(name: str, value: Tensor | None) -> Spoil:
    full = f"base_model.model.{name}"

    def spoil(fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value

    return spoil


Q = "model.layers.1.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Spoil, str]] = {
    "DoRA": (field("use_dora", True), "use_dora is True: not supported"),
    "saved modules": (field("modules_to_save", ["lm_head"]), "modules_to_save"),
    "trained biases": (field("bias", "all"), "bias is 'all'"),
    "biases of LoRA": (field("lora_bias", True), "lora_bias"),
    "some layers": (field("layers_to_transform", [0]), "layers_to_transform"),
    "trained tokens": (field("trainable_token_indices", [1]), "trainable_token_indices"),
    "an unknown option": (field("use_magic", 1), "use_magic is 1: unknown"),
    "another method": (field("peft_type", "IA3"), "peft_type is 'IA3'"),
    "no rank": (field("r", 0), "r is 0"),
    "a rank in text": (field("r", "4"), "r is '4'"),
    "no alpha": (field("lora_alpha", None), "lora_alpha is None"),
    "targets of no kind": (field("target_modules", None), "target_modules is None"),
    "a broken expression": (field("target_modules", "(q_proj"), "target_modules has"),
    "a pattern that is none": (field("rank_pattern", ["q_proj"]), "rank_pattern is"),
    "another rank": (field("r", 5), r"lora_A.weight is .*\[5, 48\] by this base"),
    "a missing tensor": (tensor(Q, None), "lora_A.weight missing"),
    "a module that is not meant": (field("target_modules", ["q_proj"]), "no product of this base"),
    "another base's width": (tensor(Q, torch.zeros(4, 64)), r"\[4, 64\]; \[4, 48\] by this base"),
    "another base's modules": (tensor("h.0.attn.lora_A.weight", torch.zeros(4, 48)), "no product of this base"),
    "an adapted head": (tensor("lm_head.lora_A.weight", torch.zeros(4, 48)), "lm_head"),
    "whole numbers": (tensor(Q, torch.zeros(4, 48, dtype=torch.int32)), "torch.int32"),
    "no number": (tensor(Q, torch.full((4, 48), float("nan"))), "an infinity or a NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_plain_lora_for_this_base_is_refused_by_name(case: str, model: Model, tmp_path: Path) -> None:
    spoil, message = REFUSED[case]
    fields, tensors = dict(CONFIG), lora_tensors(LLAMA_TARGETS)
    spoil(fields, tensors)
    with pytest.raises(AdapterError, match=message) as caught:
        model.load_adapter(write_adapter(tmp_path / "a", tensors, **fields))
    assert str(tmp_path) in str(caught.value)
    assert not model.adapters


def test_a_directory_that_is_no_adapter(model: Model, tmp_path: Path, bases: dict[str, Path]) -> None:
    with pytest.raises(FileError, match=r"adapter_config\.json"):
        model.load_adapter(bases["llama2"])
    with pytest.raises(FileError, match="no such"):
        model.load_adapter(tmp_path / "none")
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match="empty"):
        model.load_adapter(directory)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, True])
def test_a_scale_is_a_finite_number(scale: Any, model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scale is"):
        model.load_adapter(write_adapter(tmp_path / "a"), scale=scale)


@pytest.mark.law(3)
def test_a_failed_load_leaves_the_adapter_of_that_name(model: Model, tmp_path: Path) -> None:
    model.load_adapter(write_adapter(tmp_path / "a"))
    before = model.identity(adapter="a")
    with pytest.raises(KvouchError):
        model.load_adapter(write_adapter(tmp_path / "bad", use_dora=True), name="a")
    assert model.identity(adapter="a") is before


def test_zero_times_an_adapter_gives_the_base_and_is_another_identity(model: Model, tmp_path: Path) -> None:
    bound = model.bind(adapter=model.load_adapter(write_adapter(tmp_path / "a"), scale=0.0))
    assert torch.equal(UncachedBackend(bound).next_logits(IDS[:9]), UncachedBackend(model).next_logits(IDS[:9]))
    assert bound.identity() != model.identity()
    model.set_scale("a", -0.0)
    assert bound.identity().adapters[0].scale == 0.0


def test_files_beside_the_adapter_do_not_count(model: Model, tmp_path: Path) -> None:
    first = model.load_adapter(write_adapter(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("trained with care")
    second = model.load_adapter(tmp_path / "b")
    assert model.adapters[first] == model.adapters[second]
    tensors = load_file(tmp_path / "b" / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] += 1e-3
    save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="the name 'b' is taken by another adapter"):
        model.load_adapter(tmp_path / "b")
    model.load_adapter(tmp_path / "b", name="b")
    assert model.adapters[first] != model.adapters[second]
    assert own_weights(model).adapters == model.adapters


@pytest.mark.law(1)
def test_a_write_to_the_base_is_remembered_by_every_adapter(model: Model, tmp_path: Path) -> None:
    """Also by one that is scaled or loaded after it, where the probe would not meet the write."""
    name = model.load_adapter(write_adapter(tmp_path / "a"))
    before = model.identity(adapter=name)
    with torch.no_grad():
        weights: Any = model.weights
        weights.cosines[1000] *= 2
    model.set_scale(name, 1.0)
    changed = model.identity(adapter=name)
    assert changed.weights == model.identity().weights != before.weights
    other = model.load_adapter(write_adapter(tmp_path / "b"))
    assert model.identity(adapter=other).weights == changed.weights
    part: Any = next(iter(model._adapters[name].parts.values()))[0]
    part.up.weight.mul_(1.5)
    model.set_scale(name, 1.0)
    assert model.identity(adapter=name).adapters[0].digest.startswith("memory:")


@pytest.mark.law(3)
@pytest.mark.parametrize("part", ["memory_digest", "fingerprint", "probe"])
def test_a_look_that_is_interrupted_is_taken_again(
    part: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change is not forgotten because Ctrl-C came while it was measured."""

    def interrupted(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    if part == "probe":  # what is exact by construction is not probed
        model = load(tiny_directory(tmp_path / "model", "llama2"), path="torch")
    before = model.identity()
    with torch.no_grad():
        weights: Any = model.weights
        weights.cosines[1000] *= 2
    with monkeypatch.context() as patched:
        patched.setattr(f"kvouch.engine.computation.{part}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.identity()
    assert model.identity().weights.startswith("memory:")
    assert model.identity() != before


def test_a_write_through_data_reaches_the_identity_of_every_adapter(model: Model, tmp_path: Path) -> None:
    name = model.load_adapter(write_adapter(tmp_path / "a"))
    before = model.identity(adapter=name)
    down: Any = model.weights.blocks[0].linears()[-1]
    down.weight.data.mul_(1.02)
    model.fingerprint()
    assert model.identity(adapter=name).diff(before) is not None


def test_a_weight_without_a_version_is_refused_by_name(model: Model) -> None:
    weights: Any = model.weights
    with torch.inference_mode():
        weights.norm = weights.norm.clone()
    with pytest.raises(UsageError, match="made in inference mode, which has no version"):
        model.identity()


@pytest.mark.law(1)
def test_what_changes_in_the_middle_of_a_call_is_not_stored_under_the_old_identity(
    model: Model, tmp_path: Path
) -> None:
    """The call goes on with what it began with; the next one sees the change."""
    name = model.load_adapter(write_adapter(tmp_path / "a"))
    bound, ids = model.bind(adapter=name), random_ids(600)[0].tolist()

    def scale(*progress: Any) -> None:
        if model.adapters[name].scale == 1.0:
            model.set_scale(name, 3.0)

    backend = RollbackBackend(bound, progress=scale)
    backend.prefill(ids)
    model.set_scale(name, 1.0)
    scores = RollbackBackend(bound)
    scores.adopt(backend.state)
    assert same_bits(scores.next_logits([*ids, 3]), UncachedBackend(bound).next_logits([*ids, 3]))
    assert scores.verdict.kind == "hit"


@pytest.mark.law(1)
def test_a_thread_that_comes_while_a_change_is_measured_waits_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, entered, go_on = computation.memory_digest, Event(), Event()

    def slow(tensors: Any) -> str:
        entered.set()
        go_on.wait(10)
        return digest(tensors)

    backend = RollbackBackend(model)
    backend.prefill(IDS[:8])
    with torch.no_grad():
        weights: Any = model.weights
        weights.embedding *= 1.5
    monkeypatch.setattr(computation, "memory_digest", slow)
    first = Thread(target=model.identity)
    first.start()
    assert entered.wait(10)
    second = Thread(target=lambda: backend.next_logits(IDS[:9]))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert (backend.verdict.kind, backend.verdict.reason.field) == ("miss", "weights")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern has"),
        ({"target_modules": "a{99999999999999999999}"}, "target_modules has"),
        ({"target_modules": "(" * 3000 + ")" * 3000}, "target_modules has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_trains_against_another_base_and_what_is_no_expression(
    fields: dict[str, Any], message: str, model: Model, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=message):
        model.load_adapter(write_adapter(tmp_path / "a", **fields))


def test_names_salts_and_paths_of_no_kind(model: Model, tmp_path: Path) -> None:
    directory: Any = write_adapter(tmp_path / "a")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    wrong: Any = []
    with pytest.raises(UsageError, match="name is"):
        model.load_adapter(directory, name=wrong)
    with pytest.raises(UsageError, match="salt is"):
        model.bind(salt=wrong)
    with pytest.raises(UsageError, match="scale is"):
        model.load_adapter(directory, scale=10**400)
    for path in (tmp_path / "loop", "a\0b"):
        with pytest.raises(FileError):
            model.load_adapter(path)


@pytest.mark.law(1)
def test_an_adapter_computes_with_the_base_that_there_is(tmp_path: Path) -> None:
    """A row that the probe does not read, in a tensor that takes the place of another: seen, and computed with."""
    config = {**TINY_CONFIGS["llama2"], "vocab_size": 1024}
    model = load(write_model(tmp_path / "model", config, tiny_tensors(config)))
    asked = set(probe_ids(1024, 1024, torch.device("cpu"))[0].tolist())
    row = next(one for one in range(1024) if one not in asked)
    ids = [row] * 5 + [1, 2, 3]
    bound = model.bind(adapter=model.load_adapter(write_adapter(tmp_path / "a")))
    before = UncachedBackend(bound).next_logits(ids)
    weights: Any = model.weights
    changed = weights.embedding.clone()
    changed[row] *= 3
    weights.embedding = changed
    backend = RollbackBackend(bound)
    backend.prefill(ids[:-1])
    after = UncachedBackend(bound).next_logits(ids)
    assert not same_bits(before, after)
    model.set_scale("a", 1.0)
    assert same_bits(backend.next_logits(ids), UncachedBackend(bound).next_logits(ids))
    assert same_bits(UncachedBackend(bound).next_logits(ids), after)
    assert backend.verdict.kind == "hit"
