"""From raw samples to medians and ratios. Pure: knows series of seconds; knows no library, file or clock."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OURS = "kvouch"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Seconds of one figure in one process of one round."""

    round: int
    model: str
    dtype: str
    peer: str
    way: str
    figure: str
    seconds: tuple[float, ...]

    @property
    def contender(self) -> str:
        return f"{self.peer} {self.way}"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """All samples of a contender in four numbers."""

    median: float
    min: float
    max: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one model and dtype: our best way beside the best of the others. Ratio > 1: we are faster."""

    model: str
    dtype: str
    figure: str
    ours: str
    theirs: str
    ratio: float  # of the medians over all rounds
    ratio_by_round: tuple[float, ...]  # the best of each side in that round
    ratio_rounds_median: float
    contenders: dict[str, Spread]

    @property
    def ours_s(self) -> float:
        return self.contenders[self.ours].median

    @property
    def theirs_s(self) -> float:
        return self.contenders[self.theirs].median


def spread(seconds: Iterable[float]) -> Spread:
    """Median, extremes and count; ValueError where there are no samples."""
    taken = list(seconds)
    if not taken:
        raise ValueError("no samples")
    return Spread(median=statistics.median(taken), min=min(taken), max=max(taken), samples=len(taken))


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A figure that only one side has: the other would have taken too long, or failed."""

    model: str
    dtype: str
    figure: str
    contenders: dict[str, Spread]


def compare_all(series: Sequence[Series]) -> tuple[list[Comparison], list[Alone]]:
    """Each model, dtype and figure, in the order of first appearance: compared where both sides have it."""
    compared, alone = [], []
    for model, dtype, figure in dict.fromkeys((one.model, one.dtype, one.figure) for one in series):
        chosen = [one for one in series if (one.model, one.dtype, one.figure) == (model, dtype, figure)]
        found = compare(chosen)
        if found is None:
            alone.append(Alone(model=model, dtype=dtype, figure=figure, contenders=_spreads(chosen)))
        else:
            compared.append(found)
    return compared, alone


def compare(series: Sequence[Series]) -> Comparison | None:
    """The comparison of one figure, or None where no round has both sides."""
    contenders = _spreads(series)
    ours, theirs = _best(contenders, of_ours=True), _best(contenders, of_ours=False)
    by_round = []
    for number in sorted({one.round for one in series}):
        spreads = _spreads([one for one in series if one.round == number])
        best, other = _best(spreads, of_ours=True), _best(spreads, of_ours=False)
        if best is not None and other is not None:
            by_round.append(spreads[other].median / spreads[best].median)
    if ours is None or theirs is None or not by_round:
        return None
    return Comparison(
        model=series[0].model,
        dtype=series[0].dtype,
        figure=series[0].figure,
        ours=ours,
        theirs=theirs,
        ratio=contenders[theirs].median / contenders[ours].median,
        ratio_by_round=tuple(by_round),
        ratio_rounds_median=statistics.median(by_round),
        contenders=contenders,
    )


def _spreads(series: Sequence[Series]) -> dict[str, Spread]:
    names = dict.fromkeys(one.contender for one in series)
    return {name: spread(s for one in series if one.contender == name for s in one.seconds) for name in names}


def _best(contenders: dict[str, Spread], *, of_ours: bool) -> str | None:
    """The fastest contender of a side by its median."""
    side = [name for name in contenders if (name.split()[0] == OURS) == of_ours]
    return min(side, key=lambda name: contenders[name].median, default=None)
