"""The loop on a backend that follows a script: what ends an answer, what is shown, what is counted."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvouch.engine.loop import generate
from kvouch.engine.request import Answer, Request, Token
from kvouch.engine.sampling import SamplingParams
from kvouch.errors import ContextOverflow, UsageError
from kvouch.loader.tokenizer import Tokenizer
from scripted import ScriptedBackend, SteppingClock
from tiny_tokenizer import END_ID, tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path)


def answer(
    backend: ScriptedBackend, request: Request, tokenizer: Tokenizer | None, context_tokens: int = 10_000
) -> tuple[list[Token], Answer]:
    events = generate(backend, request, tokenizer=tokenizer, context_tokens=context_tokens, clock=SteppingClock())
    *tokens, last = list(events)
    assert isinstance(last, Answer)
    whole = [token for token in tokens if isinstance(token, Token)]
    assert len(whole) == len(tokens)
    assert "".join(token.text for token in whole) == last.text
    return whole, last


def script(tokenizer: Tokenizer, text: str, *more: int) -> ScriptedBackend:
    return ScriptedBackend([*tokenizer.encode(text, special=False), *more])


def test_a_stop_id_ends_and_is_no_part_of_the_answer(tokenizer: Tokenizer) -> None:
    backend = script(tokenizer, "Hi!", END_ID, 0)
    tokens, found = answer(backend, Request(ids=(1, 2), stop_ids=frozenset({END_ID})), tokenizer)
    assert (found.text, found.finish, found.stop_id) == ("Hi!", "stop", END_ID)
    assert list(found.ids) == tokenizer.encode("Hi!")
    assert [token.id for token in tokens] == [*found.ids, END_ID]
    assert (found.prompt_tokens, found.new_tokens) == (2, 4)


def test_each_call_asks_for_everything_so_far(tokenizer: Tokenizer) -> None:
    backend = script(tokenizer, "abc")
    _, found = answer(backend, Request(ids=(7,), max_new_tokens=3), tokenizer)
    a, b, _ = found.ids
    assert backend.asked == [[7], [7, a], [7, a, b]]
    assert (found.finish, found.stop_id) == ("length", None)


@pytest.mark.parametrize(("context_tokens", "new"), [(4, 1), (6, 3), (100, 5)])
def test_a_full_context_ends(tokenizer: Tokenizer, context_tokens: int, new: int) -> None:
    """The last id needs no position: it is chosen, and never asked."""
    backend = script(tokenizer, "abcde", END_ID)
    backend._context_tokens = context_tokens
    request = Request(ids=(1, 2, 3, 4), max_new_tokens=5)
    _, found = answer(backend, request, tokenizer, context_tokens)
    assert (len(found.ids), found.finish) == (new, "context" if new < 5 else "length")


def test_a_prompt_beyond_the_context_is_the_backends_to_refuse(tokenizer: Tokenizer) -> None:
    backend = ScriptedBackend([1], context_tokens=2)
    with pytest.raises(ContextOverflow):
        answer(backend, Request(ids=(1, 2, 3)), tokenizer, 2)
    assert backend.asked == []


@pytest.mark.parametrize(
    ("stop_texts", "text", "finish", "calls"),
    [
        (("STOP",), "one ", "stop", 8),
        (("P now",), "one STO", "stop", 12),
        (("never",), "one STOP now", "length", 12),
        (("w!",), "one STOP now", "length", 12),
        (("one",), "", "stop", 3),
    ],
)
def test_stop_texts_that_span_tokens(
    tokenizer: Tokenizer, stop_texts: tuple[str, ...], text: str, finish: str, calls: int
) -> None:
    backend = script(tokenizer, "one STOP now")
    request = Request(ids=(1,), max_new_tokens=12, stop_texts=stop_texts)
    _, found = answer(backend, request, tokenizer)
    assert (found.text, found.finish, len(backend.asked)) == (text, finish, calls)
    assert len(found.ids) == calls


def test_what_was_held_back_comes_before_a_stop_id(tokenizer: Tokenizer) -> None:
    backend = script(tokenizer, "to ST", END_ID)
    request = Request(ids=(1,), stop_texts=("STOP",), stop_ids=frozenset({END_ID}))
    tokens, found = answer(backend, request, tokenizer)
    assert found.text == "to ST"
    assert [token.text for token in tokens[-3:]] == ["", "", "ST"]


def test_characters_are_shown_whole(tokenizer: Tokenizer) -> None:
    tokens, found = answer(script(tokenizer, "é€"), Request(ids=(1,), max_new_tokens=5), tokenizer)
    assert [token.text for token in tokens] == ["", "é", "", "", "€"]
    assert found.text == "é€"


def test_half_a_character_at_the_end_is_not_shown(tokenizer: Tokenizer) -> None:
    _, found = answer(script(tokenizer, "a€"), Request(ids=(1,), max_new_tokens=3), tokenizer)
    assert (found.text, len(found.ids)) == ("a", 3)


def test_without_a_tokenizer_there_are_ids_alone() -> None:
    _, found = answer(ScriptedBackend([5, 6]), Request(ids=(1,), max_new_tokens=2), None)
    assert (found.text, found.ids) == ("", (5, 6))
    with pytest.raises(UsageError, match="tokenizer"):
        answer(ScriptedBackend([5]), Request(ids=(1,), stop_texts=("x",)), None)


def test_the_verdict_is_that_of_the_first_call(tokenizer: Tokenizer) -> None:
    _, found = answer(script(tokenizer, "abc"), Request(ids=(1, 2, 3, 4), max_new_tokens=3), tokenizer)
    assert (found.verdict.reused_tokens, found.verdict.computed_tokens) == (0, 4)


@pytest.mark.parametrize(("new", "tokens_per_s"), [(1, None), (2, 1.0), (5, 4.0)])
def test_times_come_from_the_clock_that_is_given(tokenizer: Tokenizer, new: int, tokens_per_s: float | None) -> None:
    """It is looked at three times: at the start, at the first token, at the end."""
    _, found = answer(script(tokenizer, "abcde"), Request(ids=(1,), max_new_tokens=new), tokenizer)
    assert (found.first_token_s, found.tokens_per_s) == (1.0, tokens_per_s)


def test_each_step_is_sampled_with_its_own_number(tokenizer: Tokenizer) -> None:
    """Scores are the same at every step, so only the number can make the ids differ."""

    def ids(seed: int) -> Sequence[int]:
        request = Request(ids=(1,), max_new_tokens=12, sampling=SamplingParams(temperature=1.0, seed=seed))
        return answer(ScriptedBackend([3] * 12), request, tokenizer)[1].ids

    assert len(set(ids(0))) > 1
    assert ids(0) == ids(0)
    assert ids(0) != ids(1)


def test_leaving_early_asks_no_more(tokenizer: Tokenizer) -> None:
    backend = script(tokenizer, "abcde")
    events = generate(backend, Request(ids=(1,)), tokenizer=tokenizer, context_tokens=100, clock=SteppingClock())
    next(events)
    next(events)
    assert len(backend.asked) == 2


def test_each_token_has_its_log_probability(tokenizer: Tokenizer) -> None:
    """Of scores that are 1 for one id and 0 for 256 others."""
    tokens, _ = answer(script(tokenizer, "Hi"), Request(ids=(1,), max_new_tokens=2), tokenizer)
    assert [round(token.logprob, 5) for token in tokens] == [round(1 - math.log(math.e + 256), 5)] * 2


def test_a_caller_that_wants_no_more_ends_the_answer_whole(tokenizer: Tokenizer) -> None:
    backend, seen = script(tokenizer, "Hello"), []

    def cancelled() -> bool:
        seen.append(len(backend.asked))
        return len(backend.asked) == 3

    request = Request(ids=(1,), max_new_tokens=5)
    events = list(
        generate(backend, request, tokenizer=tokenizer, context_tokens=99, clock=SteppingClock(), cancelled=cancelled)
    )
    last = events[-1]
    assert isinstance(last, Answer)
    assert (last.finish, last.text, len(last.ids), seen) == ("cancelled", "Hel", 3, [1, 2, 3])
