"""Samples that one process takes in turns, and where they are kept. Knows a clock and files; knows no model."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import environment, machine_name

ROOT = Path(__file__).resolve().parent.parent

Samples = dict[str, list[float]]


def taken(runs: Mapping[str, Callable[[], object]], times: int) -> Samples:
    """Seconds of each run, in turns."""
    found: Samples = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return found


def keep(
    name: str,
    about: str | None,
    measure: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
) -> int:
    """The command `python -m benchmarks.<name>`: measures, writes results, environment and report, and prints it."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(about or "").splitlines()[0])
    parser.add_argument("--out", help=f"folder; by default evidence/{name}/<date>-<machine>")
    asked = parser.parse_args()
    import torch

    results = {"schema": f"kvouch.benchmarks.{name}.1", "date": date.today().isoformat(), **measure()}
    seen = {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    record = environment(ROOT, seen)
    out = Path(asked.out) if asked.out else ROOT / f"evidence/{name}/{results['date']}-{machine_name(record)}"
    out.mkdir(parents=True, exist_ok=True)
    for file, content in (("results.json", results), ("environment.json", record)):
        (out / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = report(results)
    (out / "report.md").write_text(table, encoding="utf-8")
    print(f"{table}\nwritten: {out}")
    return 0
