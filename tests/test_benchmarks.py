"""Benchmarks write results in one form, and the document of results is what the kept ones give."""

import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.lib.page_cache import drop_pages
from benchmarks.lib.steps_log import LoggedStep, StepLog, read_log
from benchmarks.memory_limited import second_half
from tests.conftest import can_drop_pages
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


def test_a_log_of_steps_counts_what_storage_brought(tmp_path: Path) -> None:
    if why := can_drop_pages():
        pytest.skip(why)
    file, log = tmp_path / "weights", StepLog(tmp_path / "log")
    file.write_bytes(bytes(4 << 20))
    for read in (lambda: None, file.read_bytes, file.read_bytes, lambda: drop_pages(file), file.read_bytes):
        begin = time.monotonic_ns()
        read()
        log.add(begin)
    steps = read_log(tmp_path / "log")
    brought = [after.read_bytes - before.read_bytes for before, after in pairwise(steps)]
    assert brought[0] == brought[1] == brought[2] == 0, "what was just written is in the page cache"
    assert 4 << 20 <= brought[3] < 5 << 20


def test_figures_are_of_the_second_half_of_what_was_decoded() -> None:
    steps = [LoggedStep(100 * i, 100 * i + (90 if i < 4 else 50), 10 * i * i, i) for i in range(9)]
    assert second_half(steps) == {
        "mean_ns_per_token": 100.0,
        "ns_per_token": 50.0,
        "kernel_bytes_per_token": 10 * (64 - 16) / 4,
        "major_faults_per_token": 1.0,
    }
    assert second_half(steps[:3]) == {}
