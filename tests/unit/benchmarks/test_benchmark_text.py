"""The report and the README's table, from a small results.json that no machine ever gave."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks import readme
from benchmarks.figures import Series, compare_all
from benchmarks.machine import cpu_facts, machine_name
from benchmarks.report import goals, report
from benchmarks.step import SCHEMA, lines
from benchmarks.table import cell, grade, markdown, milliseconds, ratio

MB = 1_000_000
SECONDS = {"decode 16": 0.02, "decode 128": 0.021, "prefill 512": 0.5, "warm 512+32": 0.05}
CPUINFO = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma\n"


def _series(dtype: str) -> list[Series]:
    both = (("kvouch", "auto", 1.0), ("transformers", "dynamic", 2.0), ("transformers", "static", 1.5))
    return [
        Series(round=1, model="gpt2", dtype=dtype, peer=peer, way=way, figure=figure, seconds=(seconds * factor,) * 3)
        for peer, way, factor in both
        for figure, seconds in SECONDS.items()
    ]


@pytest.fixture
def results() -> dict[str, Any]:
    compared, alone = compare_all(_series("float32") + _series("bfloat16"))
    about = {"about": "a made-up model", "total": 100 * MB, "every_row": 50 * MB, "plan": {"longest_s": 30.0}}
    ran = {"round": 1, "model": "gpt2", "kind": "auto", "path": "compiled avx2", "next_ids": [1, 2], "untimed": []}
    held = {"weights_bytes": 400 * MB, "position_bytes": MB}
    memory = {"weights_bytes": 400 * MB, "cache_bytes": 20 * MB, "rss_trimmed_bytes": 640 * MB}
    found = {
        "schema": SCHEMA,
        "date": "2030-01-02",
        "quick": False,
        "path": "torch",
        "rounds": 1,
        "ids": "random, seed 0",
        "models": {"gpt2": about},
        "bare_rss_bytes": [200 * MB, 201 * MB, 199 * MB],
        "help_s": [0.21, 0.2, 0.5],
        "load": [{"import_torch_s": 2.0, "load_s": 1.25}],
        "memory": [{"model": "gpt2", "dtype": "float32", "rss_bytes": 650 * MB, **memory}],
        "walls": [{"round": 1, "read_gb_s": [10.0, 20.0], "float32_gflop_s": [100.0], "bfloat16_gflop_s": [9.0]}],
        "comparisons": [asdict(one) for one in compared],
        "alone": [asdict(one) for one in alone],
        "processes": [
            {**ran, "dtype": dtype, "peer": "kvouch", "grade": "bitwise", "chunks_are_equal": True, **held}
            for dtype in ("float32", "bfloat16")
        ],
        "series": [],
        "failures": [],
    }
    read: dict[str, Any] = json.loads(lines(found))
    return read


@pytest.fixture
def environment() -> dict[str, Any]:
    return {
        "cpu": cpu_facts(CPUINFO),
        "cores": 2,
        "memory_gb": 8,
        "governor": "unknown",
        "packages": {"torch": "2.13.0", "transformers": "5.24.0", "kvouch": "0.1.0"},
        "torch": {"threads": 2, "capability": "AVX2"},
        "commit": "0123456789abcdef",
        "dirty": True,
    }


def test_results_read_back_as_they_were_written(results: dict[str, Any]) -> None:
    assert json.loads(lines(results)) == results
    assert '\n{"round": 1, "model": "gpt2"' in lines(results)  # a record a line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0081, "8.1"), (0.0998, "99.8"), (0.1, "100"), (14.0123, "14,012"), (0.09996, "100")]
)
def test_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_a_ratio_is_cut_and_never_rounded_up() -> None:
    assert [ratio(value) for value in (1.2999, 1.3, 0.999, 12.0)] == ["1.29", "1.30", "0.99", "12.00"]


def test_markdown() -> None:
    assert markdown(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | --: |\n| x | 1 |"


def test_a_cell_has_both_and_the_ratio(results: dict[str, Any]) -> None:
    assert cell(results, "gpt2", "float32", "decode 16") == "20.0 / 30.0 (1.50×)"
    assert cell(results, "gpt2", "float32", "warm") == "50.0 / 75.0 (1.50×)"
    assert cell(results, "gpt2", "float32", "decode 960") == "–"


def test_the_block_has_a_row_for_each_model_and_dtype(results: dict[str, Any], environment: dict[str, Any]) -> None:
    text = readme.block(results, environment, "evidence/here")
    assert "| one more token at | 16 | 128 |" in text
    assert "| GPT-2 124M fp32 | 20.0 / 30.0 (1.50×) | 21.0 / 31.5 (1.50×) |" in text
    assert "| prefill of | 512 | warm first token | a short text |" in text
    assert "| GPT-2 124M bf16 | 500 / 750 (1.50×) | 50.0 / 75.0 (1.50×) | – |" in text
    assert "(GPT-2 124M 512 + 32)" in text
    assert "Grade: bitwise." in text
    assert "weights, cache and 30 to 30 MB" in text
    assert "in 1.2 s in bf16" in text
    assert "takes 0.21 s" in text
    assert "[evidence/here](evidence/here)" in text


def test_the_block_says_that_the_cpu_has_no_bf16_instructions(
    results: dict[str, Any], environment: dict[str, Any]
) -> None:
    assert "no bf16 instructions" in readme.block(results, environment, "x")
    environment["cpu"]["bf16_instructions"] = True
    assert "no bf16 instructions" not in readme.block(results, environment, "x")


def test_what_was_foretold_too_slow_is_a_bound(results: dict[str, Any], environment: dict[str, Any]) -> None:
    slow = copy.deepcopy(results)
    one = next(c for c in slow["comparisons"] if (c["dtype"], c["figure"]) == ("bfloat16", "prefill 512"))
    slow["comparisons"].remove(one)
    slow["alone"].append({**one, "contenders": {"kvouch auto": one["contenders"]["kvouch auto"]}})
    assert cell(slow, "gpt2", "bfloat16", "prefill 512") == "–"  # no process says why
    other = {**slow["processes"][1], "peer": "transformers", "kind": "static", "untimed": ["prefill 512"]}
    slow["processes"].append(other)
    assert cell(slow, "gpt2", "bfloat16", "prefill 512") == "500 / > 30,000"
    text = readme.block(slow, environment, "x")
    assert "500 / > 30,000" in text
    assert "`>`: not timed" in text
    assert "`>`" not in readme.block(results, environment, "x")
    assert "- GPT-2 124M bf16 prefill 512: transformers static" in report(slow, environment)
    found = {name: (seen, met) for name, _, seen, met in goals(slow)}
    assert found["GPT-2 124M bf16: prefill, worst ratio"] == ("60.00", True)


def test_a_quick_run_never_reaches_the_readme(results: dict[str, Any], environment: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quick run"):
        readme.block({**results, "quick": True}, environment, "x")


def test_a_refuted_grade_is_said_and_is_no_goal_met(results: dict[str, Any], environment: dict[str, Any]) -> None:
    broken = copy.deepcopy(results)
    broken["processes"][0]["chunks_are_equal"] = False
    assert "REFUTED" in grade(broken, "gpt2", "float32")
    assert "GPT-2 124M fp32 bitwise REFUTED" in readme.block(broken, environment, "x")
    assert [met for name, _, _, met in goals(broken) if name.endswith("fp32: grade")] == [False]
    assert [met for name, _, _, met in goals(results) if name.endswith("fp32: grade")] == [True]


def test_goals_are_judged_by_the_worst_figure(results: dict[str, Any]) -> None:
    slow = copy.deepcopy(results)
    slow["comparisons"][0]["ratio"] = 1.2999
    decode = {name: (found, met) for name, _, found, met in goals(slow) if "decode" in name}
    assert decode["GPT-2 124M fp32: decode, worst ratio"] == ("1.29", False)
    assert decode["GPT-2 124M bf16: decode, worst ratio"] == ("1.50", True)


def test_the_report_has_walls_memory_and_failures(results: dict[str, Any], environment: dict[str, Any]) -> None:
    text = report({**results, "failures": ["round 1 walls: exit 1"]}, environment)
    assert "| decode 128 | kvouch auto | transformers static | 26.4 | 0.80 |" in text  # 400 + 128 MB at 20 GB/s
    assert "| prefill 512 | kvouch auto | transformers static | 512 | 0.98 |" in text  # 51.2 GFLOP at 100 a second
    assert "| GPT-2 124M fp32 | 650.0 | 200.0 | 400.0 | 400.0 | 20.0 | 30.0 | 20.0 |" in text
    assert "at 0123456789ab, with changes that are not committed" in text
    assert "## Failures\n\n- round 1 walls: exit 1" in text


def test_a_report_without_load_help_or_memory_still_comes(results: dict[str, Any], environment: dict[str, Any]) -> None:
    less = {**results, "load": [], "help_s": [], "memory": []}
    assert "## Reach" in report(less, environment)
    assert "Grade" in readme.block(less, environment, "x")


def test_the_machine_is_named_by_cpu_and_cores() -> None:
    intel = cpu_facts("model name : Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz\nflags : avx512f amx_bf16 x\n")
    assert intel["flags"] == ["avx512f", "amx_bf16"]
    assert intel["bf16_instructions"]
    named = {"cpu": intel, "cores": 8, "torch": {"capability": "AVX512"}}
    assert machine_name(named) == "intel-xeon-platinum-8480-avx512-8-cores"


def _folder(root: Path, results: dict[str, Any], environment: dict[str, Any]) -> Path:
    folder = root / "2030-01-02-here"
    folder.mkdir()
    (folder / "results.json").write_text(lines(results), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder


BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
OTHERS = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->" for name in ("identity", "batches"))


def test_check_fails_until_the_readme_is_written(
    tmp_path: Path, results: dict[str, Any], environment: dict[str, Any]
) -> None:
    folder = _folder(tmp_path, results, environment)
    page = tmp_path / "README.md"
    page.write_text(f"before\n{OTHERS}\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    arguments = [str(folder / "results.json"), "--readme", str(page)]
    assert readme.main([*arguments, "--check"]) == 1
    assert "old" in page.read_text(encoding="utf-8")
    assert readme.main(arguments) == 0
    assert readme.main([*arguments, "--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "Raw samples: [evidence/identity/" in text
    assert "old" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", BEGIN * 2 + END])
def test_a_readme_without_its_marks_is_left_alone(
    page: str, tmp_path: Path, results: dict[str, Any], environment: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = _folder(tmp_path, results, environment), tmp_path / "README.md"
    file.write_text(page, encoding="utf-8")
    assert readme.main([str(folder / "results.json"), "--readme", str(file)]) == 1
    assert BEGIN in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == page


def test_the_newest_results_are_taken_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        readme.newest(tmp_path)
    for name in ("2030-01-02-a", "2029-12-31-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").touch()
    assert readme.newest(tmp_path).name == "2030-01-02-a"
