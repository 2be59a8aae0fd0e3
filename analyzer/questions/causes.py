"""The cause of every moment of a step: what the thread that decides did, or what it waited for.

Candidates are intervals by the step's own thread, in order of precedence: what an NPU's profile proves, the state of a
thread that the step waits for, the lack of a CPU, then the own thread's hand-over to an accelerator, loads, reads, work, sleep.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analyzer.questions import rpc
from analyzer.questions.accelerators import QUEUED
from analyzer.questions.deciders import BARRIER, OWN, WORKER, StepThreads, in_states, spans_of, wakers
from analyzer.questions.deciders import STATES as THREAD_STATES
from analyzer.questions.parts import BESIDE, HOST, HOST_CODE, LOAD, PARTS
from analyzer.records.intervals import Intervals, common, merged, overlaps
from analyzer.records.schema import Tables
from analyzer.records.spans import equal_rows

COMPUTING, RUN_QUEUE, ASLEEP, OTHER_THREAD = "computing", "run queue", "asleep", "lock or other thread"
DISK, EXPERT_LOAD, STOPPED, TRACING, RESIDUAL = "disk and faults", "expert load", "stopped", "tracing itself", "residual"
SUBMISSION, QUEUE, TRANSPORT, ACCELERATOR, COMPLETION = "submission", "queue", "transport", "accelerator", "completion"
CAUSES = (
    *(COMPUTING, RUN_QUEUE, ASLEEP, OTHER_THREAD, DISK, EXPERT_LOAD),
    *(SUBMISSION, QUEUE, TRANSPORT, ACCELERATOR, COMPLETION, STOPPED, TRACING, RESIDUAL),
)
ASLEEP_STATES = ("sleeping", "waiting")
EXECUTION = ["token_id", "tid", "begin_ns", "end_ns", "worked_ns", "queue_us", "accel_us", "asynchronous"]
Cause = tuple[str, Intervals]
Ends = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class HandOver:
    """The times in which steps' threads are occupied with an accelerator."""

    steps: StepThreads

    @property
    def tables(self) -> Tables:
        """The recording's tables."""
        return self.steps.tables

    def own(self, table: pd.DataFrame, end: str = "end_ns") -> Intervals:
        """Rows of a table on steps' own threads, as intervals."""
        return Intervals.of_table(table[np.isin(table["tid"], self.steps.owner)], end=end)

    @cached_property
    def accelerated(self) -> pd.DataFrame:
        """The graphs that an accelerator computes."""
        graphs = self.tables["graphs"]
        return graphs[~graphs["backend"].isin(HOST) & ~graphs["kind"].isin(BESIDE)]

    def beside(self, kind: str) -> pd.DataFrame:
        """The graphs that stand for a copy between backends or the wait for one."""
        graphs = self.tables["graphs"]
        return graphs[(graphs["kind"] == kind).to_numpy()]

    def waits(self, answered: bool) -> Intervals:
        """Waits for a backend with recorded responses (`answered`), or for another one."""
        waits = self.beside("wait")
        known = (waits["backend"] == QUEUED).to_numpy() & bool(len(self.tables["npu_batches"]))
        return self.own(waits[known == answered])

    @cached_property
    def all(self) -> Intervals:
        """The times in an accelerator's graph, in an execution on it, or in a wait for it."""
        return merged(
            Intervals.joined(*(self.own(t) for t in (self.accelerated, self.executes(waited=True), self.beside("wait"))))
        )

    def executes(self, waited: bool) -> pd.DataFrame:
        """Executions on the NPU whose call waits for the end (`waited`), or those whose call does not."""
        executes = self.tables["qnn_executes"]
        executes = executes[(executes["token_id"] >= 0) & (executes["asynchronous"] != waited)]
        executes = executes.assign(worked_ns=executes["begin_ns"])
        return pd.concat([executes[EXECUTION], self.answers], ignore_index=True) if waited and len(self.answers) else executes

    @cached_property
    def answers(self) -> pd.DataFrame:
        """Waits for batches of an NPU queue, as executions. `worked_ns`: the earliest possible begin on the NPU."""
        batches = self.tables["npu_batches"]
        batches = batches.assign(worked_ns=earliest(batches), begin_ns=batches["end_ns"] - batches["wait_ns"])
        batches = batches[(batches["token_id"] >= 0) & (batches["wait_ns"] >= 0)]
        return batches.assign(queue_us=np.nan, accel_us=batches["npu_us"], asynchronous=False)[EXECUTION]

    def messages(self) -> dict[str, Intervals]:
        """Completed calls of steps' own threads to the NPU's driver, in three parts, by cause."""
        rows = rpc.messages(self.tables)
        rows = rows[(rows["answered_ns"] >= 0) & (rows["end_ns"] >= 0)]
        moments = {
            SUBMISSION: ("begin_ns", "sent_ns"),
            ACCELERATOR: ("sent_ns", "answered_ns"),
            COMPLETION: ("answered_ns", "end_ns"),
        }
        return {cause: self.own(rows.assign(begin_ns=rows[begin]), end) for cause, (begin, end) in moments.items()}

    def batches_sent(self) -> Intervals:
        """The times in which batches were written to an NPU queue."""
        batches = self.tables["npu_batches"]
        return self.own(batches.assign(end_ns=batches["begin_ns"] + batches["submit_ns"].clip(lower=0)))

    def woken(self) -> Intervals:
        """The times in which steps' threads had been woken up but had no CPU yet."""
        ready, waited = (in_states(self.steps.scheduled, names, self.steps.owner) for names in (("runnable",), ASLEEP_STATES))
        return after(ready, waited)

    def graphs(self) -> list[Cause]:
        """Within an accelerator's graphs: sleep until it is done, reading of results behind an execution, preparation."""
        graphs, executes = self.own(self.accelerated), merged(self.own(self.executes(waited=True)))
        met = overlaps(graphs, executes)
        behind = Intervals(graphs.key[met.left], met.end, graphs.end[met.left])
        unknown = merged(graphs.where(~np.isin(np.arange(len(graphs)), met.left)))
        asleep = common(merged(self.steps.state(*ASLEEP_STATES)), unknown)
        return [(ACCELERATOR, asleep), (COMPLETION, behind), (SUBMISSION, graphs)]


