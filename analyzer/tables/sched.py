"""Scheduler tables: gapless states of the target's threads, the names of all threads, and the events for a native trace."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow

from analyzer.records.contents import STREAMED
from analyzer.records.loops import loops
from analyzer.records.observed import Gaps, clip_at_gaps
from analyzer.records.reading import Source
from analyzer.records.rows import Rows, decode_texts
from analyzer.records.schema import Columns, arrow_table, text_array
from analyzer.records.spans import NONE, distinct_sorted, first_rows

EVENTS = np.array(["switch", "waking", "wakeup", "fork"], object)
STATES = np.array(["running", "runnable", "sleeping", "waiting", "stopped", ""], object)
"""By their numbers in analyzer/records/_joins.c."""
WORKING = (
    *("token_begin", "graph_begin", "op_begin", "op_shares", "expert_begin", "load_begin", "qnn_execute_begin"),
    "qnn_call_begin",
)
INTERRUPTED = 2
"""WAKER_INTERRUPTED of bpf/records.h: no thread woke, as where an interrupt meets an idle CPU."""
TRACER = "the tracer"
"""Name of its threads, which are Python's as the target's may be."""
LARGEST_ID = 1 << 22
"""Of a thread or process: PID_MAX_LIMIT of include/linux/threads.h."""


@dataclass(frozen=True)
class TargetThreads:
    """Threads of the traced program, sorted, with their processes (-1 where unknown)."""

    tid: np.ndarray
    pid: np.ndarray

    def has(self, tid: np.ndarray) -> np.ndarray:
        """Which of these threads belong to the program."""
        return np.isin(tid, self.tid)

    def place(self, tid: np.ndarray) -> np.ndarray:
        """Their indexes among the program's threads; -1 for other threads and for tid 0."""
        row = np.minimum(np.searchsorted(self.tid, tid), len(self.tid) - 1)
        return np.where((np.append(self.tid, NONE)[row] == tid) & (tid > 0), row, NONE)

    def process(self, tid: np.ndarray) -> np.ndarray:
        """Their processes; -1 for other threads."""
        return np.append(self.pid, NONE)[self.place(tid)]


