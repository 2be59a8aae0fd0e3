"""Which thread decides, moment by moment, how long a step takes, and the operator or expert load that it is in.

It is the step's own thread; at an operator's barrier the last thread to arrive; while the own thread sleeps, or nothing is
recorded of it, another thread that works for the step; without one, the thread of the program that ends the sleep.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analyzer.questions.accelerators import batch_executions
from analyzer.questions.parts import BESIDE, COPY, HOST, HOST_CODE, LOAD, OFFLOADED, PARTS, operator_parts
from analyzer.records.intervals import Intervals, foremost_pieces, merge_intervals, overlaps, split_intervals, uncovered_parts
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, NestedSpans, equal_rows, innermost_span, latest
from analyzer.tables.sched import TRACER

OWN, BARRIER, WORKER, WAKER = range(4)
"""Why a thread decides: it is the step's own; the others wait for it; it works for the step; it wakes the step's thread up."""
SETUPS = ("contextCreate", "contextCreateFromBinary", "graphFinalize")
"""QNN's calls that create the objects of an execution."""
STATES = ("running", "runnable", "waiting", "stopped", "held", "sleeping")
"""Those of `thread_states`; "held" is a stop that the tracer ended, which it does only to its own."""
_, RUNNABLE, WAITING, STOPPED, HELD, SLEEPING = range(len(STATES))
SWITCH_NS = 20_000
"""The longest time from a wake-up to running on a CPU whose thread gives way at once: an interrupt to that CPU and a switch."""
COLUMNS = ("step", "begin", "end", "tid", "role", "part", "operator", "load")
"""Pieces of steps are frames with these columns of integers: row of `tokens`, ns, ns, the thread that decides and why, index of
PARTS, row of `operators` and row of `loads` or -1. `StepThreads.by_state` adds the thread's state."""


def piece_frame(**columns: np.ndarray | int) -> pd.DataFrame:
    """Pieces from columns; those not given are -1, the role is OWN."""
    rows = range(len(np.atleast_1d(columns["begin"])))
    return pd.DataFrame({**dict.fromkeys(COLUMNS, NONE), "role": OWN, **columns}, index=rows)


def spans_of(pieces: pd.DataFrame, key: str = "step") -> Intervals:
    """Pieces as intervals, with one of their columns as key."""
    return Intervals.of_table(pieces, key, "begin", "end")


def cut_pieces(pieces: pd.DataFrame, rows: np.ndarray, begin: np.ndarray, end: np.ndarray) -> pd.DataFrame:
    """The pieces of these rows, with other begins and ends."""
    return pieces.iloc[rows].assign(begin=begin, end=end).reset_index(drop=True)