def after(spans: Intervals, before: Intervals) -> Intervals:
    """The intervals that begin where one of `before` ends, by key."""
    return spans.where(equal_rows([before.key, before.end], [spans.key, spans.begin]) >= 0)


def earliest(batches: pd.DataFrame) -> np.ndarray:
    """The earliest possible begin of each batch on the NPU: when it was sent and the previous batches of its queue were done."""
    begun = (batches["begin_ns"] + batches["submit_ns"].clip(lower=0)).to_numpy(np.int64, copy=True)
    took = np.nan_to_num(batches["npu_us"].to_numpy() * 1e3).astype(np.int64)
    for rows in batches.groupby(["pid", "queue"]).indices.values():
        before = np.cumsum(took[rows]) - took[rows]
        begun[rows] = before + np.maximum.accumulate(begun[rows] - before)
    return begun


def ends(rows: pd.DataFrame, until: str = "end_ns") -> Ends:
    """Begins and ends."""
    return rows["begin_ns"].to_numpy(), rows[until].to_numpy()


def profiled_parts(executes: pd.DataFrame) -> dict[str, Ends]:
    """Queueing and work from each execution's profile, which gives durations only: both are placed as early as possible."""
    begin, end = ends(executes)
    queue, busy = (np.nan_to_num(executes[name].to_numpy() * 1e3).astype(np.int64) for name in ("queue_us", "accel_us"))
    given = executes["worked_ns"].to_numpy()
    cuts = [np.clip(at, begin, end) for at in (given, given + queue, given + queue + busy)]
    return {QUEUE: (cuts[0], cuts[1]), ACCELERATOR: (cuts[1], cuts[2])}


def other_parts(executes: pd.DataFrame) -> dict[str, Ends]:
    """The time outside the profile's durations is transport; without a profile, all time counts as the accelerator's."""
    begin, end = ends(executes)
    profiled = executes["accel_us"].notna().to_numpy()
    return {TRANSPORT: (np.where(profiled, begin, end), end), ACCELERATOR: (np.where(profiled, end, begin), end)}


@dataclass(frozen=True)
class Executions:
    """Causes within executions on the NPU: what their profile proves, whatever the thread does then, and the rest."""

    own: list[Cause]
    own_rest: list[Cause]
    others: list[Cause]
    others_rest: list[Cause]


def executions(hand: HandOver) -> Executions:
    """The executions of steps' own threads and of others."""
    waited, late = hand.executes(waited=True), hand.executes(waited=False)
    own = waited["tid"].isin(hand.steps.owner).to_numpy()

    def cut(rows: pd.DataFrame, cutting: Callable[[pd.DataFrame], dict[str, Ends]], mine: bool = True) -> list[Cause]:
        owner = rows["tid"].to_numpy() if mine else hand.steps.owner_of(rows["token_id"])
        return [(cause, Intervals(owner, *piece)) for cause, piece in cutting(rows).items()]

    return Executions(
        cut(waited[own], profiled_parts),
        [*cut(waited[own], other_parts), *cut(late, lambda rows: {SUBMISSION: ends(rows, "returned_ns")})],
        cut(waited[~own], profiled_parts, mine=False),
        [*cut(waited[~own], other_parts, mine=False), *cut(late, other_parts, mine=False)],
    )


