"""The report of a run, from its results and environment alone. Pure: reads and writes no file; no number is its own."""

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.figures import OURS
from benchmarks.table import (
    MISSING,
    Results,
    bounded,
    grade,
    label,
    markdown,
    memory_over,
    milliseconds,
    pairs,
    path,
    ratio,
    wall_s,
)

Kind = dict[str, float]
TORCH: Kind = {"decode": 1.3, "prefill": 1.0, "warm": 1.0}  # smallest ratio of each kind of figure, on the torch path
COMPILED: dict[tuple[str, str], Kind] = {
    ("smollm2", "float32"): {"decode": 2.7, "prefill": 1.1},
    ("smollm2", "bfloat16"): {"decode": 4.0, "prefill": 1.45, "warm": 2.3, "text": 4.5},
    ("gpt2", "float32"): {"decode": 2.0, "prefill": 1.2},
    ("gpt2", "bfloat16"): {"decode": 2.5, "prefill": 1.2},
}
LARGEST = {"torch": (64.0, 3.0), "auto": (150.0, 2.0)}  # megabytes over bare torch, weights and cache; seconds to load
WALL_TIMES, WALL_POSITIONS = 1.4, 4000  # a compiled step at so many positions or more, over the time to read its bytes
HELP_S = 0.3


def report(results: Results, environment: Results) -> str:
    """Markdown."""
    parts = [
        "# kvouch beside transformers",
        _quick(results) + _machine(results, environment),
        "## Reach",
        markdown(("goal", "wanted", "found", "met"), _goals(results)),
        "## Walls",
        "Measured at the start of each round, best of its runs. The wall beside a figure is what the best of them "
        "allows: a step reads weights and cache once, a prefill multiplies every matrix number with every position.",
        markdown(("round", "read GB/s", "fp32 GFLOP/s", "bf16 GFLOP/s"), _walls(results)),
        *(part for pair in pairs(results) for part in _section(results, *pair)),
        "## Memory",
        "Resident set after loading, a prefill and 8 steps, garbage collected, in MB.",
        markdown(
            ("model", "resident", "bare torch", "weights held", "weights, once", "cache", "over", "over, trimmed"),
            _memory(results),
        ),
        "## Load and help",
        _load(results),
        "## Do all peers compute the same model?",
        "The id with the highest score after 4, 8, ..., 32 ids of the prompt, by peer and cache. In bf16 "
        "each rounds in its own places, so close scores may change their order.",
        markdown(("model", "kvouch", "dynamic", "static", "equal"), _ids(results)),
        *_list("Not timed, since a short prefill foretold too long a time", _untimed(results)),
        *_list("Failures", results["failures"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(title: str, items: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {one}" for one in items)] if items else []


def _untimed(results: Results) -> list[str]:
    found = (
        f"{label(one['model'], one['dtype'])} {figure}: {one['peer']} {one['kind']}"
        for one in results["processes"]
        for figure in one["untimed"]
    )
    return list(dict.fromkeys(found))


Goal = tuple[str, str, str, bool]  # name, what is wanted, what was found, whether it is met


def goals(results: Results) -> list[Goal]:
    """What the path is to reach; the worst figure of each kind speaks for it."""
    most_mb, most_load_s = LARGEST[results["path"]]
    found = [goal for pair in pairs(results) for goal in _speed(results, *pair)]
    for one in results["memory"]:
        over = memory_over(results, one)
        name = f"{label(one['model'], one['dtype'])}: MB over bare torch, weights and cache"
        found.append((name, f"≤ {most_mb:.0f}", f"{over:.1f}", over <= most_mb))
    for name, seconds, most in (
        ("SmolLM2 bf16: load, s", [one["load_s"] for one in results["load"]], most_load_s),
        ("`kvouch --help`, s", results["help_s"], HELP_S),
    ):
        if seconds:
            median = statistics.median(seconds)
            found.append((name, f"< {most:.1f}", f"{median:.2f}", median < most))
    return found


def _speed(results: Results, model: str, dtype: str) -> Iterable[Goal]:
    """The smaller of a figure's two ratios counts; where the others were foretold too slow, the least it can be."""
    name = label(model, dtype)
    wished = TORCH if results["path"] == "torch" else COMPILED.get((model, dtype), {})
    for kind, wanted in wished.items():
        ratios = [
            min(one["ratio"], one["ratio_rounds_median"])
            for one in results["comparisons"]
            if (one["model"], one["dtype"]) == (model, dtype) and one["figure"].split()[0] == kind
        ]
        alone = [one["figure"] for one in results["alone"] if one["figure"].split()[0] == kind]
        known = (bounded(results, model, dtype, figure) for figure in alone)
        ratios += [limit / ours for ours, limit in (one for one in known if one is not None)]
        if ratios:
            yield f"{name}: {kind}, worst ratio", f"≥ {wanted:.2f}", ratio(min(ratios)), min(ratios) >= wanted
    if results["path"] != "torch":
        times = [over for figure, over in _over_walls(results, model, dtype) if figure >= WALL_POSITIONS]
        if times:
            most = max(times)
            yield f"{name}: decode over its wall", f"≤ {WALL_TIMES:.1f}", f"{most:.2f}", most <= WALL_TIMES
    seen = grade(results, model, dtype)
    yield f"{name}: grade", "bitwise", seen, seen == "bitwise"


def _over_walls(results: Results, model: str, dtype: str) -> Iterable[tuple[int, float]]:
    """Positions, and how many times as long as its wall our step takes there."""
    for one in (*results["comparisons"], *results["alone"]):
        if (one["model"], one["dtype"]) != (model, dtype) or not one["figure"].startswith("decode "):
            continue
        ours = [spread["median"] for name, spread in one["contenders"].items() if name.startswith(f"{OURS} ")]
        wall = wall_s(results, model, dtype, one["figure"])
        if ours and wall:
            yield int(one["figure"].split()[1]), min(ours) / wall


def _goals(results: Results) -> Iterable[tuple[str, str, str, str]]:
    return ((name, wanted, found, "yes" if met else "**no**") for name, wanted, found, met in goals(results))


def _quick(results: Results) -> str:
    return "**A quick run at tiny sizes: these figures mean nothing.**\n\n" if results["quick"] else ""


def _machine(results: Results, environment: Results) -> str:
    cpu, packages, torch = environment["cpu"], environment["packages"], environment["torch"]
    bf16 = "has bf16 instructions" if cpu["bf16_instructions"] else "has no bf16 instructions"
    dirty = ", with changes that are not committed" if environment["dirty"] else ""
    return (
        f"{results['date']}, {cpu['model']} (family {cpu['family']}, model {cpu['model_number']}; {bf16}), "
        f"{environment['cores']} cores, {environment['memory_gb']} GB, governor {environment['governor']}; "
        f"torch {packages['torch']} ({torch['capability']}, {torch['threads']} threads), "
        f"transformers {packages['transformers']}, kvouch {packages['kvouch']} at {environment['commit'][:12]}{dirty}. "
        f"Rounds: {results['rounds']}; ids: {results['ids']}. Eager, inference mode, scores of the last position, "
        "argmax read back on every call; transformers with its default (sdpa) attention. Milliseconds; a ratio above "
        "1 means that kvouch is faster than the better cache of transformers."
    )


def _walls(results: Results) -> Iterable[list[str]]:
    for wall in results["walls"]:
        yield [str(wall["round"]), *(f"{max(wall[name]):,.1f}" for name in _WALLS)]


_WALLS = ("read_gb_s", "float32_gflop_s", "bfloat16_gflop_s")


def _section(results: Results, model: str, dtype: str) -> list[str]:
    about = results["models"][model]
    comparisons, alone = (
        [one for one in results[name] if (one["model"], one["dtype"]) == (model, dtype)]
        for name in ("comparisons", "alone")
    )
    ratios = [
        (
            one["figure"],
            one["ours"],
            one["theirs"],
            *_wall(results, one),
            ratio(one["ratio"]),
            ratio(one["ratio_rounds_median"]),
            " ".join(ratio(value) for value in one["ratio_by_round"]),
        )
        for one in comparisons
    ]
    spreads = [
        (
            one["figure"],
            name,
            milliseconds(s["median"]),
            milliseconds(s["min"]),
            milliseconds(s["max"]),
            str(s["samples"]),
        )
        for one in (*comparisons, *alone)
        for name, s in one["contenders"].items()
    ]
    return [
        f"## {label(model, dtype)}",
        f"{about['about']}; {about['total']:,} parameters; path {path(results, model, dtype)}; "
        f"grade {grade(results, model, dtype)}.",
        markdown(("figure", "our best", "their best", "wall, ms", "ours over it", *RATIOS), ratios),
        markdown(("figure", "contender", "median", "min", "max", "samples"), spreads),
    ]


RATIOS = ("ratio", "median of rounds", "by round")


def _wall(results: Results, one: Results) -> tuple[str, str]:
    wall = wall_s(results, one["model"], one["dtype"], one["figure"])
    if wall is None:
        return MISSING, MISSING
    return milliseconds(wall), f"{one['contenders'][one['ours']]['median'] / wall:.2f}"


def _memory(results: Results) -> Iterable[list[str]]:
    for one in results["memory"]:
        bare = statistics.median(results["bare_rss_bytes"])
        once = results["models"][one["model"]]["total"] * (4 if one["dtype"] == "float32" else 2)
        trimmed = memory_over(results, {**one, "rss_bytes": one["rss_trimmed_bytes"]})
        sizes = (one["rss_bytes"], bare, one["weights_bytes"], once, one["cache_bytes"])
        yield [
            label(one["model"], one["dtype"]),
            *(f"{size / 1e6:,.1f}" for size in sizes),
            f"{memory_over(results, one):,.1f}",
            f"{trimmed:,.1f}",
        ]


def _load(results: Results) -> str:
    imports, loads = ([one[name] for one in results["load"]] for name in ("import_torch_s", "load_s"))
    lines = []
    if loads:
        lines.append(
            f"SmolLM2 in bf16 loads in {statistics.median(loads):.2f} s ({min(loads):.2f} to {max(loads):.2f}, "
            f"{len(loads)} fresh processes; `import torch` before it: {statistics.median(imports):.2f} s)."
        )
    if seconds := results["help_s"]:
        lines.append(
            f"`kvouch --help` takes {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, "
            f"{len(seconds)} processes)."
        )
    return "\n".join(lines)


def _ids(results: Results) -> Iterable[list[str]]:
    for model, dtype in pairs(results):
        said: dict[str, Any] = {
            one["kind"] if one["peer"] != OURS else OURS: one["next_ids"]
            for one in results["processes"]
            if (one["model"], one["dtype"]) == (model, dtype) and one["next_ids"]
        }
        three = [said.get(key) for key in (OURS, "dynamic", "static")]
        texts = [MISSING if ids is None else " ".join(map(str, ids)) for ids in three]
        yield [label(model, dtype), *texts, "yes" if len(set(texts)) == 1 else "no"]
