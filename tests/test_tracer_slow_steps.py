"""`--only-slower-than` keeps exactly the records of slow steps, whatever the batches they arrive in."""

import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT, drawn, over_recorders, trace
from tracer.recording.format import STREAMS
from workloads.raw_records import RawRecording
from workloads.recorder_policies import Filter
from workloads.recordings import record_layouts, records

LIMIT, LAG = 50, 20
STRUCTURAL = {"tensor", "node", "qnn_object", "qnn_table", "api_table", "session", "io_file", "library", "task_fork", "task_exit"}
STRUCTURAL |= {"task_exec", "qnn_callback", "qnn_reader", "qnn_log", "heat", "site"}
"""Always kept: other records refer to them."""
OWN = ("token_begin", "token_end")
STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
THREADS = {10: 10, 11: 10, 20: 20}  # thread → process: two processes, one with two threads
KINDS = ("token_begin", "token_end", "op_begin", "sched_switch", "route", "tensor", "task_fork", "task_exit")


class Row(NamedTuple):
    """One record: its time, kind, thread, engine and serial number (in the CPU field)."""

    ts: int
    kind: str
    tid: int
    engine: int
    serial: int

    @property
    def pid(self) -> int:
        return THREADS[self.tid]

    def slot(self) -> np.ndarray:
        return records(self.kind, ts=self.ts, tid=self.tid, pid=self.pid, engine=self.engine, cpu=self.serial)


class Step(NamedTuple):
    """One token of the reference: from its begin to its end; `end` is never for one that has none."""

    tid: int
    engine: int
    begin: int
    end: float
    complete: bool


def new_filter(limit_ns: int, bound_bytes: int = 64 << 20) -> Filter:
    return Filter(limit_ns, {number: name for name, (number, _) in record_layouts().items()}, bound_bytes)


def rows_of(plan: list[tuple[int, str, int, int]]) -> list[Row]:
    """Records of one plan: every row later than the one before."""
    rows, ts = [], 1_000_000
    for serial, (gap, kind, tid, engine) in enumerate(plan):
        ts += gap
        kernel = kind in ("sched_switch", "task_fork", "task_exit")
        rows.append(Row(ts, kind, tid, 0 if kernel else engine, serial))
    return rows


def tokens_of(rows: list[Row], end: int) -> list[Step]:
    """The tokens, read record by record; those still open last until `end`."""
    begun: dict[tuple[int, int], int] = {}
    found = []
    for row in rows:
        key = row.tid, row.engine
        if row.kind == "token_begin":
            if key in begun:
                found.append(Step(*key, begun[key], row.ts, False))
            begun[key] = row.ts
        elif row.kind == "token_end" and key in begun:
            found.append(Step(*key, begun.pop(key), row.ts, True))
        elif row.kind == "task_exit":
            gone = [key for key in begun if key[0] == row.tid]
            found += [Step(*key, begun.pop(key), row.ts, False) for key in gone]
    return found + [Step(*key, at, end, True) for key, at in begun.items()]


def reference(rows: list[Row], end: int) -> list[int]:
    """Serial numbers of the records to keep, by the rule as it is written down."""
    slow = [step for step in tokens_of(rows, end) if step.end - step.begin > LIMIT]
    kept = []
    for row in rows:
        if row.kind in STRUCTURAL:
            keep = True
        elif row.kind in OWN:
            own = [s for s in slow if (s.tid, s.engine) == (row.tid, row.engine)]
            keep = any(
                row.ts == (s.begin if row.kind == "token_begin" else s.end) and (s.complete or row.ts == s.begin) for s in own
            )
        else:
            keep = any(s.begin <= row.ts <= s.end and (row.engine == 0 or THREADS[s.tid] == row.pid) for s in slow)
        if keep:
            kept.append(row.serial)
    return kept


PLANS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from(KINDS[:2] * 3 + KINDS),
        st.sampled_from([10, 10, 11, 20]),
        st.sampled_from([1, 1, 2]),
    ),
    max_size=60,
)


