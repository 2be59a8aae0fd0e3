"""Which thread decides, moment by moment, how long a step takes, and the operator or expert load that it is in.

It is the step's own thread; at an operator's barrier the last thread to arrive; while the own thread sleeps, or nothing is
recorded of it, another thread that works for the step; without one, the thread of the program that ends the sleep.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analyzer.questions.parts import BESIDE, COPY, HOST, HOST_CODE, LOAD, OFFLOADED, PARTS, operator_parts
from analyzer.records.intervals import Intervals, foremost, merged, overlaps, uncovered
from analyzer.records.schema import Tables
from analyzer.records.spans import EVER, NONE, Nest, enclosing, equal_rows, latest, successors
from analyzer.tables.sched import TRACER

OWN, BARRIER, WORKER, WAKER = range(4)
"""Why a thread decides: it is the step's own; the others wait for it; it works for the step; it wakes the step's thread up."""
SETUPS = ("contextCreate", "contextCreateFromBinary", "graphFinalize")
"""QNN's calls that create the objects of an execution."""
STATES = ("running", "runnable", "waiting", "stopped", "held", "sleeping")
"""Those of `thread_states`; "held" is a stop that the tracer ended, which it does only to its own."""
WOKEN_FROM = tuple(map(STATES.index, ("waiting", "stopped", "held", "sleeping")))
"""States that end with a wake-up."""
SWITCH_NS = 20_000
"""The longest time from a wake-up to running on a CPU whose thread gives way at once: an interrupt to that CPU and a switch."""
COLUMNS = ("step", "begin", "end", "tid", "role", "part", "op", "load")
"""Pieces of steps are frames with these columns of integers: row of `tokens`, ns, ns, the thread that decides and why, index of
PARTS, row of `operators` and row of `loads` or -1."""


def piece_frame(**columns: np.ndarray | pd.Series | int) -> pd.DataFrame:
    """Pieces from columns; those not given are -1, the role is OWN."""
    given: dict[str, np.ndarray | pd.Series | int] = {**dict.fromkeys(COLUMNS, NONE), "role": OWN, **columns}
    n = len(np.atleast_1d(columns["begin"]))
    return pd.DataFrame({name: np.broadcast_to(np.asarray(value, np.int64), n) for name, value in given.items()})


def spans_of(pieces: pd.DataFrame, key: str = "step") -> Intervals:
    """Pieces as intervals, with one of their columns as key."""
    return Intervals.of_table(pieces, key, "begin", "end")


def numbered_spans(pieces: pd.DataFrame) -> Intervals:
    """Pieces as intervals whose key is the row number."""
    return Intervals(np.arange(len(pieces)), pieces["begin"].to_numpy(), pieces["end"].to_numpy())


def cut(pieces: pd.DataFrame, rows: np.ndarray, begin: np.ndarray, end: np.ndarray) -> pd.DataFrame:
    """The pieces of these rows, with other begins and ends."""
    return pieces.iloc[rows].assign(begin=begin, end=end).reset_index(drop=True)


