"""A chat as ids: earlier ids stay as they are, and what the template writes between turns is found."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from kvouch.artefact.files import ArtefactFiles
from kvouch.engine.conversation import SENTINEL, Conversation
from kvouch.errors import UsageError
from kvouch.loader.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizer import CONFIG, END, END_ID, TEMPLATE, tiny_tokenizer, write_tokenizer

LAST_TURN_DIFFERS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last %} (now){% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THOUGHTS_ARE_DROPPED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THINKING_IS_PROMPTED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think></think>' }}{% endif %}"
)
ANSWERS_ARE_LEFT_OUT = (
    "{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ANSWERS_ARE_TRIMMED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path)


def encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, special=False))


def two_turns(
    tokenizer: Tokenizer, *, answer: str = "Fine.", ids: Sequence[int] | None = None, system: str | None = None
) -> tuple[Conversation, Conversation]:
    """The conversation after its first answer, and after its second question."""
    asked = Conversation.begin(system).asked("How are you?", tokenizer)
    answered = asked.answered(encoded(tokenizer, answer) if ids is None else ids, answer)
    return answered, answered.asked("And now?", tokenizer)


def test_the_first_prompt_is_the_whole_template(tokenizer: Tokenizer) -> None:
    asked = Conversation.begin("Be kind.").asked("Hello", tokenizer)
    assert asked.prompt == f"system\nBe kind.{END}\nuser\nHello{END}\nassistant\n"
    assert asked.ids == encoded(tokenizer, asked.prompt)


def test_the_second_turn_goes_behind_the_ids_of_the_first(tokenizer: Tokenizer) -> None:
    answered, asked = two_turns(tokenizer)
    between = f"{END}\nuser\nAnd now?{END}\nassistant\n"
    assert asked.ids == answered.ids + encoded(tokenizer, between)
    assert asked.ids == encoded(tokenizer, asked.prompt)


def test_generated_ids_stay_though_their_text_encodes_otherwise(tokenizer: Tokenizer) -> None:
    """The answer's ids are not those of its text here: they are kept, not encoded again."""
    answered, asked = two_turns(tokenizer, ids=(7, 7, 7))
    assert answered.ids[-3:] == (7, 7, 7)
    assert asked.ids[: len(answered.ids)] == answered.ids
    assert asked.ids != encoded(tokenizer, asked.prompt)


def test_the_end_of_a_turn_is_there_once(tokenizer: Tokenizer) -> None:
    _, asked = two_turns(tokenizer)
    assert asked.ids.count(END_ID) == 3
    assert (END_ID, END_ID) not in set(zip(asked.ids, asked.ids[1:], strict=False))


def test_many_turns(tokenizer: Tokenizer) -> None:
    conversation = Conversation.begin()
    for turn in range(5):
        before = conversation.ids
        asked = conversation.asked(f"question {turn}", tokenizer)
        assert asked.ids[: len(before)] == before
        conversation = asked.answered((turn, turn, turn), f"answer {turn}")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 5


@pytest.mark.parametrize("answer", ["", "two\nlines", f"quoting {SENTINEL} {SENTINEL}0", "{{ braces }}"])
def test_odd_answers(tokenizer: Tokenizer, answer: str) -> None:
    answered, asked = two_turns(tokenizer, answer=answer, ids=(9,))
    assert asked.ids[: len(answered.ids)] == answered.ids
    assert tokenizer.decode(asked.ids[len(answered.ids) :], skip_special=False).startswith(f"{END}\nuser\n")


def test_white_space_that_a_template_trims_does_not_matter(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=ANSWERS_ARE_TRIMMED)
    answered, asked = two_turns(tokenizer, answer=" Fine.\n")
    assert asked.ids[: len(answered.ids)] == answered.ids


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (LAST_TURN_DIFFERS, "Fine."),
        (THOUGHTS_ARE_DROPPED, "hm</think>Fine."),
        (THINKING_IS_PROMPTED, "Fine."),
        (ANSWERS_ARE_LEFT_OUT, "Fine."),
    ],
)
def test_where_the_template_rewrites_the_whole_is_encoded(tmp_path: Path, template: str, answer: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=template)
    answered, asked = two_turns(tokenizer, answer=answer)
    assert asked.ids == encoded(tokenizer, tokenizer.render(asked.messages, add_generation_prompt=True))
    assert asked.ids[: len(answered.ids)] != answered.ids


def test_a_date_that_moved_on_is_a_rewritten_turn(tmp_path: Path) -> None:
    """The prompt of the first answer said another day; what is in the cache does too."""
    write_tokenizer(tmp_path, template="{{ strftime_now('%d') }}\n" + TEMPLATE)
    days = iter([datetime(2031, 7, 5), *[datetime(2031, 7, 6)] * 9])
    tokenizer = load_tokenizer(ArtefactFiles(tmp_path), CONFIG, now=lambda: next(days))
    assert tokenizer is not None
    answered, asked = two_turns(tokenizer, ids=(7, 7))
    assert answered.prompt.startswith("05\n")
    assert asked.ids == encoded(tokenizer, asked.prompt)
    assert asked.prompt.startswith("06\n")


def test_a_template_that_would_rewrite_may_still_leave_an_answer_alone(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=THOUGHTS_ARE_DROPPED)
    answered, asked = two_turns(tokenizer, answer="Fine.")
    assert asked.ids[: len(answered.ids)] == answered.ids


def test_a_conversation_is_not_changed_by_asking(tokenizer: Tokenizer) -> None:
    answered, _ = two_turns(tokenizer)
    before = (answered.messages, answered.ids, answered.prompt)
    answered.asked("something else", tokenizer)
    assert (answered.messages, answered.ids, answered.prompt) == before


def test_an_empty_question_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="the question is empty"):
        Conversation.begin().asked(" \n", tokenizer)
