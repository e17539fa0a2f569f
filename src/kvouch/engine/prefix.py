"""How far lists of ids agree. Knows ids; knows no cache and no tensor."""

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The n for which a[:n] == b[:n] is longest."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:  # the usual case, at the speed of one comparison of lists
        return limit
    return next((index for index in range(limit) if a[index] != b[index]), limit)


def common_ids(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The ids that all prompts begin with, and at most all but one of the shortest: each keeps an id to compute."""
    first = list(prompts[0])
    shared = min(common_length(first, list(prompt)) for prompt in prompts)
    shortest = min(len(prompt) for prompt in prompts)
    return first[: min(shared, max(shortest - 1, 0))]
