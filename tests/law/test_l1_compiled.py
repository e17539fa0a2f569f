"""L1 on the compiled step, in every variant that this machine runs: no chunking, thread or stale number shows."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkings import COARSE, FINE, differences, poison, random_chunks, run_chunks
from kvouch.cache.blocks import BlockCache
from kvouch.contract import BLOCK, TILE
from kvouch.engine.backend import UncachedBackend
from kvouch.engine.batch import BatchedBackend, Prompt
from kvouch.engine.model import Model, load
from kvouch.errors import ContextOverflow
from kvouch.kernels.binding import VARIANTS, has_step, library
from kvouch.loader.checkpoint import DTYPES, DtypeName
from kvouch.models.paths import PathName
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from kvouch.numerics.bits import same_bits
from tiny_adapters import write_adapter, write_gpt2_adapter
from tiny_models import random_ids, tiny_directory, tiny_model, write_model

pytestmark = pytest.mark.law(1)

LENGTH, CHUNKINGS = 2 * TILE + 37, 50
STEP = library()
RUNS = STEP.variants if not isinstance(STEP, str) else ()
CASES = [(variant, dtype) for variant in VARIANTS for dtype in DTYPES if has_step(variant, DTYPES[dtype])]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest) -> tuple[PathName, DtypeName]:
    if request.param[0] not in RUNS:
        pytest.skip(f"this processor does not run {request.param[0]}")
    found: tuple[PathName, DtypeName] = request.param
    return found


def check(model: Any, ids: list[int], plans: list[list[int]], threads: Iterator[int]) -> None:
    """Keys, values and scores of each plan against those of one call; `threads` is asked before every plan."""
    reference: Any = model.new_cache(len(ids))
    wanted = model.current().forward(ids, reference, scores="all")
    for plan in plans:
        torch.set_num_threads(next(threads))
        cache: Any = model.new_cache(len(ids))
        for size in plan:
            scores = model.current().forward(ids[cache.length : cache.length + size], cache, scores="last")
            assert same_bits(scores, wanted[:, cache.length - 1]), f"{plan}: scores at {cache.length - 1}"
        assert differences(cache, reference) == [], f"{plan}"


def in_turns(*counts: int) -> Iterator[int]:
    while True:
        yield from counts


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_no_chunking_changes_a_bit(case: tuple[PathName, DtypeName], family: str) -> None:
    variant, dtype = case
    model = tiny_model(family, dtype, variant)
    assert (model.path, model.grade.name) == (f"compiled {variant}", "bitwise")
    ids = random_ids(LENGTH)[0].tolist()
    plans = [[1] * LENGTH, *(random_chunks(LENGTH, seed, FINE) for seed in range(CHUNKINGS))]
    check(model, ids, plans, in_turns(1, 2, 3))


@pytest.mark.parametrize("family", ["gpt2", "llama2"])
def test_no_chunking_changes_a_bit_under_an_adapter(
    case: tuple[PathName, DtypeName], family: str, tmp_path: Path
) -> None:
    variant, dtype = case
    model = load(tiny_directory(tmp_path / "model", family), dtype=dtype, path=variant)
    name = model.load_adapter((write_gpt2_adapter if family == "gpt2" else write_adapter)(tmp_path / "adapter"))
    ids = random_ids(LENGTH)[0].tolist()
    plain, adapted = UncachedBackend(model), UncachedBackend(model.bind(adapter=name))
    assert not same_bits(plain.next_logits(ids), adapted.next_logits(ids))
    plans = [random_chunks(LENGTH, seed, FINE) for seed in range(CHUNKINGS)]
    bound: Any = model.bind(adapter=name)
    check(bound, ids, plans, in_turns(1, 2))


@pytest.mark.parametrize("value", [1e30, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("kept", [0, 5, BLOCK, TILE - 1, TILE, TILE + 1])
def test_stale_numbers_reach_nothing(case: tuple[PathName, DtypeName], kept: int, value: float) -> None:
    variant, dtype = case
    for family in ("gpt2", "smollm2"):
        model, ids = tiny_model(family, dtype, variant), random_ids(TILE + 60)
        fresh, used = model.new_cache(2 * TILE), model.new_cache(2 * TILE)
        wanted = model.forward(ids, fresh, scores="all")
        model.forward(random_ids(2 * TILE, seed=1), used)
        used.rollback(0)
        if kept:
            model.forward(ids[:, :kept], used)
        poison(used, value)
        for start in range(kept, ids.shape[1], 19):
            found = model.forward(ids[:, start : start + 19], used, scores="all")
            assert found is not None
            assert wanted is not None
            assert same_bits(found, wanted[:, start : start + 19])
            poison(used, value)
        assert differences(used, fresh) == []


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_chunking_changes_a_bit_of_the_real_model(dtype: DtypeName, smollm2_dir: Path) -> None:
    """One call, token by token, and 20 random chunkings, over a tile edge."""
    length = TILE + 9
    model = load(smollm2_dir, dtype=dtype)
    if model.path == "torch":
        pytest.skip(f"no compiled step: {model.not_compiled}")
    ids = random_ids(length, vocabulary=model.config.vocab_size)
    reference = model.new_cache(length)
    wanted = dict(run_chunks(model, ids, reference, [1] * length))
    for plan in [[length], *(random_chunks(length, seed, COARSE) for seed in range(20))]:
        cache = model.new_cache(length)
        for at, scores in run_chunks(model, ids, cache, plan):
            assert same_bits(scores, wanted[at]), f"{plan}: scores at {at - 1}"
        assert differences(cache, reference) == [], f"{plan}"
    whole = model.forward(ids, model.new_cache(length), scores="all")
    assert whole is not None
    assert all(same_bits(whole[:, at - 1], scores) for at, scores in wanted.items())


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_answers_as_a_miss_does(dtype: DtypeName, smollm2_dir: Path) -> None:
    """Where peers change their answer, 20 prompts of 20: a hit on a prompt's prefix, then one on generated tokens.

    64 greedy tokens of all prompts together after each, and all their scores, beside one pass of each alone without
    reuse over all of these ids: if its scores are the same, a miss chooses the same token each time.
    """
    model = load(smollm2_dir, dtype=dtype)
    backend, size = BatchedBackend(model, model.pool(20 * 2 * TILE)), model.config.vocab_size
    held = [random_ids(40, seed=seed, vocabulary=size)[0].tolist() for seed in range(20)]
    backend.next_logits([Prompt(ids=ids) for ids in held])
    for turn in range(2):
        news = [random_ids(9, seed=100 * turn + seed, vocabulary=size)[0].tolist() for seed in range(20)]
        prompts = [[*ids, *new] for ids, new in zip(held, news, strict=True)]
        held, found = greedy(backend, prompts, 64)
        for ids, prompt, scores in zip(held, prompts, found, strict=True):
            missed = model.forward(ids, model.new_cache(len(ids)), scores="all")
            assert missed is not None
            assert same_bits(missed[0, len(prompt) - 1 :], torch.stack(scores))


def greedy(
    backend: BatchedBackend, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """The ids that are held after `count` greedy tokens of each, and the scores of each token."""
    ids, found = [list(prompt) for prompt in prompts], [list[torch.Tensor]() for _ in prompts]
    for step in range(count):
        asked = [Prompt(ids=one) for one in ids]
        for at, scores in enumerate(backend.next_logits(asked)):
            assert backend.verdicts[at].kind == "hit"
            assert backend.verdicts[at].computed_tokens == (9 if step == 0 else 1)
            found[at].append(scores)
        if step < count - 1:
            ids = [[*one, int(scores[-1].numpy().argmax())] for one, scores in zip(ids, found, strict=True)]
    return ids, found


# Processes, threads and interrupts.


@pytest.fixture
def compiled() -> Model:
    model = tiny_model("smollm2")
    if model.path == "torch":
        pytest.skip(f"no compiled step: {model.not_compiled}")
    return model


def test_a_step_in_a_forked_child(compiled: Model) -> None:
    """The child has none of the parent's threads, and computes the same bits with its own."""
    ids, cache = random_ids(TILE + 40), compiled.new_cache(TILE + 40)
    torch.set_num_threads(2)
    wanted = compiled.forward(ids, cache)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = compiled.forward(ids, compiled.new_cache(TILE + 40))
            status = 0 if wanted is not None and found is not None and bytes_of(found) == bytes_of(wanted) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found = compiled.forward(ids, compiled.new_cache(TILE + 40))
    assert found is not None
    assert wanted is not None
    assert same_bits(found, wanted)


