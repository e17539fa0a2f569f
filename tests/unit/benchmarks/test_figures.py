"""Medians and ratios from series of seconds."""

import pytest
from benchmarks.figures import Series, compare, compare_all, spread


def series(peer: str, way: str, seconds: tuple[float, ...], *, number: int = 1, figure: str = "decode 16") -> Series:
    return Series(round=number, model="smollm2", dtype="float32", peer=peer, way=way, figure=figure, seconds=seconds)


def test_a_spread_keeps_median_extremes_and_count() -> None:
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert (found.median, found.min, found.max, found.samples) == (2.5, 1.0, 10.0, 4)


def test_no_samples_have_no_spread() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_the_ratio_takes_the_best_of_each_side_over_all_rounds() -> None:
    found = compare(
        [
            series("kvouch", "static", (1.0, 1.0)),
            series("transformers", "dynamic", (3.0,)),
            series("transformers", "static", (2.0,)),
            series("kvouch", "static", (1.0,), number=2),
            series("transformers", "dynamic", (3.0,), number=2),
            series("transformers", "static", (2.0,), number=2),
        ]
    )
    assert found is not None
    assert (found.ours, found.theirs, found.ratio) == ("kvouch static", "transformers static", 2.0)
    assert (found.ours_s, found.theirs_s) == (1.0, 2.0)
    assert found.contenders["kvouch static"].samples == 3


def test_the_median_of_rounds_compares_within_a_round() -> None:
    """A machine that slows down fourfold in the second round changes no ratio of a round."""
    found = compare(
        [
            series("kvouch", "static", (1.0,)),
            series("transformers", "dynamic", (1.5,)),
            series("kvouch", "static", (4.0,), number=2),
            series("transformers", "dynamic", (6.0,), number=2),
            series("kvouch", "static", (1.0,), number=3),
        ]
    )
    assert found is not None
    assert found.ratio_by_round == (1.5, 1.5)  # the third round lacks one side
    assert found.ratio_rounds_median == 1.5
    assert found.ratio == 3.75


@pytest.mark.parametrize("peer", ["kvouch", "transformers"])
def test_one_side_alone_is_not_compared(peer: str) -> None:
    assert compare([series(peer, "static", (1.0,))]) is None
    compared, alone = compare_all([series(peer, "static", (1.0,))])
    assert compared == []
    assert [(one.figure, list(one.contenders)) for one in alone] == [("decode 16", [f"{peer} static"])]


def test_both_sides_without_a_common_round_are_not_compared() -> None:
    assert compare([series("kvouch", "static", (1.0,)), series("transformers", "static", (1.0,), number=2)]) is None


def test_figures_stay_in_the_order_of_the_run() -> None:
    both = [
        series(peer, "static", (1.0,), figure=figure)
        for peer in ("kvouch", "transformers")
        for figure in ("prefill 512", "decode 16")
    ]
    assert [one.figure for one in compare_all(both)[0]] == ["prefill 512", "decode 16"]
