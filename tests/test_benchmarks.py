"""Benchmarks write results in one form, and the document of results is what the kept ones give."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workloads import ROOT

RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"


def run(module: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def table_rows(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("| figure |")]


def test_every_kept_figure_stands_once_on_the_pages_of_results() -> None:
    done = run("render", "--check")
    assert done.returncode == 0, done.stderr
    kept = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    assert len(kept) > 10
    for benchmark in {result["benchmark"] for result in kept}:
        pages = [PAGES / f"{benchmark}.md", *PAGES.glob(f"{benchmark}-*.md")]
        figures = sum(len(result["figures"]) for result in kept if result["benchmark"] == benchmark)
        assert sum(len(table_rows(page)) for page in pages) == figures, benchmark


def measured(date: str, median: float, **machine: object) -> dict[str, object]:
    on = {"cpu_model": "Some CPU", "cpus": 2, "arch": "x86_64", "features": ["avx2"], "kernel": "6.18.44", "os": "Debian"}
    ratio = {"name": "avx2, decode: speed", "unit": "ratio", "median": median, "low": median - 0.1, "high": median + 0.1}
    ratio |= {"interval": "95 % bootstrap", "n": 5, "against": "llama.cpp of the same set"}
    once = [{"name": "avx2, decode: ours", "unit": "ms/token", "median": 20.0}] if median < 1 else []
    about = {"benchmark": "runtime", "date": date, "commit": f"c{date[-2:]}", "command": "", "rounds": 5}
    return about | {"machine": on | {"memory_bytes": None} | machine, "figures": [ratio, *once]}


def written(folder: Path, *results: dict[str, object]) -> dict[str, str]:
    """name → text of the pages that these results give."""
    (folder / "results").mkdir()
    for number, result in enumerate(results):
        (folder / "results" / f"runtime-{number}.json").write_text(json.dumps(result))
    done = run("render", "--from", folder / "results", "--to", folder)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in [folder / "results.md", *(folder / "results").glob("*.md")]}


def test_the_front_page_has_the_newest_figure_of_each_machine_and_the_rest_is_kept(tmp_path: Path) -> None:
    old, elsewhere, new = (
        measured("2026-01-01", 0.5),
        measured("2026-01-03", 2.0, cpu_model="Another CPU"),
        measured("2026-01-02", 1.25),
    )
    texts = written(tmp_path, old, elsewhere, new)
    rows = [line for line in texts["results.md"].splitlines() if line.startswith("| avx2 ")]
    assert [("2 (1.9 to 2.1)" in row, "1.25 (1.15 to 1.35)" in row) for row in rows] == [(True, False), (False, True)]
    assert "c01" not in texts["results.md"]
    assert "| avx2, decode: ours | 20 ms/token |" in texts["runtime.md"], "measured once only, so it is the newest"
    assert "0.5 ratio" in texts["runtime-earlier.md"] and "0.5 ratio" not in texts["runtime.md"]


def test_a_later_build_of_the_same_kernel_is_the_same_machine(tmp_path: Path) -> None:
    texts = written(tmp_path, measured("2026-01-01", 0.5, kernel="6.18.1"), measured("2026-01-02", 1.25, kernel="6.18.2"))
    assert texts["results.md"].count("| avx2 ") == 1


def test_every_claim_has_a_figure_in_each_of_its_columns() -> None:
    tables = (ROOT / "docs" / "results.md").read_text().split("\n## [")[1:]
    assert len(tables) == (ROOT / "benchmarks" / "headlines.toml").read_text().count("[[claim]]")
    for table in tables:
        rows = [line.split("|")[2:-4] for line in table.splitlines() if line.startswith("| ")][1:]
        assert rows and all(any(cell.strip() for cell in column) for column in zip(*rows, strict=True)), table


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
