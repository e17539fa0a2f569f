"""`kvouch chat`: turns on top of turns, from a pipe and from a terminal, interrupted or not."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from commands import Ran, check_refused, run, talking_model
from kvouch.engine import loop
from kvouch.engine.backend import RollbackBackend
from tiny_models import tiny_directory
from tiny_tokenizer import END_ID, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


class Chat:
    """`kvouch chat` on lines that come from a pipe."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        self._capsys, self._monkeypatch, self._model = capsys, monkeypatch, model

    def piped(self, text: str | bytes, *options: str, errors: str = "strict") -> Ran:
        data = text.encode() if isinstance(text, str) else text
        stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors)
        self._monkeypatch.setattr(sys, "stdin", stdin)
        return run(self._capsys, "chat", "--model", self._model, "--max-new-tokens", "5", *options)

    def turns(self, text: str, *options: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.piped(text, "--json", *options).out.splitlines()]


@pytest.fixture
def stopping_chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chat:
    """With a model whose answers an id can end."""
    return Chat(capsys, monkeypatch, talking_model(tmp_path / "stops", stops=True))


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path) -> Chat:
    return Chat(capsys, monkeypatch, model)


def test_each_line_is_a_turn_and_nothing_else_is_written(chat: Chat) -> None:
    ran, turns = chat.piped("one\n\ntwo\n"), chat.turns("one\n\ntwo\n")
    assert (ran.status, [turn["question"] for turn in turns]) == (0, ["one", "two"])
    assert ran.out == "".join(turn["text"] + "\n" * (not turn["text"].endswith("\n")) for turn in turns)
    assert "> " not in ran.err


def test_a_turn_reuses_all_the_ids_before_it(chat: Chat) -> None:
    """All but the answer's last id, which was chosen and never asked."""
    turns = chat.turns("one\ntwo\nthree\n")
    for before, turn in pairwise(turns):
        held = before["prompt_tokens"] + before["new_tokens"] - 1
        assert turn["verdict"]["reused_tokens"] == held
        assert turn["verdict"]["reason"] == {"cause": "held"}
        assert turn["verdict"]["reused_tokens"] + turn["verdict"]["computed_tokens"] == turn["prompt_tokens"]


