"""The README's benchmark table, from a results.json: `python -m benchmarks.readme`. Types no number by hand."""

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks import batches, identity
from benchmarks.table import Results, bounded, cell, grade, label, markdown, memory_over, pairs, path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    asked = _arguments(arguments)
    try:
        folder = Path(asked.results).parent if asked.results else newest(ROOT / "evidence" / "step")
        results, environment = (
            json.loads((folder / name).read_text()) for name in ("results.json", "environment.json")
        )
        readme = Path(asked.readme)
        old = readme.read_text(encoding="utf-8")
        new = replaced(old, block(results, environment, _link(folder)), "benchmark")
        for name, sentence in (("identity", identity.sentence), ("batches", batches.sentence)):
            found = newest(ROOT / "evidence" / name)
            new = replaced(new, sentence(json.loads((found / "results.json").read_text()), _link(found)), name)
    except (OSError, ValueError) as error:
        print(f"benchmarks.readme: {error}", file=sys.stderr)
        return 1
    if asked.check:
        if new != old:
            print("benchmarks.readme: the table is not what the results give; run python -m benchmarks.readme")
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("results", nargs="?", help="a results.json; by default the newest under evidence/step")
    parser.add_argument("--readme", default=str(ROOT / "README.md"))
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README would change")
    return parser.parse_args(arguments)


def newest(evidence: Path) -> Path:
    """The last folder by name (names begin with the date); ValueError where there is none."""
    folders = sorted(file.parent for file in evidence.glob("*/results.json"))
    if not folders:
        raise ValueError(f"no results under {evidence.name}: run python -m benchmarks.{evidence.name}")
    return folders[-1]


def replaced(text: str, table: str, name: str) -> str:
    """The text with the table between the marks of that name; ValueError where they are not there just once each."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"the README needs one {begin} and after it one {end}")
    return text[: text.index(begin) + len(begin)] + f"\n{table}\n" + text[text.index(end) :]


def block(results: Results, environment: Results, link: str) -> str:
    """Two small tables (a phone is narrow) and what must be known to read them."""
    if results["quick"]:
        raise ValueError("these are the results of a quick run, which mean nothing")
    return "\n\n".join(
        [
            "Milliseconds, `kvouch / transformers (times as fast)`; transformers with the better of its two caches.",
            _table(results, "decode", "one more token at"),
            _table(results, "prefill", "prefill of", {"warm": "warm first token", "text": "a short text"}),
            _reading(results, environment, link),
        ]
    )


def _table(results: Results, kind: str, title: str, also: dict[str, str] | None = None) -> str:
    taken = (one["figure"] for one in (*results["comparisons"], *results["alone"]))
    figures = sorted({figure for figure in taken if figure.startswith(f"{kind} ")}, key=_length)
    columns = {figure: f"{_length(figure):,}" for figure in figures} | (also or {})
    rows = [(label(*pair), *(cell(results, *pair, figure) for figure in columns)) for pair in pairs(results)]
    return markdown((title, *columns.values()), rows)


def _length(figure: str) -> int:
    return int(figure.split()[1])


def _reading(results: Results, environment: Results, link: str) -> str:
    cpu, packages, torch = environment["cpu"], environment["packages"], environment["torch"]
    grades = {label(*pair): grade(results, *pair) for pair in pairs(results)}
    same = set(grades.values())
    said = same.pop() if len(same) == 1 else "; ".join(f"{name} {one}" for name, one in grades.items())
    sentences = [
        f"{results['date']}, {cpu['model']}, {environment['cores']} cores ({torch['capability']}), "
        f"torch {packages['torch']}, transformers {packages['transformers']}, {torch['threads']} threads, "
        f"eager, medians over {results['rounds']} rounds of alternating processes.",
        _bf16(cpu["bf16_instructions"]),
        f"Path: {', '.join(dict.fromkeys(path(results, *pair) for pair in pairs(results)))}. Grade: {said}.",
        _lengths(results, "warm", "Warm: cached positions + new ones, the cache kept for the next use"),
        _lengths(results, "text", "A short text: prompt + new tokens, end to end"),
        _bounded(results),
        *_costs(results),
        f"Raw samples: [{link}]({link}).",
    ]
    return " ".join(one for one in sentences if one)


def _bf16(has_instructions: bool) -> str:
    if has_instructions:
        return ""
    return "**This CPU has no bf16 instructions**: prefills in bf16 are slow on it in transformers."


def _bounded(results: Results) -> str:
    told = "`>`: not timed, since a short prefill foretold more than that."
    return told if any(bounded(results, one["model"], one["dtype"], one["figure"]) for one in results["alone"]) else ""


def _lengths(results: Results, kind: str, title: str) -> str:
    """What a kind of figure means for each model."""
    figures = dict.fromkeys(
        (label(one["model"], "").strip(), one["figure"].split()[1])
        for one in results["comparisons"]
        if one["figure"].startswith(f"{kind} ")
    )
    told = ", ".join(f"{model} {lengths.replace('+', ' + ')}" for model, lengths in figures)
    return f"{title} ({told})." if told else ""


def _costs(results: Results) -> list[str]:
    sentences = []
    over = [memory_over(results, one) for one in results["memory"]]
    if over:
        sentences.append(f"Memory over bare torch: weights, cache and {min(over):.0f} to {max(over):.0f} MB.")
    if results["load"]:
        seconds = statistics.median(one["load_s"] for one in results["load"])
        sentences.append(f"SmolLM2 loads in {seconds:.1f} s in bf16.")
    if results["help_s"]:
        sentences.append(f"`kvouch --help` takes {statistics.median(results['help_s']):.2f} s.")
    return sentences


def _link(folder: Path) -> str:
    resolved = folder.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else folder.name


if __name__ == "__main__":
    sys.exit(main())
