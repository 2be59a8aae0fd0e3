"""What tracing cost: one computation behind every screen."""

import re
from pathlib import Path

import pytest

from analyzer.commands.summary import loss_lines
from analyzer.questions.live import LiveTables
from analyzer.questions.summary import probe_advice, summarize
from analyzer.tables.store import load_tables
from tracer.recording.cost import cost_lines, cost_of, show_ms
from tracer.recording.format import Recording
from views.report.recording import cost_text as report_remarks
from views.report.sections import Run
from workloads.recordings import runtime

MS = 10**6
COST = {"trap_ns": 20, "trap_cold_ns": 60, "bpf_ns": 80, "kernel_ns": 7 * MS, "tracer_cpu_ns": 2094 * MS}
COST |= {"tracer_recording_cpu_ns": 500 * MS, "target_cpu_ns": 2000 * MS}


def test_shares_are_of_the_steps_time_and_of_the_targets_cpu_time() -> None:
    cost = cost_of(COST, 1000)
    assert cost.of_steps == (0.1, pytest.approx(0.14)) and cost.tracer_of_target == 0.25 and cost.is_notable
    assert cost.slowdown == (pytest.approx(0.1 / 0.9), pytest.approx(0.14 / 0.86))  # of the steps' time without probes
    assert not cost_of({**COST, "tracer_recording_cpu_ns": MS}, 10_000).is_notable


def test_what_was_not_measured_is_absent() -> None:
    bare = cost_of({"trap_ns": 5 * MS, "bpf_ns": float("nan"), "calibration_ns": {}})
    assert (bare.probes, bare.probes_cold, bare.tracer, bare.of_steps, bare.tracer_of_target) == (
        5 * MS,
        5 * MS,
        None,
        None,
        None,
    )
    assert cost_of(COST, 90).slowdown is None  # more time in probes than in steps: they were hit outside, or on many threads
    assert cost_of({"tracer_cpu_ns": 3}, 1).tracer == 3  # of a recording that did not tell set-up apart
    assert all("%" not in line and "tracer" not in line for line in cost_lines(bare))


def test_probes_take_no_more_than_the_targets_cpu_time_and_no_more_than_the_steps() -> None:
    told = {"trap_ns": 30 * MS, "trap_cold_ns": 90 * MS, "bpf_ns": 12 * MS, "target_cpu_ns": 60 * MS}
    cost = cost_of(told, 50 * MS)
    assert (cost.probes, cost.probes_cold) == (42 * MS, 60 * MS)
    assert cost.of_steps == (0.84, 1.0) and cost.slowdown is None
    text = probe_advice(*cost.of_steps)
    assert text and [float(number) for number in re.findall(r"[\d.]+", text)] == [84.0, 100.0, 10.0]
    assert probe_advice(0.01, 0.09) is None


def test_every_screen_shows_the_same_figures_once(tmp_path: Path) -> None:
    folder = runtime(3).write(tmp_path, cost=COST)
    answer = summarize(Recording(folder), load_tables(folder))
    assert answer["cost"]["share_of_token_time"] == pytest.approx(100 / 3000)
    assert answer["cost"]["tracer_share_of_target_cpu"] == 0.25
    lines = answer["cost"]["lines"]
    screen = "\n".join(line if isinstance(line, str) else line.plain for line in loss_lines(answer))
    (_, remark), *more = report_remarks(Run(Recording(folder).manifest, load_tables(folder), answer))
    for line in lines:
        assert screen.count(line) == remark.count(line) == 1
    assert not more and "500 ms, 25.0 %" in screen and "3.4 to 4.9 %" in screen
    assert LiveTables(folder).snapshot().probe_ns == 100


def test_times_keep_the_decimals_that_count() -> None:
    assert (show_ms(5.04 * MS), show_ms(99 * MS, 2094 * MS)) == ("5.0 ms", "99.0 to 2,094 ms")
