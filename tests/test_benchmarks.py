"""Benchmarks write results in one form, and the document of results is what the kept ones give."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from runtime.cache_rules.eviction import LRU
from workloads import ROOT
from workloads.decode_replay import DEMAND, NEXT_LAYER, NEXT_TOKEN, Costs, Knowledge, Replay

RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"


def run(module: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def cells(page: Path) -> list[str]:
    """Figures of a page of results: what stands in its tables between the name of a row and n."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("|  |")]
    return [figure for row in rows for cell in row.split(" | ")[1:-1] for figure in cell.split("; ") if figure.strip(" |")]


def test_every_kept_figure_stands_once_on_the_page_of_its_benchmark() -> None:
    done = run("render", "--check")
    assert done.returncode == 0, done.stderr
    kept = [result for path in RESULTS.glob("*.json") for result in json.loads(path.read_text())]
    assert len(kept) > 10
    for benchmark in {result["benchmark"] for result in kept}:
        figures = sum(len(result["figures"]) for result in kept if result["benchmark"] == benchmark)
        assert figures and len(cells(PAGES / f"{benchmark}.md")) == figures, benchmark


def test_there_is_one_file_for_each_benchmark_and_machine() -> None:
    of = [
        {(one["benchmark"], str(one["machine"]["cpu_model"])) for one in json.loads(p.read_text())}
        for p in RESULTS.glob("*.json")
    ]
    assert all(len(pair) == 1 for pair in of) and len(set.union(*of)) == len(of)


def measured(date: str, medians: dict[str, float], **machine: object) -> dict[str, object]:
    """A result of benchmark runtime: set → speed."""
    on = {
        "cpu_model": "Some CPU",
        "cpus": 2,
        "arch": "x86_64",
        "features": ["avx2"],
        "kernel": "6.18",
        "os": "",
        "memory_bytes": None,
    }
    figures = [
        {"name": f"{name}, decode: speed", "unit": "ratio", "median": median, "low": median - 0.1, "high": median + 0.1, "n": 5}
        | {"interval": "min..max", "against": "llama.cpp of the same set"}
        for name, median in medians.items()
    ]
    about = {"benchmark": "runtime", "date": date, "commit": "c", "command": "", "rounds": 5}
    return about | {"machine": on | machine, "figures": figures}