def test_the_answers_are_those_of_no_reuse(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    reused = chat.turns("one\ntwo\nthree\n")
    plain = RollbackBackend.next_logits

    def from_nothing(backend: RollbackBackend, ids: Sequence[int]) -> Tensor:
        backend.prefill([0] if ids[0] else [1])  # another first id: nothing of the cache is left
        return plain(backend, ids)

    monkeypatch.setattr(RollbackBackend, "next_logits", from_nothing)
    alone = chat.turns("one\ntwo\nthree\n")
    assert [turn["verdict"]["reused_tokens"] for turn in alone] == [0, 0, 0]
    assert [turn["ids"] for turn in alone] == [turn["ids"] for turn in reused]


def test_exit_ends(chat: Chat) -> None:
    assert [turn["question"] for turn in chat.turns("one\n/exit\ntwo\n")] == ["one"]


def test_a_system_message_comes_first(chat: Chat) -> None:
    (with_one,), (without,) = chat.turns("one\n", "--system", "Be brief."), chat.turns("one\n")
    assert with_one["prompt_tokens"] == without["prompt_tokens"] + len("system\nBe brief.|\n")


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the calls of `next_logits` at which Ctrl-C comes."""
    plain, calls, numbers = RollbackBackend.next_logits, [0], list[int]()

    def interrupted(backend: RollbackBackend, ids: Sequence[int]) -> Tensor:
        calls[0] += 1
        if calls[0] in numbers:
            raise KeyboardInterrupt
        return plain(backend, ids)

    monkeypatch.setattr(RollbackBackend, "next_logits", interrupted)
    return numbers


def test_ctrl_c_stops_an_answer_and_the_next_turn_builds_on_it(chat: Chat, interrupt_at: list[int]) -> None:
    interrupt_at.append(4)
    stopped, following = chat.turns("one\ntwo\n")
    assert (stopped["finish"], len(stopped["ids"])) == ("interrupted", 3)
    prompt = len("user\none|\nassistant\n")
    assert following["verdict"]["reused_tokens"] == prompt + 3 - 1
    assert following["prompt_tokens"] == prompt + 3 + len("|\nuser\ntwo|\nassistant\n")


def test_ctrl_c_before_the_first_token_forgets_the_question(chat: Chat, interrupt_at: list[int]) -> None:
    interrupt_at.append(1)
    stopped, following = chat.turns("one\ntwo\n")
    assert (stopped["finish"], stopped["ids"]) == ("interrupted", [])
    assert following["prompt_tokens"] == len("user\ntwo|\nassistant\n")


def test_ctrl_c_in_text_mode_keeps_the_lines_whole(chat: Chat, interrupt_at: list[int]) -> None:
    interrupt_at.append(3)
    ran = chat.piped("one\ntwo\n")
    assert ran.status == 0
    assert ran.out.endswith("\n")
    assert "stopped" in ran.err


def test_ctrl_c_behind_a_stop_id_does_not_keep_it(stopping_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the last token and the end of the answer; the template puts the stop id there."""
    plain, interrupted = RollbackBackend.next_logits, iter([True, False])

    def ends_at_once(backend: RollbackBackend, ids: Sequence[int]) -> Tensor:
        scores = plain(backend, ids)
        scores[END_ID if ids[-1] == 7 else 7] = 1e6
        return scores

    def answered(*arguments: Any) -> object:
        if next(interrupted):
            raise KeyboardInterrupt
        return answer(*arguments)

    answer = loop.Answering.answer
    monkeypatch.setattr(RollbackBackend, "next_logits", ends_at_once)
    monkeypatch.setattr(loop.Answering, "answer", answered)
    first, second = stopping_chat.turns("one\ntwo\n")
    assert (first["ids"], first["finish"]) == ([7], "interrupted")
    assert second["prompt_tokens"] == len("user\none|\nassistant\n") + 1 + len("|\nuser\ntwo|\nassistant\n")


def test_a_stop_id_is_not_doubled(stopping_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model ends its answer with the id that the template puts there too."""
    plain = RollbackBackend.next_logits

    def ends_at_once(backend: RollbackBackend, ids: Sequence[int]) -> Tensor:
        scores = plain(backend, ids)
        scores[END_ID] = 1e6
        return scores

    monkeypatch.setattr(RollbackBackend, "next_logits", ends_at_once)
    first, second = stopping_chat.turns("one\ntwo\n")
    assert (first["text"], first["ids"], first["stop_id"], first["finish"]) == ("", [], END_ID, "stop")
    assert second["verdict"]["reused_tokens"] == first["prompt_tokens"]
    assert second["prompt_tokens"] == len("user\none|\nassistant\n|\nuser\ntwo|\nassistant\n")


def test_a_template_that_rewrites_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %} {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    directory = write_tokenizer(tiny_directory(tmp_path / "model", "gpt2"), template=template)
    _, second = Chat(capsys, monkeypatch, directory).turns("one\ntwo\n")
    assert second["verdict"]["reused_tokens"] == len("user")
    assert second["verdict"]["reason"]["cause"] == "ids differ"
    assert second["verdict"]["reason"]["position"] == 4


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_named(chat: Chat, errors: str) -> None:
    ran = chat.piped(b"\xff\n", errors=errors)
    check_refused(ran, "standard input: not UTF-8", 1)


def test_a_turn_beyond_the_context_ends_a_piped_chat(chat: Chat) -> None:
    check_refused(chat.piped("x" * 1020 + "\n"), "1,024 in the model's context", 2)


def test_a_model_that_cannot_chat_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mute = tiny_directory(tmp_path / "mute", "gpt2")
    check_refused(Chat(capsys, monkeypatch, mute).piped("one\n"), "no tokenizer.json", 2)
    plain = write_tokenizer(tiny_directory(tmp_path / "plain", "gpt2"), template=None)
    check_refused(Chat(capsys, monkeypatch, plain).piped("one\n"), "no chat template", 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Ctrl-C drops a line, a turn that is too long is forgotten, Ctrl-D ends."""
    typed: Iterator[str | type[BaseException]] = iter(["one", KeyboardInterrupt, "x" * 1020, "two", EOFError])

    def typing(prompt: str = "") -> str:
        now = next(typed)
        if isinstance(now, str):
            return now
        raise now

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typing)
    ran = run(capsys, "chat", "--model", model, "--max-new-tokens", "5", "--json")
    first, second = (json.loads(line) for line in ran.out.splitlines())
    assert (ran.status, first["question"], second["question"]) == (0, "one", "two")
    assert second["verdict"]["reused_tokens"] == first["prompt_tokens"] + first["new_tokens"] - 1
    assert "Ctrl-D or /exit ends the chat" in ran.err
    assert "the question is forgotten" in ran.err
    assert ran.err.count("> ") == 5
