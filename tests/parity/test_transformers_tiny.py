"""Tiny models of every family give the scores of transformers and of the plain uncached pass."""

import copy
from pathlib import Path

import pytest
import torch

from kvouch.artefact.files import ArtefactFiles
from kvouch.contract import TILE
from kvouch.engine.backend import CachedBackend
from kvouch.engine.model import load
from kvouch.engine.transformers_backend import TransformersBackend
from kvouch.errors import ContextOverflow, InvalidIds
from kvouch.loader.config import parse_config
from kvouch.loader.source import read_tensors
from kvouch.models.oracle import forward_uncached
from kvouch.models.paths import PathName
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from tiny_models import random_ids, tiny_directory, tiny_model, write_model

transformers = pytest.importorskip("transformers", reason="transformers is an extra: pip install 'kvouch[test]'")

LENGTH = TILE + 40


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_scores_equal_those_of_transformers(family: str, path: PathName, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path, family)
    ids = random_ids(LENGTH)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(ids).logits
    model = tiny_model(family, path=path)
    ours = model.forward(ids, model.static_cache(LENGTH), scores="all")
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_scores_equal_those_of_the_uncached_pass(family: str, path: PathName, tmp_path: Path) -> None:
    files = ArtefactFiles(tiny_directory(tmp_path, family))
    config = parse_config(files.json("config.json"), "config.json")
    ids = random_ids(LENGTH)
    plain = forward_uncached(ids, read_tensors(files, config.family), config)
    model = tiny_model(family, path=path)
    ours = model.forward(ids, model.concat_cache(), scores="all")
    assert ours is not None
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("family", ["llama3", "linear_rope", "smollm2"])
def test_newer_rope_parameters_compute_what_the_older_fields_do(family: str, tmp_path: Path) -> None:
    old = TINY_CONFIGS[family]
    new = copy.deepcopy(old)
    scaling = new.pop("rope_scaling", {"rope_type": "default"})
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **scaling}
    new["rope_parameters"]["rope_type"] = new["rope_parameters"].pop("type", scaling.get("rope_type"))
    tensors = tiny_tensors(old)
    models = [load(write_model(tmp_path / name, config, tensors)) for name, config in (("old", old), ("new", new))]
    first, second = (model.forward(random_ids(50), model.concat_cache(), scores="all") for model in models)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_a_gpt2_directory_of_transformers_itself_loads(tmp_path: Path) -> None:
    """As `save_pretrained` writes it: the `transformer.` prefix, the tied head, every field of its config."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=99)
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model, ids = load(tmp_path), random_ids(100, vocabulary=99)
    ours = model.forward(ids, model.static_cache(100), scores="all")
    assert ours is not None
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_llama_directory_of_transformers_itself_loads(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 512, "head_dim": 12}
    window = {"sliding_window": None} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(**sizes, **rest, **window)
    torch.manual_seed(3)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    model, ids = load(tmp_path), random_ids(100, vocabulary=99)
    ours = model.forward(ids, model.static_cache(100), scores="all")
    assert ours is not None
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "smollm2"])
def test_the_library_behind_the_contract_gives_the_same_ids(family: str, tmp_path: Path) -> None:
    """The chapter's baseline: the full sequence every time, and nothing kept."""
    theirs = TransformersBackend(tiny_directory(tmp_path, family), dtype=torch.float32)
    ours = CachedBackend(tiny_model(family))
    ids: list[int] = random_ids(20)[0].tolist()
    for _ in range(8):
        found, wanted = ours.next_logits(ids), theirs.next_logits(ids)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        ids.append(int(wanted.argmax()))
    assert (theirs.counters.calls, theirs.counters.positions) == (8, sum(range(20, 28)))
    assert theirs.verdict.reused_tokens == 0
    for wrong, error in (([], InvalidIds), ([257], InvalidIds), ([0] * 2000, ContextOverflow)):
        with pytest.raises(error):
            theirs.next_logits(wrong)