@dataclass(frozen=True)
class StepThreads:
    """The steps of a recording, their threads, and the threads' states."""

    tables: Tables

    @cached_property
    def owner(self) -> np.ndarray:
        """The thread of each step."""
        return self.tables["tokens"]["tid"].to_numpy(np.int64)

    def rows(self, token_ids: pd.Series) -> np.ndarray:
        """The row in `tokens` of each token_id; -1 for none."""
        return pd.Index(self.tables["tokens"]["token_id"]).get_indexer(token_ids)

    def owner_of(self, token_ids: pd.Series) -> np.ndarray:
        """The thread of each token_id's step; -1 for none."""
        return np.append(self.owner, NONE)[self.rows(token_ids)]

    @cached_property
    def operator(self) -> np.ndarray:
        """The row in `operators` of each of `op_threads`; -1 for none."""
        op = self.tables["op_threads"]["op_id"].to_numpy(np.int64)
        return np.where(op < len(self.tables["operators"]), op, NONE)

    @cached_property
    def windows(self) -> Intervals:
        """Steps by thread, each extended by the waits for its accelerator work before its thread begins another."""
        tokens, graphs = Intervals.of_table(self.tables["tokens"]), self.tables["graphs"]
        waits = merged(Intervals.of_table(graphs[(graphs["kind"] == "wait").to_numpy()]))
        following = np.append(tokens.begin, EVER)[successors(tokens.key, tokens.begin)]
        until = tokens.end.copy()
        met = overlaps(Intervals(tokens.key, tokens.end, following), waits)
        np.maximum.at(until, met.left, met.end)
        return Intervals(tokens.key, tokens.begin, until)

    @cached_property
    def scheduled(self) -> tuple[Intervals, np.ndarray]:
        """(states of all threads as recorded, by thread; index in STATES of each)."""
        table, threads = self.tables["thread_states"], self.tables["threads"]
        spans, state = Intervals.of_table(table), pd.Index(STATES).get_indexer(table["state"])
        stopped = np.flatnonzero(state == STATES.index("stopped"))
        ended_by = waker_of(self.tables["sched"], spans.key[stopped], spans.end[stopped])
        tracer = threads.loc[(threads["name"] == TRACER).to_numpy() & ~threads["target"].to_numpy(bool), "tid"]
        state[stopped[np.isin(ended_by, tracer)]] = STATES.index("held")
        return spans, state

    @cached_property
    def states(self) -> tuple[Intervals, np.ndarray, np.ndarray]:
        """(states of all threads, by thread; index in STATES; when each ended).

        A wait lasts until the thread stands in a run queue or, if it gets the CPU at once, until it runs: it lacks no CPU before.
        """
        spans, state = self.scheduled
        before = equal_rows([spans.key, spans.end], [spans.key, spans.begin])
        waited = np.isin(np.append(state, NONE)[before], WOKEN_FROM)
        woken = np.flatnonzero((state == STATES.index("runnable")) & waited)
        queued = queued_ns(self.tables["sched"], spans.where(woken))
        begin, end = spans.begin.copy(), spans.end.copy()
        begin[woken], end[before[woken]] = queued, queued
        keep = begin < end
        return Intervals(spans.key, begin, end).where(keep), state[keep], spans.end[keep]

    def state(self, *names: str) -> Intervals:
        """The times in which steps' threads were in these states."""
        return in_states(self.states[:2], names, self.owner)

    def by_state(self, pieces: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
        """(pieces split by the state of their `tid`; index in STATES of each, -1: unknown)."""
        spans, state, _ = self.states
        known = np.isin(spans.key, pieces["tid"].unique())
        spans, state = spans.where(known), state[known]
        met = overlaps(spans_of(pieces, "tid"), spans)
        rest = uncovered(numbered_spans(pieces), Intervals(met.left, met.begin, met.end))
        rows, begin, end = (np.concatenate(c) for c in ((met.left, rest.key), (met.begin, rest.begin), (met.end, rest.end)))
        return cut(pieces, rows, begin, end), np.concatenate((state[met.right], np.full(len(rest), NONE)))


def operator_pieces(steps: StepThreads, own: bool) -> tuple[pd.DataFrame, np.ndarray]:
    """(threads' shares of operators of steps, by the step's own thread or by others; when each began to wait)."""
    shares, operators = steps.tables["op_threads"], steps.tables["operators"]
    op, tid = steps.operator, shares["tid"].to_numpy()
    step = np.append(steps.rows(operators["token_id"]), NONE)[op]
    rows = np.flatnonzero((step >= 0) & ((np.append(steps.owner, NONE)[step] == tid) == own))
    part = pd.Categorical(operator_parts(operators), PARTS).codes
    op, (begin, wait, end) = op[rows], (shares[name].to_numpy()[rows] for name in ("begin_ns", "wait_ns", "end_ns"))
    return piece_frame(step=step[rows], begin=begin, end=end if own else wait, tid=tid[rows], part=part[op], op=op), wait


def barriers(tables: Tables, shares: pd.DataFrame, wait: np.ndarray) -> pd.DataFrame:
    """The waits of steps' own threads within operators for the last thread to arrive at the barrier."""
    arrivals = tables["op_threads"].sort_values("wait_ns", kind="stable").drop_duplicates("op_id", keep="last")
    last = arrivals.set_index("op_id").reindex(shares["op"])
    opened = np.minimum(last["wait_ns"].to_numpy(), shares["end"])
    waits = shares.assign(begin=wait, end=opened, role=BARRIER, tid=last["tid"].to_numpy())
    return waits[(waits["end"] > waits["begin"]) & (waits["tid"] != shares["tid"])]


def load_pieces(steps: StepThreads, own: bool) -> pd.DataFrame:
    """Expert loads for steps on their own threads or on others; on others, also the creation of NPU contexts (thread -1)."""
    loads, code = steps.tables["loads"], PARTS.index(LOAD)
    step, tid = steps.rows(loads["token_id"]), loads["tid"].to_numpy()
    mine = np.append(steps.owner, NONE)[step] == tid
    rows = np.flatnonzero((loads["action"] == "load").to_numpy() & (step >= 0) & (mine == own))
    begin, end = (loads[name].to_numpy()[rows] for name in ("begin_ns", "end_ns"))
    pieces = piece_frame(step=step[rows], begin=begin, end=end, tid=tid[rows], part=code, load=rows)
    calls, windows = steps.tables["qnn_calls"], steps.windows
    calls = calls[calls["call"].isin(SETUPS).to_numpy()]
    calls = calls[enclosing(loads, calls) < 0]
    key = windows.key if own else steps.tables["tokens"]["pid"].to_numpy()
    met = overlaps(Intervals(key, windows.begin, windows.end), merged(Intervals.of_table(calls, "tid" if own else "pid")))
    made = piece_frame(step=met.left, begin=met.begin, end=met.end, tid=windows.key[met.left] if own else NONE, part=code)
    pieces = pd.concat([pieces, made], ignore_index=True)
    around = enclosing(steps.tables["op_threads"], pieces.rename(columns={"begin": "begin_ns"}))
    return pieces.assign(op=np.append(steps.operator, NONE)[around])


def graph_pieces(steps: StepThreads) -> pd.DataFrame:
    """Graphs of accelerators and waits for them, and copies between backends, on steps' own threads, outside of operators."""
    graphs, batches = steps.tables["graphs"], steps.tables["npu_batches"]
    graphs = graphs[~graphs["backend"].isin(HOST).to_numpy() | graphs["kind"].isin(BESIDE).to_numpy()]
    graphs = graphs[enclosing(steps.tables["operators"], graphs) < 0]
    copies = (graphs["kind"] == "copy").to_numpy()
    answers = batches[batches["wait_ns"].to_numpy() >= 0]
    answers = answers.assign(begin_ns=answers["end_ns"] - answers["wait_ns"])
    offloaded = Intervals.joined(Intervals.of_table(graphs[~copies]), Intervals.of_table(answers))
    parts = ((OFFLOADED, offloaded), (COPY, Intervals.of_table(graphs[copies])))
    found = [(PARTS.index(part), overlaps(steps.windows, merged(spans))) for part, spans in parts]
    pieces = [piece_frame(step=m.left, begin=m.begin, end=m.end, tid=steps.owner[m.left], part=part) for part, m in found]
    return pd.concat(pieces, ignore_index=True)


def own_pieces(steps: StepThreads) -> pd.DataFrame:
    """Pieces that tile the steps' windows, by the activity of their own threads: the innermost one counts."""
    windows = steps.windows
    shares, wait = operator_pieces(steps, own=True)
    outer = piece_frame(
        step=np.arange(len(windows)), begin=windows.begin, end=windows.end, tid=windows.key, part=PARTS.index(HOST_CODE)
    )
    nested = [outer, graph_pieces(steps), shares, barriers(steps.tables, shares, wait), load_pieces(steps, own=True)]
    pieces = pd.concat(nested, ignore_index=True)
    step = pieces["step"].to_numpy()
    begin, end = np.maximum(pieces["begin"], windows.begin[step]), np.minimum(pieces["end"], windows.end[step])
    return innermost(pieces.assign(begin=begin, end=end), "step")


def innermost(pieces: pd.DataFrame, key: str) -> pd.DataFrame:
    """Nested pieces split so that each moment of a `key` belongs to the innermost one."""
    segments = Nest(*(pieces[name].to_numpy() for name in (key, "begin", "end"))).segments()
    return cut(pieces, segments.span, segments.begin, segments.end)


def in_states(states: tuple[Intervals, np.ndarray], names: tuple[str, ...], threads: np.ndarray) -> Intervals:
    """The times of some threads in these states."""
    spans, state = states
    return spans.where(np.isin(state, [STATES.index(name) for name in names]) & np.isin(spans.key, threads))


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


def waker_of(sched: pd.DataFrame, tid: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """The thread that woke each `tid` up when its state ended; 0: an interrupt, -1: not recorded."""
    woken = sched[(sched["event"] == "waking").to_numpy()]
    row = equal_rows([woken[name].to_numpy() for name in ("next_tid", "ts_ns")], [tid, ended])
    return np.append(woken["prev_tid"].to_numpy(), NONE)[row]


def wakers(steps: StepThreads) -> tuple[Intervals, np.ndarray]:
    """(times in which threads slept, by thread; the thread of the program that ended each, -1: none is known)."""
    spans, state, ended = steps.states
    asleep = state == STATES.index("sleeping")
    slept, threads = spans.where(asleep), steps.tables["threads"]
    by = waker_of(steps.tables["sched"], slept.key, ended[asleep])
    ours = np.isin(by, threads.loc[threads["target"].to_numpy(bool), "tid"]) & (by != slept.key)
    return slept, np.where(ours, by, NONE)


def workers(steps: StepThreads) -> pd.DataFrame:
    """The work of other threads for steps, one piece at a time: computing before loading, a running thread before others."""
    shares = operator_pieces(steps, own=False)[0]
    pieces = innermost(pd.concat([shares, load_pieces(steps, own=False)], ignore_index=True), "tid")
    pieces, state = steps.by_state(pieces)
    rank = 2 * np.maximum(state, 0) + (pieces["part"] == PARTS.index(LOAD))
    spans, row = foremost(spans_of(pieces), rank.to_numpy())
    return cut(pieces.assign(role=WORKER), row, spans.begin, spans.end)


def decisive_pieces(steps: StepThreads, excluded: Intervals) -> pd.DataFrame:
    """Pieces that tile the steps' windows, each with the thread that decides; within `excluded` (by thread), the own one."""
    own = own_pieces(steps)
    slept, waker = wakers(steps)
    mine = np.isin(slept.key, steps.owner)
    slept, waker = slept.where(mine), waker[mine]
    met = overlaps(spans_of(own.assign(tid=np.where(own["role"] == OWN, own["tid"], NONE)), "tid"), slept)
    asleep = cut(own, met.left, met.begin, met.end).assign(waker=waker[met.right], row=met.left)
    asleep = pd.concat([asleep, without_state(steps, own)], ignore_index=True)
    inside = overlaps(spans_of(asleep, "tid"), merged(excluded))
    free = uncovered(numbered_spans(asleep), Intervals(inside.left, inside.begin, inside.end))
    asleep = cut(asleep, free.key, free.begin, free.end)
    taken = pd.concat([of_workers(asleep, workers(steps)), of_wakers(asleep)], ignore_index=True)
    spans, row = foremost(spans_of(taken, "row"), taken["role"].to_numpy())
    replaced = cut(taken, row, spans.begin, spans.end)
    left = uncovered(numbered_spans(own), spans_of(replaced, "row"))
    return pd.concat([cut(own, left.key, left.begin, left.end), replaced[list(COLUMNS)]], ignore_index=True)


def without_state(steps: StepThreads, own: pd.DataFrame) -> pd.DataFrame:
    """The parts of host code in which nothing is recorded of the step's own thread, with their `row`: it may sleep."""
    code = own.assign(waker=NONE, row=np.arange(len(own)))[(own["part"] == PARTS.index(HOST_CODE)).to_numpy()]
    pieces, state = steps.by_state(code)
    return pieces[state == NONE]


def of_workers(asleep: pd.DataFrame, working: pd.DataFrame) -> pd.DataFrame:
    """The parts of `asleep` in which another thread works for the step; a load only if no other thread ends the sleep.

    A load is within the operator that waits for it.
    """
    met = overlaps(spans_of(asleep), spans_of(working))
    row, waker, op = (asleep[name].to_numpy()[met.left] for name in ("row", "waker", "op"))
    pieces = cut(working, met.right, met.begin, met.end).assign(row=row)
    loads = (pieces["part"] == PARTS.index(LOAD)).to_numpy()
    pieces["op"] = np.where(loads & (op >= 0), op, pieces["op"])
    return pieces[~loads | (waker < 0) | (waker == pieces["tid"].to_numpy())]


def of_wakers(asleep: pd.DataFrame) -> pd.DataFrame:
    """The parts of `asleep` that a thread of the program ends."""
    woken = asleep[asleep["waker"] >= 0]
    return woken.assign(tid=woken["waker"], role=WAKER)