def listed_threads(manifest: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """(tid, pid, name) of the manifest's threads; damaged rows omitted."""
    rows = [row for row in manifest.get("threads") or [] if is_id(row.get("tid")) and is_id(row.get("pid", NONE))]
    return [(row["tid"], row.get("pid", NONE), str(row.get("name", ""))) for row in rows]


def is_id(value: object) -> bool:
    """Whether a value is a possible thread or process id, or NONE."""
    return isinstance(value, int) and NONE <= value <= LARGEST_ID


def target_threads(source: Source) -> TargetThreads:
    """Threads that the manifest lists, that wrote the program's records, or that such threads created."""
    process: dict[int, int] = {}
    for tid, pid, _ in listed_threads(source.manifest):
        process.setdefault(tid, pid)
    for kind in WORKING:
        for tid, pid in (
            source.contents.processes.get(kind, {}).items() if kind in STREAMED else thread_members(source.rows(kind))
        ):
            process.setdefault(tid, pid)
    fork = source.rows("task_fork")
    for tid, pid in thread_members(fork):
        process.setdefault(tid, pid)
    for tid in distinct_sorted(fork["child_tid"]).tolist():
        process.setdefault(tid, NONE)
    switched = source.contents.processes.get("sched_switch", {})
    tids = np.array(sorted(process), np.int64)
    pids = [process[t] if process[t] >= 0 else switched.get(t, NONE) for t in tids.tolist()]
    return TargetThreads(tids, np.array(pids, np.int64))


def thread_members(rows: Rows) -> Iterable[tuple[int, int]]:
    """Each thread that wrote records, with its process."""
    tid, first = first_rows(rows["tid"])
    return zip(tid.tolist(), rows["pid"][first].tolist(), strict=True)


class OpenStates:
    """The open state of each of the target's threads; rows begin_ns, state (NONE: not seen yet), cpu, last event."""

    def __init__(self, target: TargetThreads):
        self.target = target
        self.rows = np.full((4, len(target.tid)), NONE, np.int64)

    def thread_states(self, switch: Rows, woken: tuple[Rows, Rows], fork: Rows, final: bool, gaps: list[Gaps]) -> pyarrow.Table:
        """The table `thread_states` of one time range.

        The states of each thread tile its time from its first to its last event, except for `gaps`. Of `woken`, wakings and
        wake-ups, the first makes a thread runnable unless it runs: a thread that is falling asleep may run at its waking. Rows
        are sorted by the event that ended them; the last state of each thread comes at the very end, when `final` states that no
        time range follows.
        """
        out, back = (self.target.place(switch[name]) for name in ("prev_tid", "next_tid"))
        switches = np.stack([switch["ts"], switch.position, out, switch["prev_state"], back, switch["cpu"]])
        kinds = [(rows, rows["woken_tid"]) for rows in woken] + [(fork, fork["child_tid"])]
        starts = np.concatenate([np.stack([rows["ts"], rows.position, tid]) for rows, tid in kinds], axis=1)
        starts = np.ascontiguousarray(starts[:, np.lexsort(starts[1::-1])])
        starts[2] = self.target.place(starts[2])
        n, m, threads = len(switch), starts.shape[1], len(self.target.tid)
        rows = np.empty((5, 2 * n + m + threads), np.int64)
        count = loops.states(final, threads, n, switches, m, starts, self.rows, rows)
        thread, state, cpu, begin, end = rows[:, :count]
        stop = clip_at_gaps(begin, end, gaps)
        if stop is not end:
            lasting = stop > begin
            thread, state, cpu, begin, stop = (column[lasting] for column in (thread, state, cpu, begin, stop))
        columns = {
            "tid": self.target.tid[thread],
            "pid": self.target.pid[thread],
            "state": text_array(state, STATES),
            "cpu": cpu,
            "begin_ns": begin,
            "end_ns": stop,
            "duration_ns": stop - begin,
        }
        return arrow_table("thread_states", columns)


class SchedulingTables:
    """The tables `thread_states`, `threads` and `sched`, built from consecutive time ranges."""

    def __init__(self, source: Source):
        self.source, self.target = source, target_threads(source)
        self.gaps = source.gaps("sched")
        self.open = OpenStates(self.target)
        self.names: dict[int, str] = {}
        self.processes: dict[int, int] = {}
        self.seen = self.target.tid

    def piece(self, source: Source, final: bool) -> dict[str, pyarrow.Table]:
        """`thread_states` and `sched` of one time range; `final`: it is the last."""
        kinds = ("sched_switch", "sched_waking", "sched_wakeup", "task_fork")
        switch, waking, wakeup, fork = (source.rows(kind) for kind in kinds)
        fork = fork.where((fork["ts"] >= source.begin_ns) & (fork["ts"] < source.end_ns))
        states = self.open.thread_states(switch, (waking, wakeup), fork, final, self.gaps)
        self._meet(switch, waking)
        return {"thread_states": states, "sched": sched_events(source)}

    def _meet(self, switch: Rows, waking: Rows) -> None:
        """Add the threads of these records, with the last name and the first process of each."""
        named = np.concatenate(
            (np.where(switch["comm_of_next"] > 0, switch["next_tid"], switch["prev_tid"]), waking["woken_tid"])
        )
        order = np.argsort(np.concatenate((switch["ts"], waking["ts"])), kind="stable")[::-1]
        tids, newest = first_rows(named[order])
        row = order[newest]
        of_switch = row < len(switch)
        for rows, of_kind, chosen in ((switch, of_switch, row[of_switch]), (waking, ~of_switch, row[~of_switch] - len(switch))):
            self.names.update(zip(tids[of_kind].tolist(), decode_texts(rows.where(chosen)["comm"]).tolist(), strict=True))
        for rows in (switch.where(switch["tid"] == switch["prev_tid"]), waking):
            for tid, pid in thread_members(rows):
                self.processes.setdefault(tid, pid)
        everyone = (switch["prev_tid"], switch["next_tid"], waking["tid"], waking["woken_tid"])
        self.seen = np.union1d(self.seen, np.concatenate([distinct_sorted(tid) for tid in everyone]))

    def threads(self) -> Columns:
        """The columns of `threads`: the target's threads, and all threads that preempted or woke them."""
        names = self.names | {tid: name for tid, _, name in listed_threads(self.source.manifest) if name}
        names.setdefault(0, "swapper")
        tracer = self.source.manifest.get("tracer_pid")
        if isinstance(tracer, int) and tracer > 0:
            names |= {tid: TRACER for tid in self.seen.tolist() if tracer in (tid, self.processes.get(tid))}
        tid = self.seen
        pid, of_target = self.target.process(tid), self.target.has(tid) & (tid > 0)
        elsewhere = np.array([self.processes.get(t, NONE) for t in tid.tolist()], np.int64)
        label = np.array([*(names.get(t, "") for t in tid.tolist()), ""], object)[:-1]
        return {"tid": tid, "pid": np.where(pid >= 0, pid, elsewhere), "name": label, "target": of_target}


def sched_events(source: Source) -> pyarrow.Table:
    """The table `sched`: switches, wakings, wake-ups and forks in time order."""
    kinds = [source.rows(kind) for kind in ("sched_switch", "sched_waking", "sched_wakeup", "task_fork")]
    switch, waking, wakeup, fork = kinds
    waker = np.where(waking["waker"] == INTERRUPTED, 0, waking["tid"])
    ts = np.concatenate([rows["ts"] for rows in kinds])
    order = np.argsort(ts, kind="stable")
    none = [np.full(len(rows), NONE, np.int64) for rows in kinds]
    columns = {
        "cpu": [rows["cpu"] for rows in kinds],
        "prev_tid": (switch["prev_tid"], waker, wakeup["tid"], fork["parent_tid"]),
        "prev_state": (switch["prev_state"], *none[1:]),
        "prev_prio": (switch["prev_prio"], *none[1:]),
        "next_tid": (switch["next_tid"], waking["woken_tid"], wakeup["woken_tid"], fork["child_tid"]),
        "next_prio": (switch["next_prio"], waking["prio"], wakeup["prio"], none[3]),
        "target_cpu": (none[0], waking["target_cpu"], wakeup["target_cpu"], none[3]),
    }
    merged = {name: np.concatenate(parts)[order] for name, parts in columns.items()}
    number = np.repeat(np.arange(len(kinds)), [len(rows) for rows in kinds])
    return arrow_table("sched", {"ts_ns": ts[order], "event": text_array(number[order], EVENTS), **merged})