def bytes_of(scores: torch.Tensor) -> bytes:
    """Without torch's threads, which do not live on in a child."""
    return scores.numpy().tobytes()


def test_several_threads_of_python_at_once(compiled: Model) -> None:
    prompts = [random_ids(TILE + 20, seed=seed) for seed in range(6)]
    wanted = [compiled.forward(ids, compiled.new_cache(TILE + 20)) for ids in prompts]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        cache = compiled.new_cache(TILE + 20)
        for _, scores in run_chunks(compiled, prompts[number], cache, random_chunks(TILE + 20, number, FINE)):
            found[number] = scores

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(found[number], scores) for number, scores in enumerate(wanted) if scores is not None)


@pytest.mark.law(3)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_call_is_cancelled_between_layers(compiled: Model, layer: int) -> None:
    """What the watch raises ends the step there, and leaves the cache as it was."""
    ids, cache = random_ids(2 * TILE), compiled.new_cache(2 * TILE)
    compiled.forward(ids[:, :20], cache)
    before = [held.clone() for held in cache.read(1)]
    seen = []

    def watch(now: int) -> None:
        seen.append(now)
        if len(seen) == 3 + layer + 1:  # in the second tile
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        compiled.forward(ids[:, 20:], cache, watch=watch)
    assert seen == [0, 1, 2, *range(layer + 1)]
    assert cache.length == 20
    assert all(map(same_bits, cache.read(1), before))
    fresh = compiled.new_cache(2 * TILE)
    first, second = compiled.forward(ids[:, 20:], cache), compiled.forward(ids, fresh)
    assert first is not None
    assert second is not None
    assert same_bits(first, second)
    assert differences(cache, fresh) == []


