"""The limit on what recording may cost: on simulated targets for any cost, and on a real one."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.tables.store import load_tables
from tests.conftest import ROOT, begin_trace, drawn, over_recorders, recorded_when
from workloads.raw_records import RawRecording
from workloads.recorder_policies import Budget

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
AIM, LEAST_SHARE = 0.85, 0.1
"""Of tracer/recorder/budget.c."""
REMOVAL_NS, TURN_NS = 100_000_000, 50_000_000


class Simulated:
    """A target whose tokens take `cost` longer while levels are on."""

    def __init__(self, budget: Budget, cost: float, token_ms: float):
        self.budget, self.cost, self.token_ns = budget, cost, token_ms * 1e6
        self.now, self.since, self.on, self.switched_at = 1, 1, True, 0

    def run(self, seconds: float) -> tuple[float, float]:
        """(slowdown, share of the time with levels on) of that time."""
        begin, end, undisturbed, time_on = self.now, self.now + round(seconds * 1e9), 0.0, 0
        while self.now < end:
            duration = round(self.token_ns * (1 + self.cost * self.on))
            tokens = max(1, TURN_NS // duration)
            self.now += tokens * duration
            undisturbed, time_on = undisturbed + tokens * self.token_ns, time_on + tokens * duration * self.on
            if self.switched_at:
                self.budget.observe_change([duration] * tokens)
                if self.now >= self.switched_at:
                    self.on, self.since, self.switched_at = not self.on, self.now, 0
                continue
            self.budget.observe(self.on, [duration] * tokens)
            if self.budget.is_over(self.on, self.since, self.now):
                self.switched_at = self.now + REMOVAL_NS
        return (self.now - begin) / undisturbed - 1, time_on / (self.now - begin)


@settings(max_examples=drawn(25))
@given(st.floats(0.001, 2.0), st.floats(0.02, 0.5), st.floats(0, 0.5), st.floats(1, 60))
def test_decode_loses_no_more_than_is_left_of_what_was_allowed_and_that_is_used(cost, room, besides, token_ms) -> None:
    budget = Budget(room + besides, besides)
    aim = max(AIM * budget.allowed - besides, LEAST_SHARE * budget.allowed)
    target = Simulated(budget, cost, token_ms)
    target.run(90)  # what it costs is not known at first
    lost, share = target.run(300)
    assert budget.slowdown() == pytest.approx(cost, rel=0.05, abs=1e-3)
    assert lost <= 1.15 * aim
    if cost > 1.1 * aim:
        assert lost >= 0.7 * aim
    elif cost < 0.9 * aim:
        assert share > 0.85


def test_a_pause_of_decode_ends_a_window_that_tells_nothing() -> None:
    budget = Budget(0.1)
    assert not budget.is_over(True, 1, 4_000_000_000) and budget.is_over(True, 1, 6_000_000_000)
    assert budget.slowdown() is None and [window.step_ns for window in budget.windows] == [0]


@over_recorders
def test_a_limited_recording_says_what_it_saw_and_holds_its_levels_for_that_part_of_the_time(
    on: tuple[str, ...], tmp_path: Path
) -> None:
    end, folder = tmp_path / "end", tmp_path / "run"
    command = [sys.executable, STEPS, "1000000", "0.004", "--operators", "200", "--until", str(end)]
    options = ["--no-views", "--max-overhead", "50%", "--stacks", "997", "-o", str(folder)]
    tracer = begin_trace("run", *options, *on, "--", *command)

    def is_back(run: RawRecording) -> bool:
        """Operators went and came."""
        ends, ops = run.records("token_end")["ts"], run.records("op_end")["ts"]
        without = np.flatnonzero(np.diff(np.searchsorted(ops, ends[ends < max(ops, default=0)])) == 0)
        return len(without) > 5 and (ops > ends[without[-1]]).sum() > 2000

    try:
        recorded_when(is_back, folder, tracer)
    finally:
        end.touch()
    printed, said = tracer.communicate(timeout=120)
    assert tracer.returncode == 0, said
    recording = RawRecording(folder)
    seen, changes = recording.manifest["sampling"], recording.manifest["level_changes"]
    assert recording.is_whole and seen["allowed"] == 0.5 and f"done {recording.manifest['records']['token_end']}\n" in printed
    assert {row["level"] for row in changes} >= {"operator", "expert", "stacks"}
    times = {"operator": recording.records("op_end")["ts"].astype(np.int64)}
    times["stacks"] = load_tables(folder)["samples"]["ts_ns"].to_numpy()
    for level, ended in times.items():
        rows = [row for row in changes if row["level"] == level and row["done_ns"]]
        assert len(ended) > 20, level
        for off, on in zip(rows[::2], rows[1::2], strict=False):
            assert not off["on"] and on["on"]
            assert not ((ended > off["done_ns"]) & (ended < on["ts_ns"])).any(), level
    assert (ended > rows[1]["ts_ns"]).any() and 0 < seen["share_on"] < 1
    for kind in ("evict", "sched_switch"):  # of levels in the middle and at the end of the list
        assert (recording.records(kind)["ts"].astype(np.int64) > rows[1]["ts_ns"]).any()
