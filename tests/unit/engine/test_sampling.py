"""Sampling against distributions worked out by hand, with no luck in it: every draw is fixed by seed and step."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvouch.engine import sampling
from kvouch.engine.sampling import SamplingParams, draw
from kvouch.errors import NonFinite, UsageError

DRAWS = 2000


def scores_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def sample(scores: Tensor, params: SamplingParams, *, step: int) -> int:
    return sampling.sample(scores, params, step=step).id


def shares(scores: Tensor, params: SamplingParams, draws: int = DRAWS) -> list[float]:
    """How often each id comes, over steps."""
    counts = [0] * len(scores)
    for step in range(draws):
        counts[sample(scores, params, step=step)] += 1
    return [count / draws for count in counts]


def brute_force(scores: Tensor, temperature: float, top_p: float) -> list[float]:
    """The distribution in plain Python: softmax, then the shortest list of likeliest ids that reaches top_p."""
    weights = [math.exp((score - max(scores.tolist())) / temperature) for score in scores.tolist()]
    probabilities = [weight / sum(weights) for weight in weights]
    kept, mass = set(), 0.0
    for index in sorted(range(len(probabilities)), key=lambda one: (-probabilities[one], one)):
        if mass >= top_p:
            break
        kept.add(index)
        mass += probabilities[index]
    return [probability / mass if index in kept else 0.0 for index, probability in enumerate(probabilities)]


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), SamplingParams(), step=0) == 1
    assert sample(torch.zeros(50_000), SamplingParams(), step=5) == 0
    assert sample(torch.tensor([-math.inf, -5.0, -4.0]), SamplingParams(), step=0) == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.3, 0.55, 0.8, 0.97, 1.0])
def test_ids_come_as_often_as_worked_out(temperature: float, top_p: float) -> None:
    scores = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 1.9])
    wanted = brute_force(scores, temperature, top_p)
    found = shares(scores, SamplingParams(temperature=temperature, top_p=top_p, seed=3))
    for probability, share in zip(wanted, found, strict=True):
        assert abs(share - probability) < 4.5 * math.sqrt(probability * (1 - probability) / DRAWS) + 1e-12


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-300, {1}), (0.4, {1}), (0.5, {1, 2}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_shortest_list_that_reaches_it(top_p: float, kept: set[int]) -> None:
    scores = scores_of(0.125, 0.45, 0.25, 0.175)
    found = shares(scores, SamplingParams(temperature=1.0, top_p=top_p), draws=300)
    assert {index for index, share in enumerate(found) if share} == kept


def test_of_equals_the_lower_id_is_kept() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert {sample(torch.zeros(4), params, step=step) for step in range(100)} == {0, 1}
    assert max(sample(torch.zeros(4096), params, step=step) for step in range(100)) < 2048


@pytest.mark.parametrize(("drawn", "chosen"), [(0.0, 1), (0.25, 1), (0.75, 3), (1 - 2**-53, 3)])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_an_impossible_id_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, drawn: float, chosen: int, top_p: float
) -> None:
    """Not even at the ends of what can be drawn, with impossible ids before, between and behind."""
    monkeypatch.setattr("kvouch.engine.sampling.draw", lambda seed, step: drawn)
    scores = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert sample(scores, SamplingParams(temperature=1.0, top_p=top_p), step=0) == chosen


def test_every_step_draws_alone() -> None:
    """What was sampled before, and how often, does not move a later step's draw; seed and step do."""
    scores, params = torch.linspace(0, 1, 1000), SamplingParams(temperature=1.0, seed=11)
    forwards = [sample(scores, params, step=step) for step in range(20)]
    backwards = [sample(scores, params, step=step) for step in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 10
    other = SamplingParams(temperature=1.0, seed=12)
    assert forwards != [sample(scores, other, step=step) for step in range(20)]
    torch.manual_seed(0)
    assert forwards == [sample(scores, params, step=step) for step in range(20)]


def test_draws_are_pinned_and_evenly_spread() -> None:
    """Another number here is another answer for everybody's seed."""
    assert (draw(0, 0), draw(0, 1), draw(1, 0)) == (
        0.8474377101753825,
        0.13564335611827116,
        0.29946671924267765,
    )
    found = sorted(draw(seed, step) for seed in range(20) for step in range(50))
    assert max(abs(value - index / 1000) for index, value in enumerate(found)) < 0.05


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_a_tiny_temperature_takes_the_best(temperature: float) -> None:
    scores = torch.tensor([1e30, -1e30, 2e30, 0.0])
    assert {sample(scores, SamplingParams(temperature=temperature), step=step) for step in range(20)} == {2}


@given(
    values=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 50),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
)
def test_only_ids_of_the_kept_list_come(values: list[float], temperature: float, top_p: float, seed: int) -> None:
    scores = torch.tensor(values)
    chosen = sample(scores, SamplingParams(temperature=temperature, top_p=top_p, seed=seed), step=0)
    weights = [math.exp((one - max(values)) / temperature) for one in values]
    likelier = [one for one in weights if one > weights[chosen] * (1 + 1e-12)]  # what no rounding makes equal
    assert sum(likelier) / sum(weights) < top_p + 1e-6


