"""The cause of every moment of a step: what the thread that decides did, or what it waited for.

Candidates are intervals by the step's own thread, in order of precedence: what an NPU's profile proves, the state of a
thread that the step waits for, the lack of a CPU, then the own thread's submission to an accelerator, loads, reads, work, sleep.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pandas as pd

from analyzer.questions import driver_calls
from analyzer.questions.accelerators import QUEUED, executions
from analyzer.questions.deciders import BARRIER, OWN, SLEEPING, STATES, WORKER, StepThreads, spans_of
from analyzer.questions.parts import HOST_CODE, LOAD, NPU, PARTS, accelerated_graphs
from analyzer.records.intervals import Intervals, common_time, merge_intervals, overlaps
from analyzer.records.schema import Tables

COMPUTING, RUN_QUEUE, ASLEEP, OTHER_THREAD = "computing", "run queue", "asleep", "lock or other thread"
DISK, EXPERT_LOAD, STOPPED, TRACING, RESIDUAL = "disk and faults", "expert load", "stopped", "tracing itself", "residual"
SUBMISSION, QUEUE, TRANSPORT, ACCELERATOR, COMPLETION = "submission", "queue", "transport", "accelerator", "completion"
CAUSES = (
    *(COMPUTING, RUN_QUEUE, ASLEEP, OTHER_THREAD, DISK, EXPERT_LOAD),
    *(SUBMISSION, QUEUE, TRANSPORT, ACCELERATOR, COMPLETION, STOPPED, TRACING, RESIDUAL),
)
NOT_COMPUTING = (RUN_QUEUE, ASLEEP, DISK, EXPERT_LOAD, STOPPED, TRACING)
"""Causes within an operator that are none of its own work."""
Cause = tuple[str, Intervals]


@dataclass(frozen=True)
class AcceleratorWork:
    """The work that threads submit to accelerators, as intervals by thread."""

    tables: Tables

    @cached_property
    def graphs(self) -> Intervals:
        """The graphs that an accelerator computes."""
        return Intervals.of_table(accelerated_graphs(self.tables))

    def beside(self, kind: str) -> pd.DataFrame:
        """The graphs that stand for a copy between backends or the wait for one."""
        graphs = self.tables["graphs"]
        return graphs[(graphs["kind"] == kind).to_numpy()]

    @cached_property
    def executions(self) -> pd.DataFrame:
        """accelerators.executions"""
        return executions(self.tables)

    @cached_property
    def waited(self) -> pd.DataFrame:
        """The executions of steps that a thread waited for."""
        return self.executions[(self.executions["token_id"] >= 0) & (self.executions["wait_ns"] >= 0)]

    @cached_property
    def answers(self) -> Intervals:
        """The waits for executions."""
        return merge_intervals(Intervals.of_table(self.waited, begin="wait_ns", end="done_ns"))

    @cached_property
    def all(self) -> Intervals:
        """The times in an accelerator's graph, in an execution on it, or in a wait for it."""
        return merge_intervals(Intervals.joined(self.graphs, self.answers, Intervals.of_table(self.beside("wait"))))

    def messages(self) -> list[Intervals]:
        """Completed calls to the NPU's driver in three parts: submission, accelerator, completion."""
        rows = driver_calls.rpc_messages(self.tables)
        rows = rows[(rows["answered_ns"] >= 0) & (rows["end_ns"] >= 0)]
        moments = pairwise(("begin_ns", "sent_ns", "answered_ns", "end_ns"))
        return [Intervals.of_table(rows, begin=begin, end=end) for begin, end in moments]


def profiled_times(rows: pd.DataFrame, key: np.ndarray) -> list[Cause]:
    """Queueing and work from each execution's profile, which gives durations only: both are placed as early as possible."""
    begin, end, given = (rows[name].to_numpy(np.int64) for name in ("wait_ns", "done_ns", "worked_ns"))
    queue, busy = (np.nan_to_num(rows[name].to_numpy()).astype(np.int64) for name in ("queue_ns", "accelerator_ns"))
    first, second, third = (np.clip(ts, begin, end) for ts in (given, given + queue, given + queue + busy))
    return [(QUEUE, Intervals(key, first, second)), (ACCELERATOR, Intervals(key, second, third))]


def unprofiled_times(rows: pd.DataFrame, key: np.ndarray, begin: str = "wait_ns") -> list[Cause]:
    """The time outside the profile's durations is transport; without a profile, all time counts as the accelerator's."""
    spans = Intervals(key, rows[begin].to_numpy(np.int64), rows["done_ns"].to_numpy(np.int64))
    known = rows["accelerator_ns"].notna().to_numpy()
    return [(TRANSPORT, spans.where(known)), (ACCELERATOR, spans.where(~known))]


def disk_stalls(tables: Tables) -> Intervals:
    """Reads, and faults that read the file or its following pages, of all threads, by thread."""
    faults = tables["faults"]
    reading = Intervals.of_table(faults).where(((faults["kind"] == "major") | (faults["bytes"] > 0)).to_numpy())
    return merge_intervals(Intervals.joined(reading, Intervals.of_table(tables["reads"])))


def in_state(pieces: pd.DataFrame, *names: str) -> Intervals:
    """The pieces whose thread is in one of these states, by the step's own thread."""
    return spans_of(pieces[pieces["state"].isin([STATES.index(name) for name in names])], "owner")


