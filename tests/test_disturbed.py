"""Steps in which the tracer placed or learnt probes: marked, left out of every figure of speed, and counted."""

import itertools
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from analyzer.compare.metrics import RunTables, extract_metrics
from analyzer.questions import trends
from analyzer.questions.summary import summarize
from analyzer.tables.store import build_tables, load_tables
from tests.conftest import trace
from tests.truth import read_log
from tracer.recording.format import Recording
from workloads.compiling import compile_c
from workloads.recordings import Writer, runtime_step


def recording(folder: Path, begins: list[int], disturbances: list[dict]) -> Path:
    """A prefill step, then decode steps of 1 µs at these times."""
    writer = Writer()
    for number, at in enumerate([1000, *begins]):
        runtime_step(writer, at, number, 2 if number else 1, 1 if number else 4, 1)
    return writer.write(folder, disturbances=disturbances)


def learning(begin_ns: int, end_ns: int) -> dict:
    return {"begin_ns": begin_ns, "end_ns": end_ns, "reason": "learning"}


def test_disturbed_steps_are_left_out_of_speed_trends_and_comparison_and_counted(tmp_path: Path) -> None:
    slow, fast = [10_000 * n for n in range(1, 21)], [201_000 + 2000 * n for n in range(20)]
    folder = recording(tmp_path, slow + fast, [learning(2500, 50_000), learning(45_000, 201_500)])
    tables = load_tables(folder)
    assert tables["tokens"]["disturbed"].tolist() == [False] + [True] * 21 + [False] * 19
    answer = summarize(Recording(folder), tables)
    speed = answer["tokens"]
    assert (speed["disturbed"], speed["decode_steps"], speed["tpot_ms"]["n"]) == ({"decode": 21}, 40, 19)
    assert speed["tpot_ms"]["mean"] == pytest.approx(0.002) and speed["decode_tokens_per_s"] == pytest.approx(500_000)
    assert speed["ttft_ms"] == pytest.approx(0.001)
    assert any("21 of 40" in line for line in answer["missing"])
    assert not {"change point", "periodic", "growth"} & {finding["rule"] for finding in answer["findings"]}
    assert trends.trend_summary(tables)["tpot_ms"]["mean"] == pytest.approx(0.002)
    metrics = extract_metrics(RunTables(tables)).set_index("metric")
    assert metrics.loc["TPOT, median", ["value", "n"]].tolist() == [pytest.approx(0.002), 19]
    assert metrics.loc["decode step", "n"] == 19
    means = metrics[metrics["family"].isin(["closure", "operator"]) & (metrics["phase"] == "decode")]["mean"]
    assert means["step"] == pytest.approx(means.drop("step").sum()) == pytest.approx(0.001)


def test_an_untouched_step_behind_a_disturbance_has_the_itl_that_began_before_it(tmp_path: Path) -> None:
    tables = load_tables(recording(tmp_path, [3000, 9000, 11_000], [learning(4500, 5000)]))  # between two decode steps
    assert tables["tokens"]["disturbed"].tolist() == [False, False, True, False]


def test_if_every_step_is_disturbed_their_speed_is_shown_with_a_warning_and_no_trend(tmp_path: Path) -> None:
    folder = recording(
        tmp_path, [10_000 * n for n in range(1, 21)] + [201_000 + 2000 * n for n in range(20)], [learning(0, 10**9)]
    )
    tables = load_tables(folder)
    answer = summarize(Recording(folder), tables)
    assert answer["tokens"]["disturbed"] == {"decode": 40, "prefill": 1}
    assert answer["tokens"]["tpot_ms"]["n"] == 40 and answer["tokens"]["ttft_ms"] == pytest.approx(0.001)
    assert sum("40 decode" in line and "1 prefill" in line for line in answer["missing"]) == 1
    found = trends.trend_summary(tables)
    assert (
        found["tpot_ms"]["n"] == 40
        and not found["change_points"]
        and not found["drifts"]
        and not len(trends.context_growth(tables))
    )


def test_a_damaged_list_of_disturbances_marks_nothing(tmp_path: Path) -> None:
    wrong = [{"begin_ns": "0", "end_ns": 10**9}, {"begin_ns": 1.5, "end_ns": 10**9}, {"begin_ns": 0}, {}]
    assert not load_tables(recording(tmp_path, [3000, 5000], wrong))["tokens"]["disturbed"].any()


def test_the_first_step_with_operators_and_routes_is_named(tmp_path: Path) -> None:
    writer = Writer()
    for number in range(3):
        writer.add("token_begin", ts=10_000 * number, seq=number, phase=2, n_tokens=1, position=number)
        writer.add("token_end", ts=10_000 * number + 5000, seq=number)
    runtime_step(writer, 40_000, 3, 2, 1, 1)
    folder = writer.write(tmp_path)
    missing = summarize(Recording(folder), load_tables(folder))["missing"]
    assert any(re.match(r"operators .*\b3\b", line) for line in missing)


@pytest.mark.long
@pytest.mark.needs("probes")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.alone
def test_the_tpot_of_an_attached_program_is_that_of_its_own_log_without_the_steps_of_learning(tmp_path: Path) -> None:
    program, log = compile_c(tmp_path / "program", "truth_llama.c", "truth_llama_main.c"), tmp_path / "log.csv"
    target = subprocess.Popen([str(program), str(log), "400", "1", "8000"])
    while b"program" not in Path(f"/proc/{target.pid}/comm").read_bytes():
        time.sleep(0.01)
    done = trace("attach", "--no-views", "--pid", str(target.pid), "--tokens", "200", "-o", str(tmp_path / "run"))
    assert target.wait() == 0 and done.returncode == 0, done.stderr
    run = Recording(tmp_path / "run")
    tables, rows = build_tables(run), run.manifest["disturbances"]
    assert {"placing probes", "learning the graph loop"} <= {row["reason"] for row in rows}
    steps = read_log(log, "token")
    ends = steps["after_end"].to_numpy()
    touched = [any(r["begin_ns"] < end and r["end_ns"] > before for r in rows) for before, end in itertools.pairwise(ends)]
    tokens = tables["tokens"][tables["tokens"]["complete"]].reset_index(drop=True)
    first = int(np.searchsorted(steps["before_begin"], tokens["begin_ns"].iloc[0], "right")) - 1
    assert tokens["disturbed"].tolist()[1:] == touched[first : first + len(tokens) - 1]
    answer = summarize(run, tables)
    spared = np.diff(ends)[first : first + len(tokens) - 1][~tokens["disturbed"].to_numpy()[1:]] / 1e6
    assert len(spared) > 20 and answer["tokens"]["tpot_ms"]["n"] == len(spared)
    assert answer["tokens"]["tpot_ms"]["median"] == pytest.approx(np.median(spared), abs=0.1)
