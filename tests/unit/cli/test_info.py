"""`kvouch info`: what this machine and a loaded model are."""

from pathlib import Path

import pytest
import torch

import kvouch
from commands import check_refused, run, talking_model


def test_the_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "info", "--json").json
    assert list(found) == ["machine"]
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_described_as_it_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str) -> None:
    directory = talking_model(tmp_path / "tiny")
    found = run(capsys, "info", "--model", directory, "--dtype", dtype, "--json").json["model"]
    model = kvouch.load(directory, dtype=dtype)  # type: ignore[arg-type]
    assert found["weights_bytes"] == model.weights.nbytes
    cache = model.new_cache(1024)
    assert found["cache_bytes_per_position"] * cache.capacity == cache.nbytes
    assert (found["path"], found.get("not_compiled")) == (model.path, model.not_compiled)
    assert (found["dtype"], found["grade"], found["family"]) == (dtype, str(model.grade), "llama")
    assert (found["context_tokens"], found["tokenizer"], found["chat_template"]) == (1024, True, True)


def test_the_torch_path_says_why_and_how_many_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = talking_model(tmp_path / "tiny")
    found = run(capsys, "info", "--model", directory, "--path", "torch", "--json").json["model"]
    model = kvouch.load(directory, path="torch")
    assert (found["path"], found["not_compiled"]) == ("torch", "asked for")
    assert found["linear_rows"] == model.weights.arithmetic.linear_rows
    assert found["attention_rows"] == model.weights.arithmetic.attention_rows


def test_the_lines_are_aligned_and_short(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run(capsys, "info", "--model", talking_model(tmp_path / "tiny"))
    lines = [line for line in ran.out.splitlines() if line and str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    column = len("cache_bytes_per_position") + 2
    assert all(line[column] != " " and line[column - 1] == " " for line in lines)
    assert ran.err == ""


@pytest.mark.parametrize(
    ("option", "value", "said"), [("--threads", "0", "threads is 0"), ("--device", "x", "device 'x'")]
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str, said: str
) -> None:
    check_refused(run(capsys, "info", "--model", tmp_path, option, value), said, 2)