@pytest.mark.parametrize("scores", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_choose_nothing_are_refused(scores: list[float], temperature: float) -> None:
    with pytest.raises(NonFinite, match="step 4"):
        sample(torch.tensor(scores), SamplingParams(temperature=temperature), step=4)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1.0, -1e-9, math.nan, math.inf, "1", None, True]),
        ("top_p", [0.0, -0.1, 1.0001, math.nan, "0.5", None, True]),
        ("seed", [-1, 2**64, 1.0, None, True]),
    ],
)
def test_wrong_params_name_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^{field} is "):
            SamplingParams(**{field: value})


# What shapes the scores first, and which ids are left.


def support(scores: Tensor, **params: Any) -> set[int]:
    """Which ids come, over steps."""
    return {sample(scores, SamplingParams(temperature=1.0, **params), step=step) for step in range(300)}


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_so_many_of_the_likeliest(top_k: int, kept: set[int]) -> None:
    assert support(scores_of(0.125, 0.45, 0.25, 0.175), top_k=top_k) == kept


def test_top_k_keeps_the_lower_ids_of_equals() -> None:
    assert support(torch.zeros(8), top_k=3) == {0, 1, 2}


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.3, {1, 2, 3}), (0.5, {1, 2}), (1.0, {1})])
def test_min_p_keeps_what_is_that_times_as_likely_as_the_best(min_p: float, kept: set[int]) -> None:
    assert support(scores_of(0.125, 0.45, 0.25, 0.175), min_p=min_p) == kept


def test_top_k_then_top_p_then_min_p() -> None:
    """Of 0.45, 0.25, 0.175 the first two reach 0.75 of their sum, and the second is over half of the first."""
    scores = scores_of(0.125, 0.45, 0.25, 0.175)
    assert support(scores, top_k=3, top_p=0.75) == {1, 2}
    assert support(scores, top_k=3, top_p=0.75, min_p=0.6) == {1}


def test_the_penalty_makes_what_came_before_less_likely() -> None:
    """Positive scores are divided, negative ones multiplied; an id that came twice is penalised once."""
    scores, params = torch.tensor([2.0, 1.5, -1.0]), SamplingParams(repetition_penalty=2.0)
    assert sampling.sample(scores, params, step=0, ids=[]).id == 0
    assert sampling.sample(scores, params, step=0, ids=[0, 0]).id == 1
    chosen = sampling.sample(torch.tensor([-1.0, -1.5]), params, step=0, ids=[0])
    assert chosen.id == 1
    assert math.isclose(chosen.logprob, -1.5 - math.log(math.exp(-2.0) + math.exp(-1.5)), rel_tol=1e-6)
    assert scores.tolist() == [2.0, 1.5, -1.0]


def test_a_bias_is_added_to_the_score_of_its_id() -> None:
    scores = torch.tensor([2.0, 1.5, -1.0])
    assert sample(scores, SamplingParams(logit_bias=((2, 4.0),)), step=0) == 2
    assert sample(scores, SamplingParams(logit_bias=((0, -1.0), (2, 1.0))), step=0) == 1
    with pytest.raises(UsageError, match=r"logit_bias has id 3: outside the vocabulary \[0, 3\)"):
        sample(scores, SamplingParams(logit_bias=((3, 1.0),)), step=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_log_probability_is_that_of_the_softmax(temperature: float) -> None:
    chosen = sampling.sample(scores_of(0.2, 0.7, 0.1), SamplingParams(temperature=temperature), step=0)
    assert math.isclose(chosen.logprob, math.log((0.2, 0.7, 0.1)[chosen.id]), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias has -1"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias has 1: nan"),
    ],
    ids=repr,
)
def test_a_parameter_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**fields)