@pytest.mark.law(3)
@pytest.mark.parametrize("rows", [BLOCK, TILE])
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_an_interrupt_comes_through_between_two_layers(path: PathName, rows: int, tmp_path: Path) -> None:
    """Ctrl-C while C or torch computes: no watch is asked for, KeyboardInterrupt is raised all the same, and the
    thread is in the mode that it was in."""
    model = load(tiny_directory(tmp_path / "model", "smollm2"), path=path)
    ids, cache = random_ids(TILE), model.new_cache(TILE)
    interrupted = 0
    for _ in range(20):
        timer = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                model.forward(ids[:, :rows], cache)
                cache.reset()
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert not torch.is_inference_mode_enabled()
        cache.reset()
    assert interrupted == 20
    fresh = model.new_cache(TILE)
    first, second = model.forward(ids, cache), model.forward(ids, fresh)
    assert first is not None
    assert second is not None
    assert same_bits(first, second)


def test_a_watch_may_compute(compiled: Model) -> None:
    """A step within a step: both give what they give alone."""
    ids, others = random_ids(TILE), random_ids(40, seed=1)
    alone = compiled.forward(others, compiled.new_cache(40))
    wanted = compiled.forward(ids, compiled.new_cache(TILE))
    inner = []
    found = compiled.forward(
        ids,
        compiled.new_cache(TILE),
        watch=lambda layer: inner.append(compiled.forward(others, compiled.new_cache(40))),
    )
    assert found is not None
    assert wanted is not None
    assert alone is not None
    assert same_bits(found, wanted)
    assert len(inner) == 3
    assert all(same_bits(one, alone) for one in inner if one is not None)


def test_scratch_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    """100,000 ids on a model of two layers: what is allocated is for a tile of rows."""
    config = {
        **TINY_CONFIGS["llama2"],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 100_352,
    }
    model = load(write_model(tmp_path / "model", config, tiny_tensors(config)))
    if model.path == "torch":
        pytest.skip(f"no compiled step: {model.not_compiled}")
    path: Any = model.weights.path
    cache = model.new_cache(100_000)
    model.forward(random_ids(300), cache)
    small = len(path._scratch)
    cache.reset()
    model.forward(random_ids(100_000), cache, scores="none")
    assert cache.length == 100_000
    assert len(path._scratch) < small + 2**20  # a part of 12 rows for each tile of keys
    assert len(path._scratch) < 2**21


def test_more_than_the_context_is_refused_before_any_work(compiled: Model) -> None:
    cache = compiled.new_cache(64)
    assert isinstance(cache, BlockCache)
    with pytest.raises(ContextOverflow):
        compiled.forward(random_ids(2000), cache)
    assert cache.length == 0
