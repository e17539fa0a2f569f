"""Stop texts: never shown, not even in part, and the same however the text was cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvouch.engine.stream import AnswerStream, StopFilter
from kvouch.errors import UsageError


def out(stop_texts: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What each piece sets free, and at last the flush."""
    filtered = StopFilter(stop_texts)
    return [*(filtered.feed(piece) for piece in pieces), filtered.flush()], filtered.stopped


@pytest.mark.parametrize(
    ("stop_texts", "pieces", "wanted", "stopped"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["bc"], ["a", "b", "c", "d"], ["a", "", "", "", ""], True),
        (["bc"], ["a", "b", "d"], ["a", "", "bd", ""], False),
        (["bc"], ["a", "b"], ["a", "", "b"], False),
        (["\n\n"], ["one\n", "two\n\nthree"], ["one", "\ntwo", ""], True),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], True),
        (["xyz", "y"], ["wxyz"], ["wx", ""], True),
        (["yz", "xyz"], ["w", "xyz"], ["w", "", ""], True),
    ],
)
def test_what_goes_out(stop_texts: list[str], pieces: list[str], wanted: list[str], stopped: bool) -> None:
    assert out(stop_texts, pieces) == (wanted, stopped)


@given(
    text=st.text("ab", max_size=24),
    stop_texts=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_the_result_does_not_depend_on_the_cuts(text: str, stop_texts: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    found, stopped = out(stop_texts, pieces)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stop_texts)]
    if not ends:
        assert (stopped, "".join(found)) == (False, text)
        return
    longest = max(len(stop) for stop in stop_texts if text[: ends[0]].endswith(stop))
    assert (stopped, "".join(found)) == (True, text[: ends[0] - longest])


@given(text=st.text("ab", max_size=24), stop=st.text("ab", min_size=1, max_size=4))
def test_nothing_is_held_back_longer_than_needed(text: str, stop: str) -> None:
    filtered, shown = StopFilter([stop]), ""
    for index, letter in enumerate(text):
        shown += filtered.feed(letter)
        if filtered.stopped:
            return
        held = text[len(shown) : index + 1]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start : index + 1]) for start in range(len(shown)))


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="stop texts need a tokenizer"):
        AnswerStream(None, [1], ["x"])
    assert AnswerStream(None, [1], []).step(5) == ""
