"""Numbers as text, and markdown tables of them. Pure: knows results.json's fields; reads and writes no file."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.figures import OURS
from benchmarks.inputs import LABELS

DTYPE_LABELS = {"float32": "fp32", "bfloat16": "bf16"}
MISSING = "–"

Results = dict[str, Any]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def milliseconds(seconds: float) -> str:
    """One decimal below 100 ms, none above."""
    return f"{seconds * 1e3:.1f}" if seconds < 0.0999 else f"{seconds * 1e3:,.0f}"


def ratio(value: float) -> str:
    """Cut, never rounded up: 1.299 is not 1.30."""
    return f"{int(value * 100 + 1e-9) / 100:.2f}"


def label(model: str, dtype: str) -> str:
    return f"{LABELS.get(model, model)} {DTYPE_LABELS.get(dtype, dtype)}"


def pairs(results: Results) -> list[tuple[str, str]]:
    """Models and dtypes that have a comparison, in the order of the run."""
    return list(dict.fromkeys((one["model"], one["dtype"]) for one in results["comparisons"]))


def pick(records: Iterable[Results], model: str, dtype: str, figure: str) -> Results | None:
    """The record of one figure; `warm` stands for whatever prefix that model was given."""
    for one in records:
        if (one["model"], one["dtype"]) == (model, dtype) and figure in (one["figure"], one["figure"].split()[0]):
            return one
    return None


def cell(results: Results, model: str, dtype: str, figure: str) -> str:
    """`ours / theirs (ratio)` in milliseconds; `ours / > limit` where theirs was foretold to take longer."""
    both = pick(results["comparisons"], model, dtype, figure)
    if both is not None:
        ours, theirs = (both["contenders"][both[side]]["median"] for side in ("ours", "theirs"))
        return f"{milliseconds(ours)} / {milliseconds(theirs)} ({ratio(both['ratio'])}×)"
    known = bounded(results, model, dtype, figure)
    return MISSING if known is None else f"{milliseconds(known[0])} / > {milliseconds(known[1])}"


def bounded(results: Results, model: str, dtype: str, figure: str) -> tuple[float, float] | None:
    """Our seconds and the limit that every other way was foretold to pass, if that is so."""
    one = pick(results["alone"], model, dtype, figure)
    others = [p for p in results["processes"] if (p["model"], p["dtype"]) == (model, dtype) and p["peer"] != OURS]
    if one is None or not others or any(figure not in process["untimed"] for process in others):
        return None
    ours = [spread["median"] for name, spread in one["contenders"].items() if name.startswith(f"{OURS} ")]
    return (min(ours), results["models"][model]["plan"]["longest_s"]) if ours else None


def grade(results: Results, model: str, dtype: str) -> str:
    """The grade of our processes, and whether their check of chunks agreed with it."""
    ours = [p for p in results["processes"] if (p["model"], p["dtype"], p["peer"]) == (model, dtype, OURS)]
    grades = sorted({p["grade"] for p in ours}) or ["no grade"]
    broken = [p for p in ours if p["grade"] == "bitwise" and not p["chunks_are_equal"]]
    return ", ".join(grades) + (" REFUTED: chunks gave other bits" if broken else "")


def path(results: Results, model: str, dtype: str) -> str:
    """What our processes computed with."""
    ours = {p["path"] for p in results["processes"] if (p["model"], p["dtype"], p["peer"]) == (model, dtype, OURS)}
    return ", ".join(sorted(ours)) or MISSING


def wall_s(results: Results, model: str, dtype: str, figure: str) -> float | None:
    """What the walls of this run allow: a decode step reads all weights and the cache once; a prefill multiplies every
    matrix number with every position (attention, which adds to it, left out). None where no wall stands for a figure.
    """
    kind, length = figure.split()
    about = results["models"][model]
    ours = [p for p in results["processes"] if (p["model"], p["dtype"], p["peer"]) == (model, dtype, OURS)]
    if not ours or not results["walls"] or kind not in ("decode", "prefill"):
        return None
    if kind == "decode":
        read = ours[0]["weights_bytes"] + ours[0]["position_bytes"] * int(length)
        return float(read / 1e9 / best_wall(results, "read_gb_s"))
    dtypes = ("float32",) if dtype == "float32" else ("float32", "bfloat16")  # without bf16 instructions: widened
    compute = max(best_wall(results, f"{name}_gflop_s") for name in dtypes)
    return float(2 * about["every_row"] * int(length) / 1e9 / compute)


def best_wall(results: Results, name: str) -> float:
    """The best of all rounds."""
    return float(max(max(wall[name]) for wall in results["walls"]))


def memory_over(results: Results, one: Results) -> float:
    """Megabytes over bare torch, weights and cache."""
    bare = sorted(results["bare_rss_bytes"])[len(results["bare_rss_bytes"]) // 2]
    return float(one["rss_bytes"] - bare - one["weights_bytes"] - one["cache_bytes"]) / 1e6