NESTED = [(1, "token_begin", 10, 1), (10, "token_begin", 11, 1), (40, "op_begin", 11, 1), (20, "token_end", 11, 1)]
NESTED += [(40, "op_begin", 10, 1), (40, "sched_switch", 20, 0), (1, "token_end", 10, 1)]
AT_THE_LIMIT = [(1, "token_begin", 10, 1), (LIMIT // 2, "op_begin", 10, 1), (LIMIT - LIMIT // 2, "token_end", 10, 1)]

EXITED = [(1, "token_begin", 10, 1), (20, "task_exit", 10, 0), (40, "op_begin", 10, 1), (40, "op_begin", 10, 1)]


@settings(max_examples=drawn(100))
@example(EXITED, [], Random(0))
@example(NESTED, [], Random(0))
@example(AT_THE_LIMIT, [], Random(0))
@given(PLANS, st.lists(st.integers(1, 120), max_size=40), st.randoms(use_true_random=False))
def test_the_filter_keeps_what_a_reading_record_by_record_keeps(plan, pauses, random) -> None:
    rows = rows_of(plan)
    slots = {row.serial: row.slot() for row in rows}
    sieve = new_filter(LIMIT)
    kept: list[int] = []
    now, waiting = 1_000_000, list(rows)
    end = max([row.ts for row in rows], default=now) + 30
    for turn, pause in enumerate([*pauses, 10**6, 0]):
        last = turn == len(pauses) + 1
        now = min(now + pause, end)
        # What is younger than the lag may arrive now or later, in any order: CPUs write side by side.
        here = [row for row in waiting if row.ts <= now and (row.ts <= now - LAG or last or random.random() < 0.7)]
        waiting = [row for row in waiting if row not in here]
        random.shuffle(here)
        batches = {}
        for name, width in STREAMS.items():
            parts = [slots[row.serial] for row in here if slots[row.serial].shape[1] == width]
            batches[name] = np.concatenate(parts) if parts else np.empty((0, width), np.uint8)
        until = now - (0 if last else LAG)
        for written in sieve.sift(batches, until, last).values():
            kept += written[:, 26:28].copy().view("<u2")[:, 0].tolist()
    assert not waiting and sieve.held_bytes() == 0
    assert sorted(kept) == reference(rows, end)
    told = sieve.to_json()
    gone = Counter(row.kind for row in rows if row.serial not in set(kept))
    assert told["records"] == gone
    fast = [step for step in tokens_of(rows, end) if step.end - step.begin <= LIMIT]
    assert told["tokens"] == len(fast)


def test_a_token_too_big_to_hold_is_kept_and_memory_stays_bounded() -> None:
    sieve = new_filter(10**9, bound_bytes=1 << 20)
    empty = np.empty((0, STREAMS["details"]), np.uint8)
    written, biggest = 0, 0
    for turn in range(60):
        events = records("op_begin", 2000, ts=np.arange(2000) + turn * 2000 + 10)
        if turn == 0:
            events = np.concatenate((records("token_begin", ts=5), events))
        if turn == 59:
            events = np.concatenate((events, records("token_end", ts=200_000)))
        kept = sieve.sift({"events": events, "details": empty}, 200_000)
        written += len(kept["events"])
        biggest = max(biggest, sieve.held_bytes())
    assert biggest <= 1 << 20
    assert written == 60 * 2000 + 2 and sieve.to_json()["records"] == {}


@over_recorders
def test_of_a_program_with_slow_and_fast_tokens_only_the_slow_ones_are_written(on: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--no-views", "--only-slower-than", "15ms", "-o", str(tmp_path / "run"), *on)
    command = (sys.executable, STEPS, "60", "0.001", "--slow-every", "10", "--slow", "0.03")
    done = trace("run", *options, "--", *command, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    begin, end = run.records("token_begin"), run.records("token_end")
    durations = end["ts"].astype(np.int64) - begin["ts"].astype(np.int64)
    assert {0, 10, 20, 30, 40, 50} <= set(begin["seq"].tolist()) and (begin["seq"] == end["seq"]).all()
    assert (durations > 15_000_000).all()
    dropped = run.manifest["dropped"]
    assert dropped["tokens"] == 60 - len(begin) == dropped["records"]["token_end"]
    switches = run.records("sched_switch")["ts"]
    inside = (switches[:, None] >= begin["ts"]) & (switches[:, None] <= end["ts"])
    assert len(switches) and inside.any(axis=1).all()
    hits = {row["program"]: row["hits"] for row in run.manifest["probes"]}
    kept = run.manifest["records"]
    for kind in ("sched_switch", "sched_waking", "token_begin", "token_end"):
        hit = hits.get(kind, hits.get(f"moescope_{kind}"))
        assert kept.get(kind, 0) + dropped["records"].get(kind, 0) <= hit
    assert kept["token_begin"] + dropped["records"]["token_begin"] == 60