def in_part(pieces: pd.DataFrame, *names: str) -> Intervals:
    """The pieces of these parts, by the step's own thread."""
    return spans_of(pieces[pieces["part"].isin([PARTS.index(name) for name in names])], "owner")


def of_others(tables: Tables, pieces: pd.DataFrame, proven: list[Cause], npu: list[Cause], disk: Intervals) -> list[Cause]:
    """Causes of `pieces`, the times that other threads decide. Of their executions, `proven` by a profile and the rest: `npu`."""
    doing, loads = spans_of(pieces, "owner"), tables["loads"]
    loading = merge_intervals(Intervals.of_table(loads[(loads["action"] == "load").to_numpy()]))
    unwoken = pieces[(pieces["role"] == BARRIER) & (pieces["state"] == SLEEPING) & (pieces["waker"] < 0)]

    def within(windows: Intervals) -> Intervals:
        met = overlaps(spans_of(pieces, "tid"), windows)
        return Intervals(doing.key[met.left], met.begin, met.end)

    def during(some: list[Cause]) -> list[Cause]:
        return [(cause, common_time(merge_intervals(doing), merge_intervals(spans))) for cause, spans in some]

    return [
        *during(proven),
        (RUN_QUEUE, in_state(pieces, "runnable")),
        (STOPPED, in_state(pieces, "stopped")),
        (TRACING, in_state(pieces, "held")),
        *during(npu),
        (EXPERT_LOAD, in_part(pieces, LOAD)),
        (EXPERT_LOAD, within(loading)),
        (DISK, in_state(pieces, "waiting")),
        (DISK, within(disk)),
        (ASLEEP, spans_of(unwoken, "owner")),
        (OTHER_THREAD, spans_of(pieces[pieces["role"] != WORKER], "owner")),
        (ASLEEP, in_state(pieces, "sleeping")),
        (COMPUTING, doing),
    ]


def of_graphs(submitted: AcceleratorWork, asleep: Intervals) -> list[Cause]:
    """Within an accelerator's graphs: sleep until it is done, reading of results behind an execution, preparation."""
    met = overlaps(submitted.graphs, submitted.answers)
    behind = Intervals(submitted.graphs.key[met.left], met.end, submitted.graphs.end[met.left])
    unknown = merge_intervals(submitted.graphs.where(~np.isin(np.arange(len(submitted.graphs)), met.left)))
    return [(ACCELERATOR, common_time(merge_intervals(asleep), unknown)), (COMPLETION, behind), (SUBMISSION, submitted.graphs)]


def cause_intervals(submitted: AcceleratorWork, steps: StepThreads, pieces: pd.DataFrame) -> list[Cause]:
    """Every cause with its intervals, by the steps' own threads; the first one that covers a moment takes it."""
    sending, working, ending = submitted.messages()
    disk, waits = disk_stalls(submitted.tables), submitted.beside("wait")
    answered = (waits["backend"] == QUEUED).to_numpy() & bool(len(submitted.tables["npu_batches"]))
    mine = submitted.waited["tid"].isin(steps.owner)
    own, other = submitted.waited[mine], submitted.waited[~mine]
    late = submitted.executions[(submitted.executions["backend"] == NPU) & (submitted.executions["wait_ns"] < 0)]
    late = late[late["token_id"] >= 0]
    theirs, of_late = (steps.owner[steps.rows(rows["token_id"])] for rows in (other, late))
    proven, npu = profiled_times(other, theirs), [*unprofiled_times(other, theirs), *unprofiled_times(late, of_late, "begin_ns")]
    by_own, by_others = pieces[pieces["role"] == OWN], pieces[pieces["role"] != OWN]
    return [
        *profiled_times(own, own["tid"].to_numpy()),
        (SUBMISSION, sending),
        (COMPLETION, ending),
        (COMPLETION, common_time(merge_intervals(steps.woken), submitted.all)),
        *of_others(submitted.tables, by_others, proven, npu, disk),
        (RUN_QUEUE, in_state(by_own, "runnable")),
        (STOPPED, in_state(by_own, "stopped")),
        (TRACING, in_state(by_own, "held")),
        *unprofiled_times(own, own["tid"].to_numpy()),
        (SUBMISSION, Intervals.of_table(late, end="submitted_ns")),
        (ACCELERATOR, working),
        (SUBMISSION, Intervals.of_table(submitted.executions[submitted.executions["backend"] == QUEUED], end="submitted_ns")),
        (COMPLETION, Intervals.of_table(waits[answered])),
        (ACCELERATOR, Intervals.of_table(waits[~answered])),
        (TRANSPORT, Intervals.of_table(submitted.beside("copy"))),
        *of_graphs(submitted, in_state(by_own, "sleeping", "waiting")),
        (EXPERT_LOAD, in_part(by_own, LOAD)),
        (DISK, disk),
        (DISK, in_state(by_own, "waiting")),
        (COMPUTING, in_state(by_own, "running")),
        *proven,
        *npu,
        (ASLEEP, in_state(by_own, "sleeping")),
        (COMPUTING, in_part(by_own, *(name for name in PARTS if name != HOST_CODE))),
    ]
