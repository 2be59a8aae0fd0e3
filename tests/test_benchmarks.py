"""Benchmarks write results in one form, and the document of results is what the kept ones give."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workloads import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def run(module: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_document_of_results_is_what_the_kept_results_give() -> None:
    done = run("render", "--check")
    assert done.returncode == 0, done.stderr
    page, kept = (ROOT / "docs" / "results.md").read_text(), [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    assert len(kept) > 10
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| figure |")]
    assert len(rows) == sum(len(result["figures"]) for result in kept)


def test_figures_of_the_emulator_are_labelled_in_the_document(tmp_path: Path) -> None:
    result = json.loads(next(iter(RESULTS.glob("quality-*.json"))).read_text())
    result["figures"] = [result["figures"][0] | {"labels": ["emulator"]}]
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert f"| {result['figures'][0]['name']} (against 32 bits) *emulator* |" in run("render", tmp_path / "result.json").stdout


@pytest.mark.parametrize(
    ("benchmark", "words"), [("usdt", ("--rounds", "2")), ("comparing", ("power", "--runs", "5", "--repeats", "2"))]
)
def test_a_benchmark_writes_a_result_that_reads(tmp_path: Path, benchmark: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "result.json"
    done = run(benchmark, *words, "--json", file)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["benchmark"] == benchmark and str(file) not in result["command"]
    assert result["machine"]["cpus"] > 0 and result["machine"]["kernel"]
    names = [figure["name"] for figure in result["figures"]]
    assert names and all(name in done.stdout for name in names)
    page = run("render", file)
    assert page.returncode == 0, page.stderr
    assert page.stdout.count("\n| ") == 1 + len(names)
    for figure in result["figures"]:
        assert figure["low"] is None or figure["low"] <= figure["median"] <= figure["high"]


def test_windows_are_as_long_as_a_few_tokens_of_the_process_need(tmp_path: Path) -> None:
    words = ("runtime", "--rounds", "2", "--seconds", "0.0001", "--variants", "nothing")
    done = run("overhead", *words, "--json", tmp_path / "result.json")
    assert "instead of 0.00" in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == 0 or "the process was too slow" in done.stderr  # where others take the CPUs


@pytest.mark.parametrize("change", [{"unknown": 1}, {"figures": [{"name": "x", "unit": "s", "median": "1"}]}, {"date": None}])
def test_what_is_no_result_is_refused_with_a_line(tmp_path: Path, change: dict[str, object]) -> None:
    result = json.loads(next(iter(RESULTS.glob("*.json"))).read_text()) | change
    (tmp_path / "result.json").write_text(json.dumps(result))
    done = run("render", tmp_path / "result.json")
    assert done.returncode == 2 and "is no result" in done.stderr and "Traceback" not in done.stderr


def test_every_benchmark_says_how_it_is_run() -> None:
    programs = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("__init__", "render")]
    assert len(programs) >= 20
    for name in programs:
        assert f"benchmarks.{name}" in (ROOT / "benchmarks" / f"{name}.py").read_text().split('"""')[1], name


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_result_names_the_commit_that_was_measured(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run("usdt", "--rounds", "1", "--json", tmp_path / "result.json")
    assert head.startswith(json.loads((tmp_path / "result.json").read_text())["commit"].rstrip("+"))
