"""What knowing costs: `python -m benchmarks.identity`. Validation beside a decode step, hashing beside loading, keys.

Every pair that is compared is taken in turns, in one process, and all samples are kept.
"""

import hashlib
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.inputs import SMOLLM2
from benchmarks.samples import Samples, keep, taken
from benchmarks.table import markdown

KEY_TOKENS, BLOCK_TOKENS = 131_072, 16
LENGTHS = (1_000, 8_000)


def main() -> int:
    return keep("identity", __doc__, measured, report)


def measured() -> dict[str, Any]:
    from kvouch.loader.home import kvouch_home
    from kvouch.loader.pull import resolve

    directory = resolve(SMOLLM2, kvouch_home(), lambda stage, done, total: None)
    return {"seconds": {**key_samples(), **hash_samples(directory), **validation_samples(directory)}}


def key_samples() -> Samples:
    """All 16-token boundaries of 131,072 ids, beside a plain chain of sha256."""
    from kvouch.identity.keys import block_keys

    ids = [index * 7_368_787 % 49_152 for index in range(KEY_TOKENS)]

    def chain() -> None:
        running, data = hashlib.sha256(), b"".join(one.to_bytes(4, "little") for one in ids)
        for start in range(0, len(data), 4 * BLOCK_TOKENS):
            running.update(data[start : start + 4 * BLOCK_TOKENS])
            running.copy().digest()

    return taken({"keys of all blocks": lambda: block_keys("0" * 64, ids, BLOCK_TOKENS), "plain chain": chain}, 15)


def hash_samples(directory: Path) -> Samples:
    """The weights read into private memory, with their hash and without; the whole manifest; a load."""
    import kvouch
    from kvouch.artefact.files import ArtefactFiles
    from kvouch.artefact.manifest import Manifest
    from kvouch.artefact.reading import HashedFile

    class Unhashed(HashedFile):
        def _add(self, data: memoryview) -> None:
            pass

    def read(kind: type[HashedFile]) -> None:
        files = ArtefactFiles(directory)
        path = files.path("model.safetensors")
        with kind(path, path, lambda record: None) as file:
            file.readinto(memoryview(bytearray(file.size)))

    found = taken(
        {
            "weights read": lambda: read(Unhashed),
            "weights read and hashed": lambda: read(HashedFile),
            "manifest": lambda: Manifest.of(directory),
        },
        7,
    )
    return {**found, **taken({"load bf16": lambda: kvouch.load(directory, dtype="bfloat16")}, 3)}


def validation_samples(directory: Path) -> Samples:
    """Identity, versions, ids and verdict of a call that computes nothing, beside a decode step, in turns.

    The call is a `prefill` of ids that are all held: it does all that any call does before and after its step. Like any
    call it comes behind a step, which has filled the processor's caches with weights. The cache holds random numbers,
    since what they are changes neither time.
    """
    import torch

    import kvouch
    from kvouch.engine.backend import RollbackBackend

    model = kvouch.load(directory, dtype="bfloat16")
    ids = [index * 7_368_787 % 49_152 for index in range(LENGTHS[-1])]
    runs: dict[str, Callable[[], object]] = {}
    for length in LENGTHS:
        backend = RollbackBackend(model, capacity=length + 64)
        cache = backend.state.cache
        for layer in range(cache.num_layers):
            size = (1, model.config.num_key_value_heads, length, model.config.head_dim)
            cache.update(layer, *(torch.randn(size).to(model.dtype) for _ in range(2)))
        cache.advance(length)
        backend.state.ids.extend(ids[:length])
        asked = ids[:length]
        runs[f"decode step at {length:,}"] = partial(backend.next_logits, [*asked, 1])
        runs[f"validation of {length:,} ids"] = partial(backend.prefill, asked)
    runs["decode step again"] = runs[f"decode step at {LENGTHS[0]:,}"]
    runs["identity and versions, behind a step"] = model.identity
    found = taken(runs, 30)
    found |= taken({"identity and versions": model.identity}, 300)
    return {**found, **taken({"fingerprint": model.fingerprint}, 3)}


def report(results: dict[str, Any]) -> str:
    """A table of medians, least and most, and the goals."""
    seconds: Samples = results["seconds"]
    rows = [
        (name, *(f"{1e3 * pick(taken):,.3f}" for pick in (statistics.median, min, max)), str(len(taken)))
        for name, taken in seconds.items()
    ]
    goals = [(name, wanted, found, "yes" if met else "**no**") for name, wanted, found, met in reach(results)]
    return (
        f"# What knowing costs\n\n{results['date']}, SmolLM2 135M.\n\n"
        f"{markdown(('goal', 'wanted', 'found', 'met'), goals)}\n\n"
        f"Milliseconds.\n\n{markdown(('what', 'median', 'least', 'most', 'samples'), rows)}\n"
    )


def sentence(results: dict[str, Any], link: str) -> str:
    """What the README says of it."""
    short, long, looked, behind, added, keys = (found for _, _, found, _ in reach(results))
    return (
        f"What that costs, measured on SmolLM2 in bf16 ({results['date']}): {short} of a decode step at 1,000 ids and "
        f"{long} at 8,000 (identity, versions, ids, verdict); identity and all versions {looked} ({behind} where a "
        f"step has just filled the processor's caches); hashing adds {added} to reading the weights; "
        f"keys of all blocks of {KEY_TOKENS:,} ids take {keys}. Raw samples: [{link}]({link})."
    )


def reach(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The goals: what was wanted, and what was found."""
    middle = {name: statistics.median(found) for name, found in results["seconds"].items()}
    shares = [middle[f"validation of {length:,} ids"] / middle[f"decode step at {length:,}"] for length in LENGTHS]
    added = middle["weights read and hashed"] - middle["weights read"]
    keys = middle["keys of all blocks"]
    looked, behind = middle["identity and versions"], middle["identity and versions, behind a step"]
    return [
        ("validation, share of a decode step, 1,000 ids", "< 1 %", f"{shares[0]:.2%}", shares[0] < 0.01),
        ("validation, share of a decode step, 8,000 ids", "< 1 %", f"{shares[1]:.2%}", shares[1] < 0.01),
        ("identity and every tensor's version", "< 100 us", f"{looked * 1e6:.0f} us", looked < 1e-4),
        ("the same behind a step, caches cold", "< 100 us", f"{behind * 1e6:.0f} us", behind < 1e-4),
        ("hashing, added to reading the weights", "<= 0.2 s", f"{added:.2f} s", added <= 0.2),
        (f"keys of {KEY_TOKENS:,} ids in blocks of {BLOCK_TOKENS}", "< 20 ms", f"{keys * 1e3:.1f} ms", keys < 0.02),
    ]


if __name__ == "__main__":
    sys.exit(main())
