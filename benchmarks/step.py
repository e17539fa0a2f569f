"""kvouch beside transformers, in one run: `python -m benchmarks.step`. Takes options, writes files.

`--path torch` measures the path that GPUs and other processors take.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.inputs import LABELS, SMOLLM2
from benchmarks.machine import environment, machine_name
from benchmarks.processes import Workers, process_environment
from benchmarks.report import report
from benchmarks.rounds import Run, run_all
from benchmarks.sizes import FULL, QUICK

SCHEMA = "kvouch.benchmarks.step.2"
ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("float32", "bfloat16")
PATHS = ("auto", "torch")


def main() -> int:
    asked = _arguments()
    size = QUICK if asked.quick else FULL
    if asked.rounds is not None:
        size = replace(size, rounds=asked.rounds)
    with tempfile.TemporaryDirectory(prefix="kvouch-bench-") as scratch:
        workers = Workers(ROOT, Path(scratch), process_environment(), asked.threads)
        started = date.today().isoformat()
        directories = {name: _directory(name, workers, Path(scratch)) for name in asked.models.split(",")}
        dtypes = tuple(asked.dtypes.split(","))
        results, seen = run_all(
            Run(root=ROOT, workers=workers, size=size, directories=directories, dtypes=dtypes, path=asked.path),
        )
    results = {"schema": SCHEMA, "date": started, "quick": asked.quick, "path": asked.path, **results}
    record = environment(ROOT, seen)
    out = Path(asked.out) if asked.out else _default_out(asked, started, machine_name(record))
    _write(out, results, record)
    print(f"\n{report(results, record)}\nwritten: {out}")
    return 1 if results["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(LABELS), help="of %(default)s")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of %(default)s")
    parser.add_argument("--path", choices=PATHS, default="auto", help="how kvouch computes; by default its best")
    parser.add_argument("--out", help="folder; by default evidence/step/<date>-<machine>")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; by default into build/")
    parser.add_argument("--rounds", type=int, help=f"by default {FULL.rounds}; each gives a slow prefill one sample")
    parser.add_argument("--threads", type=int, help="for every process; by default what torch chooses")
    asked = parser.parse_args()
    if asked.rounds is not None and asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}: one at least")
    for name, known in (("models", LABELS), ("dtypes", DTYPES)):
        wrong = [one for one in getattr(asked, name).split(",") if one not in known]
        if wrong:
            parser.error(f"--{name}: {wrong} not known; give some of {list(known)}")
    return asked


def _directory(name: str, workers: Workers, scratch: Path) -> Path:
    """A model directory that both libraries load."""
    if name == "gpt2":
        directory = scratch / "gpt2"
        if workers.call("making a random GPT-2", {"job": "random_gpt2", "directory": str(directory)}) is None:
            raise SystemExit("the GPT-2 model could not be made")
        return directory
    from kvouch.loader.home import kvouch_home
    from kvouch.loader.pull import resolve

    return resolve(SMOLLM2, kvouch_home(), lambda stage, done, total: None)


def _default_out(asked: argparse.Namespace, day: str, machine: str) -> Path:
    kind = "step" if asked.path == "auto" else "torch_path"
    return ROOT / (f"build/{kind}-quick" if asked.quick else f"evidence/{kind}/{day}-{machine}")


def _write(out: Path, results: dict[str, Any], record: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(lines(results), encoding="utf-8")
    (out / "environment.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(report(results, record), encoding="utf-8")


def lines(results: dict[str, Any]) -> str:
    """JSON with one field a line, and one record a line in fields that are lists of records."""
    fields = []
    for name, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
        fields.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
