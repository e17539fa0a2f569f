"""`kvouch manifest` and `kvouch explain`, as they are typed."""

import json
import shutil
from pathlib import Path

import pytest

from commands import run
from kvouch.cli.differences import of_fields
from kvouch.contract import Grade, Hit, Miss, Reason
from kvouch.engine.model import load
from tiny_adapters import write_adapter
from tiny_models import tiny_directory
from tiny_tokenizer import write_tokenizer

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tiny_directory(tmp_path / "model", "llama2"))


def test_a_line_a_file_and_the_digest(capsys: Capture, model: Path) -> None:
    ran = run(capsys, "manifest", model)
    *files, last = ran.out.splitlines()
    assert len(files) == len([path for path in model.rglob("*") if path.is_file()])
    assert last.endswith(str(model))
    assert len(last.split()[0]) == 64
    assert any(line.split()[2:] == ["weights", "model.safetensors"] for line in files)


def test_a_manifest_is_checked(capsys: Capture, model: Path, tmp_path: Path) -> None:
    written = run(capsys, "manifest", model, "--json")
    path = tmp_path / "manifest.json"
    path.write_text(written.out)
    assert run(capsys, "manifest", model, "--check", path).status == 0
    (model / "README.md").write_text("words")
    assert run(capsys, "manifest", model, "--check", path).status == 0
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    ran = run(capsys, "manifest", model, "--check", path)
    assert ran.status == 1
    assert "differ: config.json (config): sha256" in ran.err
    assert "config.json (config)" in ran.err
    assert ran.err.count("\n") == 1


def test_an_adapter_has_a_manifest_as_well(capsys: Capture, tmp_path: Path) -> None:
    found = run(capsys, "manifest", write_adapter(tmp_path / "a"), "--json").json
    assert {file["role"] for file in found["files"]} == {"adapter"}


def test_two_models_and_the_field_that_differs(capsys: Capture, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    assert run(capsys, "explain", model, other).out == "no difference\n"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    (other / "README.md").write_text("words")
    ran = run(capsys, "explain", model, other)
    assert ran.status == 1
    lines = ran.out.splitlines()
    assert lines[0].startswith("config.json (config): sha256 ")
    assert lines[1] == "  rope_theta: 10000.0, 5.0"
    assert lines[2] == "README.md: only in the second (no part of the computation)"


def test_two_identities(capsys: Capture, model: Path, tmp_path: Path) -> None:
    paths = []
    for number, scale in enumerate((1.0, 0.5)):
        loaded = load(model)
        name = loaded.load_adapter(write_adapter(tmp_path / "a"), scale=scale)
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(loaded.identity(adapter=name).to_dict()))
    ran = run(capsys, "explain", *paths)
    assert ran.status == 1
    assert ran.out.splitlines()[0].startswith("adapters: ")


def test_two_verdicts(capsys: Capture, tmp_path: Path) -> None:
    a = Miss(reused_tokens=0, computed_tokens=9, reason=Reason(cause="identity", field="weights"), grade=Grade())
    b = Hit(reused_tokens=8, computed_tokens=1, reason=Reason(cause="held"), grade=Grade())
    for name, verdict in (("a", a), ("b", b)):
        (tmp_path / name).write_text(json.dumps(verdict.to_dict()))
    lines = run(capsys, "explain", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert 'kind: "miss", "hit"' in lines
    assert 'reason.field: "weights", absent' in lines


@pytest.mark.parametrize("content", ["", "[]", "{}", "\ud800", '{"schema": "kvouch/identity/1"}'], ids=ascii)
def test_what_can_not_be_explained_is_one_line(content: str, capsys: Capture, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    for arguments in ((path, path), (model, path), (path, tmp_path / "none")):
        ran = run(capsys, "explain", *arguments)
        assert ran.status in (1, 2)
        assert ran.err.count("\n") == 1
    identity = tmp_path / "identity.json"
    identity.write_text(json.dumps(load(model).identity().to_dict()))
    assert run(capsys, "explain", model, identity).status == 2


@pytest.mark.parametrize(("a", "b"), [({"x": None}, {}), ({"x": 1}, {"x": 1.0}), ({"x": 1}, {"x": True})], ids=repr)
def test_fields_that_python_takes_for_equal_differ(a: dict[str, object], b: dict[str, object]) -> None:
    assert len(of_fields(a, b)) == 1
    assert of_fields(a, a) == []


def test_a_scale_without_an_adapter_is_wrong_usage(capsys: Capture, model: Path) -> None:
    ran = run(capsys, "generate", "a", "--model", model, "--adapter-scale", "0.5")
    assert (ran.status, ran.err) == (2, "kvouch: --adapter-scale needs an --adapter\n")