def stalls(tables: Tables) -> Intervals:
    """Reads, faults that read the file or its following pages, and faults that waited for that, of all threads, by thread."""
    faults, states = tables["faults"], tables["thread_states"]
    waiting = Intervals.of_table(states).where((states["state"] == "waiting").to_numpy())
    reading = Intervals.of_table(faults).where(((faults["kind"] == "major") | (faults["bytes"] > 0)).to_numpy())
    read_ahead = common(merged(waiting), merged(Intervals.of_table(faults)))
    return merged(Intervals.joined(reading, read_ahead, Intervals.of_table(tables["reads"])))


def of_others(steps: StepThreads, pieces: pd.DataFrame, npu: Executions, disk: Intervals) -> Iterator[Cause]:
    """Causes of the times that other threads decide, by their executions and states."""
    others = pieces[pieces["role"] != OWN]
    split, state = steps.by_state(others)
    own = steps.owner[split["step"].to_numpy()]
    spans = Intervals(own, split["begin"].to_numpy(), split["end"].to_numpy())
    loads = steps.tables["loads"]
    loads = merged(Intervals.of_table(loads[(loads["action"] == "load").to_numpy()]))

    def within(windows: Intervals) -> Intervals:
        met = overlaps(spans_of(split, "tid"), windows)
        return Intervals(own[met.left], met.begin, met.end)

    def of_state(name: str) -> Intervals:
        return spans.where(state == THREAD_STATES.index(name))

    waited_for = (split["role"] != WORKER).to_numpy()
    slept, waker = wakers(steps)
    sleepers = overlaps(spans_of(split[(split["role"] == BARRIER).to_numpy()], "tid"), slept.where(waker < 0))

    def during(some: list[Cause]) -> list[Cause]:
        return [(cause, common(merged(spans), merged(piece))) for cause, piece in some]

    yield from during(npu.others)
    yield RUN_QUEUE, of_state("runnable")
    yield STOPPED, of_state("stopped")
    yield TRACING, of_state("held")
    yield from during(npu.others_rest)
    yield EXPERT_LOAD, spans.where((split["part"] == PARTS.index(LOAD)).to_numpy())
    yield EXPERT_LOAD, within(loads)
    yield DISK, of_state("waiting")
    yield DISK, within(disk)
    yield ASLEEP, Intervals(own[(split["role"] == BARRIER).to_numpy()][sleepers.left], sleepers.begin, sleepers.end)
    yield OTHER_THREAD, spans.where(waited_for)
    yield ASLEEP, of_state("sleeping")
    yield COMPUTING, spans


def candidates(hand: HandOver, pieces: pd.DataFrame) -> list[Cause]:
    """Every cause with its intervals, by the steps' own threads; the first one that covers a moment takes it."""
    steps, messages, disk = hand.steps, hand.messages(), stalls(hand.tables)
    npu = executions(hand)
    own = pieces[pieces["role"] == OWN]
    doing = spans_of(own, "tid")

    def part(*names: str) -> Intervals:
        return doing.where(own["part"].isin([PARTS.index(name) for name in names]).to_numpy())

    return [
        *npu.own,
        (SUBMISSION, messages[SUBMISSION]),
        (COMPLETION, messages[COMPLETION]),
        (COMPLETION, common(merged(hand.woken()), hand.all)),
        *of_others(steps, pieces, npu, disk),
        (RUN_QUEUE, steps.state("runnable")),
        (STOPPED, steps.state("stopped")),
        (TRACING, steps.state("held")),
        *npu.own_rest,
        (ACCELERATOR, messages[ACCELERATOR]),
        (SUBMISSION, hand.batches_sent()),
        (COMPLETION, hand.waits(answered=True)),
        (ACCELERATOR, hand.waits(answered=False)),
        (TRANSPORT, hand.own(hand.beside("copy"))),
        *hand.graphs(),
        (EXPERT_LOAD, part(LOAD)),
        (DISK, disk),
        (DISK, steps.state("waiting")),
        (COMPUTING, steps.state("running")),
        *npu.others,
        *npu.others_rest,
        (ASLEEP, steps.state("sleeping")),
        (COMPUTING, part(*(name for name in PARTS if name != HOST_CODE))),
    ]
