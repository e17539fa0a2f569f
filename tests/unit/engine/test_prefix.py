"""How far lists of ids agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvouch.engine.prefix import common_ids, common_length

IDS = st.lists(st.integers(0, 2), max_size=8)


@given(a=IDS, b=IDS)
def test_the_common_length_is_the_longest_one(a: list[int], b: list[int]) -> None:
    length = common_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
    assert common_length(tuple(a), b) == length


@given(prompts=st.lists(IDS, min_size=1, max_size=4))
def test_common_ids_leave_each_prompt_an_id_of_its_own(prompts: list[list[int]]) -> None:
    shared = common_ids(prompts)
    assert all(prompt[: len(shared)] == shared for prompt in prompts)
    shortest = min(map(len, prompts))
    assert len(shared) < shortest or shortest == 0
    longer = prompts[0][: len(shared) + 1]
    assert len(shared) >= shortest - 1 or any(prompt[: len(longer)] != longer for prompt in prompts)


@pytest.mark.parametrize(
    ("prompts", "shared"), [([[1, 2, 3]], [1, 2]), ([[1, 2, 3], [1, 2, 4]], [1, 2]), ([[5], [5]], []), ([[1], [2]], [])]
)
def test_common_ids(prompts: list[list[int]], shared: list[int]) -> None:
    assert common_ids(prompts) == shared