@dataclass(frozen=True)
class StepThreads:
    """The steps of a recording, their threads, and the threads' states."""

    tables: Tables

    @cached_property
    def owner(self) -> np.ndarray:
        """The thread of each step, and -1 for step -1."""
        return np.append(self.tables["tokens"]["tid"].to_numpy(np.int64), NONE)

    def rows(self, token_ids: pd.Series) -> np.ndarray:
        """The row in `tokens` of each token_id; -1 for none."""
        return pd.Index(self.tables["tokens"]["token_id"]).get_indexer(token_ids)

    @cached_property
    def operator(self) -> np.ndarray:
        """The row in `operators` of each of `op_threads`; -1 for none."""
        operator = self.tables["op_threads"]["op_id"].to_numpy(np.int64)
        return np.where(operator < len(self.tables["operators"]), operator, NONE)

    @cached_property
    def windows(self) -> Intervals:
        """The steps, by thread."""
        return Intervals.of_table(self.tables["tokens"])

    @cached_property
    def recorded(self) -> tuple[Intervals, np.ndarray, np.ndarray, np.ndarray]:
        """(states of all threads, by thread; index in STATES of each; rows of run queues behind a wait; rows of these waits)."""
        table, threads = self.tables["thread_states"], self.tables["threads"]
        spans, state = Intervals.of_table(table), pd.Index(STATES).get_indexer(table["state"])
        stopped = np.flatnonzero(state == STOPPED)
        tracer = threads.loc[(threads["name"] == TRACER).to_numpy() & ~threads["target"].to_numpy(bool), "tid"]
        state[stopped[np.isin(waker_of(self.tables["sched"], spans.where(stopped)), tracer)]] = HELD
        before = equal_rows([spans.key, spans.end], [spans.key, spans.begin])
        woken = np.flatnonzero((state == RUNNABLE) & np.isin(np.append(state, NONE)[before], (WAITING, STOPPED, HELD, SLEEPING)))
        return spans, state, woken, before[woken]

    @property
    def woken(self) -> Intervals:
        """The times in which threads had been woken up from sleep but had no CPU yet."""
        spans, state, woken, waits = self.recorded
        return spans.where(woken[np.isin(state[waits], (WAITING, SLEEPING))])

    @cached_property
    def states(self) -> tuple[Intervals, np.ndarray, np.ndarray]:
        """(states of all threads, by thread; index in STATES; the thread of the program that ended each sleep, -1: none known).

        A wait lasts until the thread stands in a run queue or, if it gets the CPU at once, until it runs: it lacks no CPU before.
        """
        spans, state, woken, waits = self.recorded
        slept, waker = state == SLEEPING, np.full(len(spans), NONE)
        waker[slept] = sleep_wakers(self.tables, spans.where(slept))
        begin, end = spans.begin.copy(), spans.end.copy()
        begin[woken] = end[waits] = queued_ns(self.tables["sched"], spans.where(woken))
        keep = begin < end
        return Intervals(spans.key, begin, end).where(keep), state[keep], waker[keep]

    def by_state(self, pieces: pd.DataFrame) -> pd.DataFrame:
        """Pieces split by the state of their `tid`, with `state`, index in STATES or -1: unknown, and `waker` (see `states`)."""
        spans, state, waker = self.states
        parts = split_intervals(spans_of(pieces, "tid"), spans)
        known = {"state": np.append(state, NONE)[parts.right], "waker": np.append(waker, NONE)[parts.right]}
        return cut_pieces(pieces, parts.left, parts.begin, parts.end).assign(**known)

    @cached_property
    def shares(self) -> pd.DataFrame:
        """Threads' shares of steps' operators, with `wait`: when each began to wait for the others."""
        shares, operators = self.tables["op_threads"], self.tables["operators"]
        begin, wait, end, tid = (shares[name].to_numpy() for name in ("begin_ns", "wait_ns", "end_ns", "tid"))
        step = np.append(self.rows(operators["token_id"]), NONE)[self.operator]
        part = np.append(pd.Categorical(operator_parts(operators), PARTS).codes, NONE)[self.operator]
        pieces = piece_frame(step=step, begin=begin, end=end, tid=tid, part=part, operator=self.operator)
        return pieces.assign(wait=wait)[step >= 0]

    @cached_property
    def loads(self) -> pd.DataFrame:
        """Expert loads for steps, and the creation of NPU contexts: on a step's own thread, and (thread -1) in its process."""
        loads, calls = self.tables["loads"], self.tables["qnn_calls"]
        step, code = self.rows(loads["token_id"]), PARTS.index(LOAD)
        rows = np.flatnonzero((loads["action"] == "load").to_numpy() & (step >= 0))
        begin, end, tid = (loads[name].to_numpy()[rows] for name in ("begin_ns", "end_ns", "tid"))
        pieces = [piece_frame(step=step[rows], begin=begin, end=end, tid=tid, part=code, load=rows)]
        calls = calls[calls["call"].isin(SETUPS).to_numpy()]
        calls = calls[innermost_span(loads, calls) < 0]
        for column in ("tid", "pid"):
            met = overlaps(Intervals.of_table(self.tables["tokens"], column), merge_intervals(Intervals.of_table(calls, column)))
            mine = self.owner[met.left] if column == "tid" else NONE
            pieces.append(piece_frame(step=met.left, begin=met.begin, end=met.end, tid=mine, part=code))
        every = pd.concat(pieces, ignore_index=True)
        around = innermost_span(self.tables["op_threads"], every.rename(columns={"begin": "begin_ns"}))
        return every.assign(operator=np.append(self.operator, NONE)[around])

    def is_own(self, pieces: pd.DataFrame) -> pd.Series:
        """Which pieces are of their step's own thread."""
        return pieces["tid"] == self.owner[pieces["step"]]


