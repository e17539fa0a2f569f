"""`kvouch generate`: a text or ids, continued as they are."""

from pathlib import Path

import pytest

import kvouch
from commands import check_refused, run, talking_model
from tiny_models import tiny_directory

PROMPT = "abc"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "mute", "gpt2")


def greedy(directory: Path, ids: list[int], count: int) -> list[int]:
    """The best ids one after the other, with no cache kept between them."""
    model, found = kvouch.load(directory), list(ids)
    for _ in range(count):
        scores = model.forward(found, model.concat_cache())
        assert scores is not None
        found.append(int(scores[0].argmax()))
    return found[len(ids) :]


def test_text_is_continued_with_the_best_ids(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ("generate", "--model", model, "--max-new-tokens", "9", PROMPT)
    found, ran = run(capsys, *arguments, "--json").json, run(capsys, *arguments)
    assert found["ids"] == greedy(model, found["prompt_ids"], 9)
    assert ran.out == found["text"] + "\n" * (not found["text"].endswith("\n"))
    assert PROMPT not in ran.out
    assert "miss: reused 0, computed 3; no entry" in ran.err
    assert (found["verdict"]["reused_tokens"], found["verdict"]["computed_tokens"], found["finish"]) == (0, 3, "length")
    assert (found["model"], found["dtype"], found["grade"]) == (str(model), "float32", "bitwise")


def test_ids_are_continued_like_the_text_that_they_spell(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    from_text = run(capsys, "generate", "--model", model, "--max-new-tokens", "5", "--json", PROMPT).json
    ids = ",".join(map(str, from_text["prompt_ids"]))
    from_ids = run(capsys, "generate", "--model", model, "--max-new-tokens", "5", "--json", "--ids", ids).json
    assert from_ids["ids"] == from_text["ids"]
    assert from_ids["text"] == from_text["text"]


def test_a_model_without_a_tokenizer_continues_ids_with_ids(capsys: pytest.CaptureFixture[str], mute: Path) -> None:
    ran = run(capsys, "generate", "--model", mute, "--ids", "5, 6,7", "--max-new-tokens", "4")
    assert [int(one) for one in ran.out.split()] == greedy(mute, [5, 6, 7], 4)


def test_a_stop_text_is_not_written(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    arguments = ("generate", "--model", model, "--max-new-tokens", "40", "--json", PROMPT)
    whole = run(capsys, *arguments).json["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut = run(capsys, *arguments, "--stop", stop).json
    assert len(stop) == 2
    assert (cut["text"], cut["finish"]) == (whole[: whole.index(stop)], "stop")


def test_a_seed_gives_the_same_answer_again(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    def ids(seed: int) -> list[int]:
        arguments = ("--temperature", "1.5", "--top-p", "0.95", "--seed", str(seed), "--max-new-tokens", "12")
        found: list[int] = run(capsys, "generate", "--model", model, *arguments, "--json", PROMPT).json["ids"]
        return found

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either PROMPT or --ids"),
        (["a", "--ids", "1"], "not both"),
        ([""], "PROMPT is empty"),
        (["--ids", ""], "--ids: item 1 is ''"),
        (["--ids", "1,x,3"], "--ids: item 2 is 'x'"),
        (["--ids", "1,-2"], "--ids: item 2 is '-2'"),
        (["--ids", "1,²"], "--ids: item 2 is '²'"),
        (["--ids", "1,2.5"], "--ids: item 2 is '2.5'"),
        (["--ids", "1,257"], "ids[1] is 257: outside the vocabulary [0, 257)"),
        (["--ids", ",".join(["1"] * 1030)], "1,030 ids asked, 1,024 in the model's context: 6 too many"),
        (["a\udcff"], "not UTF-8"),
        (["a", "--max-new-tokens", "-1"], "max_new_tokens is -1"),
    ],
)
def test_a_wrong_argument_is_named(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], said: str
) -> None:
    check_refused(run(capsys, "generate", "--model", model, *arguments), said, 2)


def test_a_model_without_a_tokenizer_takes_no_text(capsys: pytest.CaptureFixture[str], mute: Path) -> None:
    check_refused(run(capsys, "generate", "--model", mute, "a"), "give token ids with --ids", 2)
    check_refused(run(capsys, "generate", "--model", mute, "--ids", "1", "--stop", "x"), "stop texts need", 2)
