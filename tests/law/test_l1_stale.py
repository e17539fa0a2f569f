"""L1: what lies beyond a cache's length is physically there and logically invisible."""

from pathlib import Path

import pytest

from chunkings import all_scores, differences, poison
from kvouch.contract import TILE
from kvouch.loader.checkpoint import DtypeName
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.law(1)

STALE = [None, 1e30, 3e38, float("inf"), float("nan")]


@pytest.mark.parametrize("stale", STALE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "smollm2"])
@pytest.mark.parametrize("kept", [0, 5, TILE - 1, TILE, TILE + 1])
def test_a_used_buffer_gives_the_bits_of_a_fresh_one(
    family: str, dtype: DtypeName, kept: int, stale: float | None, tmp_path: Path
) -> None:
    """Another request's numbers, or a poison, beyond the length: no bit of K, V or scores changes."""
    model, ids, other = tiny_model(family, dtype, "torch"), random_ids(TILE + 60), random_ids(2 * TILE, seed=1)
    fresh, used = model.static_cache(2 * TILE), model.static_cache(2 * TILE)
    wanted = all_scores(model, ids, fresh)
    if kept:
        model.forward(ids[:, :kept], used)
    model.forward(other[:, : 2 * TILE - kept], used)
    used.rollback(kept)
    if stale is not None:
        poison(used, stale)
    for start in range(kept, ids.shape[1], 19):
        found = all_scores(model, ids[:, start : start + 19], used)
        assert same_bits(found, wanted[:, start : start + 19])
        if stale is not None:
            poison(used, stale)
    assert differences(used, fresh) == []


def test_reset_moves_the_length_and_clears_nothing() -> None:
    model = tiny_model("smollm2")
    cache = model.static_cache(40)
    model.forward(random_ids(40), cache)
    keys = cache.read(0)[0].clone()
    cache.reset()
    assert cache.length == 0
    assert same_bits(cache._buffer[0, 0, :, :, :40], keys)