def barrier_waits(tables: Tables, shares: pd.DataFrame) -> pd.DataFrame:
    """The waits of steps' own threads within operators for the last thread to arrive at the barrier."""
    arrivals = tables["op_threads"].sort_values("wait_ns", kind="stable").drop_duplicates("op_id", keep="last")
    last = arrivals.set_index("op_id").reindex(shares["operator"])
    opened = np.minimum(last["wait_ns"].to_numpy(), shares["end"])
    waits = shares.assign(begin=shares["wait"], end=opened, role=BARRIER, tid=last["tid"].to_numpy())
    return waits[(waits["end"] > waits["begin"]) & (waits["tid"] != shares["tid"])]


def graph_pieces(steps: StepThreads) -> pd.DataFrame:
    """Graphs of accelerators and waits for them, and copies between backends, on steps' own threads, outside of operators."""
    graphs, batches = steps.tables["graphs"], batch_executions(steps.tables)
    graphs = graphs[~graphs["backend"].isin(HOST).to_numpy() | graphs["kind"].isin(BESIDE).to_numpy()]
    graphs = graphs[innermost_span(steps.tables["operators"], graphs) < 0]
    copies = (graphs["kind"] == "copy").to_numpy()
    answers = Intervals.of_table(batches[batches["wait_ns"] >= 0], begin="wait_ns")
    offloaded = Intervals.joined(Intervals.of_table(graphs[~copies]), answers)
    parts = ((OFFLOADED, offloaded), (COPY, Intervals.of_table(graphs[copies])))
    found = [(PARTS.index(part), overlaps(steps.windows, merge_intervals(spans))) for part, spans in parts]
    pieces = [piece_frame(step=m.left, begin=m.begin, end=m.end, tid=steps.owner[m.left], part=part) for part, m in found]
    return pd.concat(pieces, ignore_index=True)


def own_pieces(steps: StepThreads) -> pd.DataFrame:
    """Pieces that tile the steps' windows, by the activity of their own threads: the innermost one counts."""
    windows, host = steps.windows, PARTS.index(HOST_CODE)
    outer = piece_frame(step=np.arange(len(windows)), begin=windows.begin, end=windows.end, tid=windows.key, part=host)
    shares, loads = (pieces[steps.is_own(pieces)] for pieces in (steps.shares, steps.loads))
    pieces = pd.concat([outer, graph_pieces(steps), shares, barrier_waits(steps.tables, shares), loads], ignore_index=True)
    step = pieces["step"].to_numpy()
    begin, end = np.maximum(pieces["begin"], windows.begin[step]), np.minimum(pieces["end"], windows.end[step])
    return innermost_pieces(pieces.assign(begin=begin, end=end), "step")[list(COLUMNS)]


def innermost_pieces(pieces: pd.DataFrame, key: str) -> pd.DataFrame:
    """Nested pieces split so that each moment of a `key` belongs to the innermost one."""
    segments = NestedSpans(*(pieces[name].to_numpy() for name in (key, "begin", "end"))).segments()
    return cut_pieces(pieces, segments.span, segments.begin, segments.end)


def queued_ns(sched: pd.DataFrame, ready: Intervals) -> np.ndarray:
    """When threads that are `ready` began to lack a CPU: at their end on an idle CPU, or if they displaced its thread at once."""
    switch, wakeup = (sched[(sched["event"] == event).to_numpy()] for event in ("switch", "wakeup"))
    row = equal_rows([switch["next_tid"].to_numpy(), switch["ts_ns"].to_numpy()], [ready.key, ready.end])
    last = latest(wakeup["next_tid"].to_numpy(), wakeup["ts_ns"].to_numpy(), ready.key, ready.end)
    since, cpu = (np.append(wakeup[name].to_numpy(), NONE)[last] for name in ("ts_ns", "target_cpu"))
    known = since >= ready.begin
    stayed = ~known | (cpu == np.append(switch["cpu"].to_numpy(), NONE)[row])
    idle = stayed & (np.append(switch["prev_tid"].to_numpy(), NONE)[row] == 0)
    at_once = known & (ready.end - since <= SWITCH_NS)
    return np.where(idle | at_once, ready.end, np.where(known, since, ready.begin))