def test_the_front_page_has_the_figures_of_each_machine_with_their_n(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    here, there = (
        [measured("2026-01-01", {"avxvnni": 0.75}), measured("2026-01-02", {"avx2": 1.25}, kernel="6.19")],
        [measured("2026-01-03", {"avx2": 2.0}, cpu_model="Another CPU")],
    )
    for name, results in (("here", here), ("there", there)):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(results))
    done = run("render", "--from", tmp_path / "results", "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    front, page = ((tmp_path / name).read_text() for name in ("results.md", "results/runtime.md"))
    both = "Another CPU (n 5): avx2: decode 2. Some CPU (n 5): avxvnni: decode 0.750; avx2: decode 1.25."
    assert both.replace(": decode", " decode") in " ".join(front.split())
    assert all(f"| {shown} | 5 |" in page for shown in ("0.7500 (0.6500 to 0.8500)", "1.250 (1.150 to 1.350)"))


def test_a_result_needs_no_name_of_a_file_and_replaces_the_figures_that_it_measured_again(tmp_path: Path) -> None:
    words = ("usdt", "--rounds", "1", "--json", tmp_path)
    assert run(*words).returncode == 0
    (path,) = tmp_path.iterdir()
    (old,) = json.loads(path.read_text())
    assert path.name.startswith("usdt-") and old["command"] == "python -m benchmarks.usdt --rounds 1"
    again = [figure | {"median": -1.0} for figure in old["figures"]]
    path.write_text(json.dumps([old | {"figures": [*again, again[0] | {"name": "another figure"}]}]))
    assert run(*words).returncode == 0
    kept, new = json.loads(path.read_text())
    assert [figure["name"] for figure in kept["figures"]] == ["another figure"]
    assert [figure["name"] for figure in new["figures"]] == [figure["name"] for figure in again]
    assert all(figure["median"] > 0 for figure in new["figures"]) and list(tmp_path.iterdir()) == [path]
    refused = run("usdt", "--json", "RUN")
    assert refused.returncode == 2 and ".json" in refused.stderr


def test_every_claim_has_an_answer_with_each_of_its_columns() -> None:
    front = (ROOT / "docs" / "results.md").read_text()
    claims = tomllib.loads((ROOT / "benchmarks" / "headlines.toml").read_text())["claim"]
    answers = [" ".join(text.split()) for text in front.partition("\n- **[")[2].split("\n- **[")]
    assert sum(claim.get("first", False) for claim in claims) == 5 and len(claims) == len(answers)
    for claim, answer in zip(claims, answers, strict=True):
        assert answer.startswith(claim["title"]) and " (n " in answer and all(head in answer for head, *_ in claim["columns"])


def test_figures_of_the_emulator_are_labelled_in_the_document(tmp_path: Path) -> None:
    (result,) = json.loads(next(iter(RESULTS.glob("quality-*.json"))).read_text())
    figure = result["figures"][0] | {"labels": ["emulator"]}
    (tmp_path / "result.json").write_text(json.dumps([result | {"figures": [figure]}]))
    assert f"| {figure['name'].partition(':')[0]} *emulator* |" in run("render", tmp_path / "result.json").stdout


@pytest.mark.parametrize(
    ("benchmark", "words"), [("usdt", ("--rounds", "2")), ("comparing", ("power", "--runs", "5", "--repeats", "2"))]
)
def test_a_benchmark_writes_a_result_that_reads(tmp_path: Path, benchmark: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "result.json"
    done = run(benchmark, *words, "--json", file)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())
    assert result["benchmark"] == benchmark and str(file) not in result["command"]
    assert result["machine"]["cpus"] > 0 and result["machine"]["kernel"]
    names = [figure["name"] for figure in result["figures"]]
    assert names and all(name in done.stdout for name in names)
    page = run("render", file)
    assert page.returncode == 0, page.stderr
    assert all(part in page.stdout for name in names for part in name.split(": "))
    for figure in result["figures"]:
        assert figure.get("low") is None or figure["low"] <= figure["median"] <= figure["high"]


@pytest.mark.long
def test_windows_are_as_long_as_a_few_tokens_of_the_process_need(tmp_path: Path) -> None:
    words = ("runtime", "--rounds", "2", "--seconds", "0.0001", "--variants", "nothing")
    done = run("overhead", *words, "--json", tmp_path / "result.json")
    assert "instead of 0.00" in done.stderr and "Traceback" not in done.stderr
    assert done.returncode in (0, 1)  # where others take the CPUs


@pytest.mark.parametrize("change", [{"unknown": 1}, {"figures": [{"name": "x", "unit": "s", "median": "1"}]}, {"date": None}])
def test_what_is_no_result_is_refused_with_a_line(tmp_path: Path, change: dict[str, object]) -> None:
    result = json.loads(next(iter(RESULTS.glob("*.json"))).read_text())[0] | change
    (tmp_path / "result.json").write_text(json.dumps([result]))
    done = run("render", tmp_path / "result.json")
    assert done.returncode == 2 and "result.json" in done.stderr and done.stderr.count("\n") == 1


def test_a_kept_command_names_no_path_of_the_machine_that_ran_it() -> None:
    commands = [result["command"] for path in RESULTS.glob("*.json") for result in json.loads(path.read_text())]
    assert commands and not [command for command in commands if re.search(r"(^|[ =])/", command)]


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
    assert head.startswith(json.loads((tmp_path / "result.json").read_text())[0]["commit"].rstrip("+"))


def test_a_replayed_token_takes_what_follows_by_hand() -> None:
    def replayed(routes: list[list[list[int]]], room: int, known: Knowledge) -> tuple[float, float]:
        costs = Costs(choose=1, shared=2, expert=3, combine=4, head=5, piece=20, pieces=1)
        return Replay(np.array(routes * 4), 4, room, costs, LRU(), known).run()

    missed, beside, kept = [[[0]], [[1]], [[2]]], [[[0, 1]], [[0, 2]], [[0, 3]]], [[[0, 1], [2, 3]]]
    assert replayed(kept, 4, DEMAND) == pytest.approx((2 * (1 + 2 + 3 + 3 + 4) + 5, 0))
    assert replayed(missed, 2, DEMAND) == replayed(beside, 3, DEMAND) == pytest.approx((1 + 20 + 3 + 4 + 5, 1))
    assert replayed(missed, 2, NEXT_LAYER) == pytest.approx((20 + 3 + 4 + 5, 1)), "read from the token's begin"
    assert replayed(missed, 2, NEXT_TOKEN) == pytest.approx((20 + 3 + 4, 5 / 6)), "from the end of the last one's layers"
