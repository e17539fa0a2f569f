"""`kvouch ask`: documents read once, questions answered from forks, and every bad input one line."""

from pathlib import Path

import pytest
import torch

import kvouch.engine.model
from commands import check_refused, run, talking_model
from kvouch.cli.ask import layout, read_document
from kvouch.errors import FileError
from scripted import count_positions
from tiny_models import tiny_directory

DOCUMENT = "The harbour was built in 1742. " * 10
QUESTIONS = ("Who built it?", "Why?", "When was it built?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "harbour.txt"
    path.write_text(DOCUMENT)
    return path


def test_answers_go_to_stdout_and_the_rest_to_stderr(
    capsys: pytest.CaptureFixture[str], model: Path, document: Path
) -> None:
    arguments = ("ask", "--model", model, "--doc", document, "--max-new-tokens", "6", *QUESTIONS)
    ran, as_json = run(capsys, *arguments), run(capsys, *arguments, "--json").json
    texts = [answer["text"] for answer in as_json["answers"]]
    assert ran.status == 0
    assert ran.out == "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)
    for question, answer in zip(QUESTIONS, as_json["answers"], strict=True):
        after = ran.err.partition(question)[2]
        verdict = answer["verdict"]
        counts = f"hit: reused {verdict['reused_tokens']:,}, computed {verdict['computed_tokens']:,}; "
        assert after.lstrip("\n ").startswith(counts)
        assert verdict["kind"] == "hit"
    assert ran.err.count("cold ") == ran.err.count("bitwise") == len(QUESTIONS)
    assert "\nharbour.txt: " in ran.err


def test_the_document_is_computed_once(
    capsys: pytest.CaptureFixture[str], model: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in the model's step, and only then compared with what the command says."""
    loaded = kvouch.load(model)
    taken = count_positions(loaded)
    monkeypatch.setattr(kvouch.engine.model, "load", lambda *arguments, **named: loaded)
    found = run(capsys, "ask", "--doc", document, "--max-new-tokens", "1", "--json", *QUESTIONS).json
    assert loaded.tokenizer is not None
    prompts = [
        loaded.tokenizer.encode(loaded.tokenizer.render(layout([DOCUMENT], question)), special=False)
        for question in QUESTIONS
    ]
    shared = found["shared"]["tokens"]
    assert shared > len(DOCUMENT) - 10
    assert taken() == shared + sum(len(prompt) - shared for prompt in prompts)
    for prompt, answer in zip(prompts, found["answers"], strict=True):
        assert answer["verdict"]["reused_tokens"] == shared
        assert (
            answer["verdict"]["reused_tokens"] + answer["verdict"]["computed_tokens"]
            == answer["prompt_tokens"]
            == len(prompt)
        )
        assert answer["cold_first_token_s"] >= found["shared"]["prefill_s"]


def test_one_question_shares_the_document_and_not_itself(
    capsys: pytest.CaptureFixture[str], model: Path, document: Path
) -> None:
    found = run(capsys, "ask", "--model", model, "--doc", document, "--max-new-tokens", "1", "--json", "Why?").json
    (answer,) = found["answers"]
    assert (
        answer["verdict"]["reused_tokens"] == found["shared"]["tokens"] == found["shared"]["verdict"]["computed_tokens"]
    )
    assert answer["verdict"]["computed_tokens"] >= len("Why?")


def test_an_answer_does_not_depend_on_what_it_was_asked_with(
    capsys: pytest.CaptureFixture[str], model: Path, document: Path
) -> None:
    arguments = ("ask", "--model", model, "--doc", document, "--max-new-tokens", "8", "--json")
    together = run(capsys, *arguments, *QUESTIONS).json["answers"]
    for question, answer in zip(QUESTIONS, together, strict=True):
        (alone,) = run(capsys, *arguments, question).json["answers"]
        assert (alone["text"], alone["ids"]) == (answer["text"], answer["ids"])


def test_every_document_is_in_the_prompt_in_order() -> None:
    (message,) = layout(["first\n", "second"], " Which? ")
    assert message["content"] == "Document 1:\nfirst\n\nDocument 2:\nsecond\n\nAnswer from the text above: Which?"
    assert layout(["only"], "Q")[0]["content"].startswith("only\n\n")


def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read_document(tmp_path / "a.txt") == "abc"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read (No such file"), (b"ab\xff", "not UTF-8 (byte 2)"), (b" \n", "empty"), (b"", "empty")],
)
def test_a_document_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, said: str
) -> None:
    """Before the model is loaded: it does not exist here."""
    path = tmp_path / "doc.txt"
    if content is not None:
        path.write_bytes(content)
    check_refused(run(capsys, "ask", "--model", "none/here", "--doc", path, "Why?"), f"{path}: {said}", 1)
    with pytest.raises(FileError):
        read_document(path)


def test_a_directory_is_no_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check_refused(run(capsys, "ask", "--doc", tmp_path, "Why?"), f"{tmp_path}: cannot be read (Is a directory", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Why?", " "], "question 2 is empty"),
        (["Why?", "--temperature", "-0.5"], "temperature is -0.5"),
        (["Why?", "--temperature", "nan"], "temperature is nan"),
        (["Why?", "--top-p", "0"], "top_p is 0.0"),
        (["Why?", "--top-p", "1.5"], "top_p is 1.5"),
        (["Why?", "--seed", "-1"], "seed is -1"),
        (["Why?", "--max-new-tokens", "-3"], "max_new_tokens is -3"),
        (["Why?", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["Why?", "--stop", ""], "stop_texts is ('',)"),
        (["Why?", "--threads", "0"], "threads is 0"),
        (["Why?", "--threads", "-2"], "threads is -2"),
        (["Why?", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["Why?", "--model", "no-such-model"], "no model is called 'no-such-model'"),
    ],
)
def test_a_wrong_argument_is_named(
    capsys: pytest.CaptureFixture[str], model: Path, document: Path, arguments: list[str], said: str
) -> None:
    check_refused(run(capsys, "ask", "--model", model, "--doc", document, *arguments), said, 2)


def test_a_document_beyond_the_context_is_counted_before_any_work(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = kvouch.load(model)
    taken = count_positions(loaded)
    monkeypatch.setattr(kvouch.engine.model, "load", lambda *arguments, **named: loaded)
    path = tmp_path / "long.txt"
    around = len("user\n\n\nAnswer from the text above: Why?|\nassistant\n")  # | stands for the one id of <|end|>
    path.write_text("x" * (1024 - around + 7))
    check_refused(run(capsys, "ask", "--doc", path, "Why?"), f"{path}: with the question 1,031 tokens", 2)
    assert "7 too many" in run(capsys, "ask", "--doc", path, "Why?").err
    assert taken() == 0
    path.write_text("x" * (1024 - around))
    assert run(capsys, "ask", "--doc", path, "--json", "Why?").json["answers"][0]["finish"] == "context"


def test_a_model_without_a_tokenizer_says_what_takes_ids(
    capsys: pytest.CaptureFixture[str], document: Path, tmp_path: Path
) -> None:
    model = tiny_directory(tmp_path / "mute", "gpt2")
    check_refused(run(capsys, "ask", "--model", model, "--doc", document, "Why?"), "generate --ids", 2)


def test_threads_are_set(capsys: pytest.CaptureFixture[str], model: Path, document: Path) -> None:
    before = torch.get_num_threads()
    try:
        run(capsys, "ask", "--model", model, "--doc", document, "--threads", "3", "--max-new-tokens", "1", "Why?")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
