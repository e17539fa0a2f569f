"""Every measurement of a run, in rounds: walls, then each model, dtype and peer in turn. Computes nothing from them.

Every peer and dtype has its own process; processes take turns, one at a time, so that a drift of the machine's speed
hits all alike.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.figures import OURS, Series, compare_all
from benchmarks.inputs import ABOUT, CONTEXT_TOKENS, count_parameters, prompt_ids
from benchmarks.machine import console_script
from benchmarks.processes import Workers
from benchmarks.sizes import Size

CACHES = ("dynamic", "static")  # of transformers
MEMORY_DECODE_STEPS = 8

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is given."""

    root: Path
    workers: Workers
    size: Size
    directories: dict[str, Path]  # by model
    dtypes: tuple[str, ...]
    path: str  # of kvouch

    @property
    def peers(self) -> list[tuple[str, str]]:
        """Each way to run a model: peer, and path or cache."""
        return [(OURS, self.path), *(("transformers", cache) for cache in CACHES)]


def run_all(run: Run) -> tuple[Record, Record]:
    """Everything that is measured, and what torch sees of the machine."""
    tokenizer = run.directories["smollm2"] / "tokenizer.json" if "smollm2" in run.directories else None
    ids, source = prompt_ids(run.root, tokenizer, max(run.size.prefill_tokens) + run.size.warm_new_tokens)
    bare = [found for _ in range(3) if (found := run.workers.call("bare torch", {"job": "bare"}))]
    if not bare:
        raise SystemExit("torch does not run: see above")
    costs: Record = {
        "rounds": run.size.rounds,
        "ids": source,
        "models": {name: _about(name, path, run.size) for name, path in run.directories.items()},
        "bare_rss_bytes": [one["rss_bytes"] for one in bare],
        "help_s": list(_help(run)),
        "load": list(_load(run)),
        "memory": list(_memory(run, ids)),
    }
    walls, processes, series = [], [], []
    for number in range(1, run.size.rounds + 1):
        job = {"job": "walls", "floats": run.size.wall_floats, "side": run.size.wall_side}
        if wall := run.workers.call(f"round {number} walls", job):
            walls.append({"round": number, **wall})
        for process, timings in _round(run, number, ids):
            processes.append(process)
            series += timings
    compared, alone = compare_all(series)
    return {
        **costs,
        "walls": walls,
        "comparisons": [asdict(one) for one in compared],
        "alone": [asdict(one) for one in alone],
        "processes": processes,
        "series": [asdict(one) for one in series],
        "failures": run.workers.failures,
    }, bare[0]["torch"]


def _about(name: str, directory: Path, size: Size) -> Record:
    return {"about": ABOUT[name], **asdict(count_parameters(directory)), "plan": asdict(size.plan(name))}


def _round(run: Run, number: int, ids: list[int]) -> Iterator[tuple[Record, list[Series]]]:
    """Each model and dtype, by each peer in turn."""
    for model, dtype, (peer, kind) in product(run.directories, run.dtypes, run.peers):
        job = {"job": peer, "kind": kind, "directory": str(run.directories[model]), "dtype": dtype, "ids": ids}
        sizes = {"round": number, "check_tokens": run.size.check_tokens, "plan": asdict(run.size.plan(model))}
        found = run.workers.call(f"round {number} {model} {dtype} {peer} {kind}", job | sizes)
        if found is not None:
            common: Record = {"round": number, "model": model, "dtype": dtype, "peer": peer}
            timings = found.pop("timings")
            yield {**common, "kind": kind, **found}, [_series(common, timing) for timing in timings]


def _series(common: Record, timing: Record) -> Series:
    return Series(**common, figure=timing["figure"], way=timing["way"], seconds=tuple(timing["seconds"]))


def _memory(run: Run, ids: list[int]) -> Iterator[Record]:
    for model, directory in run.directories.items():
        count = min(max(run.size.prefill_tokens), CONTEXT_TOKENS[model] - MEMORY_DECODE_STEPS)
        for dtype in run.dtypes:
            job = {"job": "memory", "kind": run.path, "directory": str(directory), "dtype": dtype, "ids": ids[:count]}
            if found := run.workers.call(f"memory {model} {dtype}", {**job, "decode_steps": MEMORY_DECODE_STEPS}):
                yield {"model": model, "dtype": dtype, **found}


def _load(run: Run) -> Iterator[Record]:
    if "smollm2" in run.directories:
        for _ in range(run.size.repeats):
            directory = str(run.directories["smollm2"])
            job = {"job": "load", "kind": run.path, "directory": directory, "dtype": "bfloat16"}
            if found := run.workers.call("load smollm2 bfloat16", job):
                yield found


def _help(run: Run) -> Iterator[float]:
    for _ in range(run.size.help_repeats):
        seconds = run.workers.time_command("kvouch --help", [console_script("kvouch"), "--help"])
        if seconds is not None:
            yield seconds
