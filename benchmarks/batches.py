"""Many sequences on one pool: `python -m benchmarks.batches`. Batches beside sequences alone, shared prefixes, forks.

What is compared is taken in turns, in one process, and all samples are kept. Caches are filled with the numbers of one
prefill: what a step costs does not depend on them.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.inputs import SMOLLM2, prompt_ids
from benchmarks.samples import ROOT, Samples, keep, taken
from benchmarks.table import markdown

CONTEXT, PREFIX, OWN, CHUNK, NEW = 512, 1024, 16, 256, 32
COUNTS = (1, 2, 4, 8, 16, 32)
STEPS = 12  # of each measurement of a decode step

Results = dict[str, Any]


def main() -> int:
    return keep("batches", __doc__, measured, report)


def measured() -> Results:
    """Seconds of each figure, and what 32 continued forks hold."""
    import kvouch
    from kvouch.cache.paged import PagedCache
    from kvouch.contract import BLOCK
    from kvouch.loader.home import kvouch_home
    from kvouch.loader.pull import resolve
    from kvouch.models.forward import forward_many

    directory = resolve(SMOLLM2, kvouch_home(), lambda stage, done, total: None)
    model = kvouch.load(directory, dtype="bfloat16")
    ids, _ = prompt_ids(ROOT, directory / "tokenizer.json", PREFIX + 2 * NEW)
    now, pool = model.current(), model.pool((max(COUNTS) + 16) * (PREFIX + OWN + 2 * CHUNK))
    source = PagedCache(pool)
    model.forward(ids[:PREFIX], source)
    held = [source.read(layer) for layer in range(source.num_layers)]

    def filled(length: int) -> PagedCache:
        cache = PagedCache(pool)
        for layer, (keys, values) in enumerate(held):
            cache.update(layer, keys[:, :, :length], values[:, :, :length])
        cache.advance(length)
        return cache

    def step(caches: Sequence[Any], new: Sequence[int] = (7,)) -> None:
        """New ids for each, computed together, and cut off again."""
        lengths = [cache.length for cache in caches]
        found = forward_many([now.chunk(new, cache, "last") for cache in caches], model.config)
        for cache, length, scores in zip(caches, lengths, found, strict=True):
            if scores is not None:
                scores.numpy().argmax()
            cache.rollback(length)

    samples: Samples = {}
    many = [filled(CONTEXT) for _ in range(max(COUNTS))]
    samples |= taken({f"decode {n} at {CONTEXT}": partial(step, many[:n]) for n in COUNTS}, STEPS)
    for cache in many:
        cache.release()

    apart = [_grown(filled(PREFIX), model) for _ in range(8)]
    shared = [_grown(source.fork(), model) for _ in range(32)]
    samples |= taken(
        {
            f"8 apart at {PREFIX}+{OWN}": lambda: step(apart),
            f"8 sharing {PREFIX}": lambda: step(shared[:8]),
            f"32 sharing {PREFIX}": lambda: step(shared),
        },
        STEPS,
    )
    for cache in shared:
        cache.release()

    late = PagedCache(pool)

    def joined(*, chunk: bool, decode: bool) -> Callable[[], None]:
        def run() -> None:
            parts = [now.chunk(ids[:CHUNK], late, "none")] if chunk else []
            parts += [now.chunk((7,), cache, "last") for cache in apart] if decode else []
            lengths = [one.cache.length for one in parts]
            forward_many(parts, model.config)
            for one, length in zip(parts, lengths, strict=True):
                one.cache.rollback(length)

        return run

    samples |= taken(
        {
            f"a prefill of {CHUNK}": joined(chunk=True, decode=False),
            "8 decoding": joined(chunk=False, decode=True),
            f"a prefill of {CHUNK} joined to 8 decoding": joined(chunk=True, decode=True),
        },
        STEPS,
    )
    for cache in apart:
        cache.release()

    twins: list[PagedCache] = []
    samples |= taken({f"fork of {PREFIX}": lambda: twins.append(source.fork())}, 200)
    for twin in twins:
        twin.release()

    single, plain = PagedCache(pool), model.new_cache(PREFIX + OWN)
    model.forward(ids[:CONTEXT], single)
    model.forward(ids[:CONTEXT], plain)
    runs: dict[str, Callable[[], object]] = {
        f"decode at {CONTEXT}, paged": lambda: _alone(model, single),
        f"decode at {CONTEXT}, blocks of its own": lambda: _alone(model, plain),
    }
    samples |= taken(runs, 3 * STEPS)
    single.rollback(0)
    plain.rollback(0)
    samples |= taken(
        {
            f"prefill of {CONTEXT}, paged": lambda: _prefill(model, single, ids),
            f"prefill of {CONTEXT}, blocks of its own": lambda: _prefill(model, plain, ids),
        },
        4,
    )
    single.release()

    before = pool.used
    forks = [source.fork() for _ in range(32)]
    for fork in forks:
        model.forward(ids[PREFIX : PREFIX + NEW], fork, scores="none")
    pool.check()
    most = 32 * (1 + -(-NEW // BLOCK))
    forked = {"blocks": pool.used - before, "most": most, "prefix": before, "block_bytes": pool.block_bytes}
    return {"seconds": samples, "forks": forked}


def _grown(cache: Any, model: Any) -> Any:
    """The same with OWN positions of its own."""
    model.forward(list(range(1, OWN + 1)), cache, scores="none")
    return cache


def _alone(model: Any, cache: Any) -> None:
    length = cache.length
    model.forward((7,), cache).numpy().argmax()
    cache.rollback(length)


def _prefill(model: Any, cache: Any, ids: list[int]) -> None:
    model.forward(ids[:CONTEXT], cache)
    cache.rollback(0)


def sentence(results: Results, link: str) -> str:
    """What the README says of it."""
    middle = {name: statistics.median(taken) for name, taken in results["seconds"].items()}
    rates = ", ".join(f"{n / middle[f'decode {n} at {CONTEXT}']:,.0f} for {n}" for n in (1, 8, 32))
    apart, shared = middle[f"8 apart at {PREFIX}+{OWN}"], middle[f"8 sharing {PREFIX}"]
    return (
        f"SmolLM2 in bf16, {results['date']}: tokens a second at {CONTEXT} positions, by the number of sequences: "
        f"{rates}. Eight that share {PREFIX:,} positions take {shared * 1e3:.1f} ms a step, eight that do not "
        f"{apart * 1e3:.1f}. A fork of {PREFIX:,} positions takes {middle[f'fork of {PREFIX}'] * 1e6:.0f} us. "
        f"Raw samples: [{link}]({link})."
    )


def report(results: Results) -> str:
    """Markdown; pure."""
    seconds = {name: statistics.median(taken) for name, taken in results["seconds"].items()}
    rows = []
    for name, samples in results["seconds"].items():
        count = int(name.split()[1]) if name.startswith("decode ") and name.split()[1].isdigit() else 0
        count = int(name.split()[0]) if name.split()[0].isdigit() else count
        rate = f"{count / seconds[name]:,.0f}" if count else "–"
        rows.append(
            (name, f"{seconds[name] * 1e3:.3f}", f"{min(samples) * 1e3:.3f}", f"{max(samples) * 1e3:.3f}", rate)
        )
    chunk, decode = seconds[f"a prefill of {CHUNK}"], seconds["8 decoding"]
    both = seconds[f"a prefill of {CHUNK} joined to 8 decoding"]
    forks = results["forks"]
    goals = [
        (
            f"8 that share {PREFIX} beside 8 that do not",
            "< 1",
            seconds[f"8 sharing {PREFIX}"] / seconds[f"8 apart at {PREFIX}+{OWN}"],
        ),
        (
            "32 that share it, per token beside 8",
            "< 1",
            seconds[f"32 sharing {PREFIX}"] / 4 / seconds[f"8 sharing {PREFIX}"],
        ),
        ("prefill joined to decoding, over the two apart", "≤ 1.15", both / (chunk + decode)),
        ("fork, microseconds", "< 50", seconds[f"fork of {PREFIX}"] * 1e6),
        (
            "decode, paged over blocks of its own",
            "≤ 1.03",
            seconds[f"decode at {CONTEXT}, paged"] / seconds[f"decode at {CONTEXT}, blocks of its own"],
        ),
        (
            "prefill, paged over blocks of its own",
            "≤ 1.03",
            seconds[f"prefill of {CONTEXT}, paged"] / seconds[f"prefill of {CONTEXT}, blocks of its own"],
        ),
        ("blocks of 32 forks continued by 32 tokens", f"≤ {forks['most']}", forks["blocks"]),
    ]
    return (
        "\n\n".join(
            [
                "# Many sequences on one pool",
                f"SmolLM2 in bf16, {results['date']}. Milliseconds of a step, its scores and choice included.",
                markdown(
                    ("what", "wanted", "found"), [(name, wanted, f"{value:.3g}") for name, wanted, value in goals]
                ),
                markdown(("figure", "median", "min", "max", "tokens a second"), rows),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