def waker_of(sched: pd.DataFrame, ended: Intervals) -> np.ndarray:
    """The thread that woke each thread up at the end of its state; 0: an interrupt, -1: not recorded."""
    woken = sched[(sched["event"] == "waking").to_numpy()]
    row = equal_rows([woken[name].to_numpy() for name in ("next_tid", "ts_ns")], [ended.key, ended.end])
    return np.append(woken["prev_tid"].to_numpy(), NONE)[row]


def sleep_wakers(tables: Tables, slept: Intervals) -> np.ndarray:
    """The thread of the program that ended each sleep; -1: none is known."""
    by, threads = waker_of(tables["sched"], slept), tables["threads"]
    return np.where(np.isin(by, threads.loc[threads["target"].to_numpy(bool), "tid"]) & (by != slept.key), by, NONE)


def worker_pieces(steps: StepThreads) -> pd.DataFrame:
    """The work of other threads for steps, one piece at a time: computing before loading, a running thread before others."""
    shares, loads = (pieces[~steps.is_own(pieces)] for pieces in (steps.shares, steps.loads))
    every = pd.concat([shares.assign(end=shares["wait"]), loads], ignore_index=True)[list(COLUMNS)].assign(role=WORKER)
    pieces = steps.by_state(innermost_pieces(every, "tid"))
    rank = 2 * pieces["state"].clip(lower=0) + (pieces["part"] == PARTS.index(LOAD))
    spans, row = foremost_pieces(spans_of(pieces), rank.to_numpy())
    return cut_pieces(pieces, row, spans.begin, spans.end)


def decisive_pieces(steps: StepThreads, excluded: Intervals) -> pd.DataFrame:
    """Pieces that tile the steps' windows, each with the thread that decides, its state, and the step's own thread, `owner`.

    Another thread can decide while the own one sleeps, or in host code without a record of it; not within `excluded` (by thread).
    """
    own = steps.by_state(own_pieces(steps))
    own = own.assign(row=np.arange(len(own)), owner=steps.owner[own["step"]])
    unknown = (own["state"] == NONE) & (own["part"] == PARTS.index(HOST_CODE))
    asleep = own[(own["role"] == OWN) & ((own["state"] == SLEEPING) | unknown)]
    parts = split_intervals(spans_of(asleep, "tid"), excluded)
    asleep = cut_pieces(asleep, parts.left, parts.begin, parts.end)[parts.right < 0]
    taken = pd.concat([of_workers(asleep, worker_pieces(steps)), of_wakers(steps, asleep)], ignore_index=True)
    spans, row = foremost_pieces(spans_of(taken, "row"), taken["role"].to_numpy())
    replaced = cut_pieces(taken, row, spans.begin, spans.end)
    left = uncovered_parts(spans_of(own, "row"), spans_of(replaced, "row"))
    return pd.concat([cut_pieces(own, left.key, left.begin, left.end), replaced], ignore_index=True)


def of_workers(asleep: pd.DataFrame, working: pd.DataFrame) -> pd.DataFrame:
    """The parts of `asleep` in which another thread works for the step; a load only if no other thread ends the sleep.

    A load is within the operator that waits for it.
    """
    met = overlaps(spans_of(asleep), spans_of(working))
    row, owner, waker, operator = (asleep[name].to_numpy()[met.left] for name in ("row", "owner", "waker", "operator"))
    pieces = cut_pieces(working, met.right, met.begin, met.end).assign(row=row, owner=owner)
    loads = (pieces["part"] == PARTS.index(LOAD)).to_numpy()
    pieces["operator"] = np.where(loads & (operator >= 0), operator, pieces["operator"])
    return pieces[~loads | (waker < 0) | (waker == pieces["tid"].to_numpy())]


def of_wakers(steps: StepThreads, asleep: pd.DataFrame) -> pd.DataFrame:
    """The parts of `asleep` that a thread of the program ends."""
    woken = asleep[asleep["waker"] >= 0]
    return steps.by_state(woken.assign(tid=woken["waker"], role=WAKER))
