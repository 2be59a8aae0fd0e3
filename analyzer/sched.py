"""The scheduler: states of the target's threads that tile their time, everyone's names, and the events for a native trace."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.observed import Gaps, clipped, gaps_of
from analyzer.reading import Rows, Source, texts
from analyzer.schema import conform
from analyzer.spans import NONE, distinct, first_rows, order_in_groups

UNINTERRUPTIBLE = 2
HELD = 0x4 | 0x8  # by a signal, or by a tracer; ours holds the target while it places probes
GONE = 0x10 | 0x20 | 0x80  # dead and zombie bits of a task's state
REPORTED = 0xFF  # sched_switch adds 0x100 to the state of a task that was preempted
RUNNING, RUNNABLE, SLEEPING, WAITING, STOPPED, OVER = range(6)
STATES = np.array(["running", "runnable", "sleeping", "waiting", "stopped", ""], object)
WORKING = ("token_begin", "graph_begin", "op_begin", "expert_begin", "load_begin", "qnn_execute_begin", "qnn_call_begin")


@dataclass(frozen=True)
class Target:
    """Threads of the traced program, sorted, with their processes (-1 where unknown)."""

    tid: np.ndarray
    pid: np.ndarray

    def has(self, tid: np.ndarray) -> np.ndarray:
        """Which of these threads belong to the program."""
        return np.isin(tid, self.tid)

    def process(self, tid: np.ndarray) -> np.ndarray:
        """Their processes; -1 for strangers."""
        if len(self.tid) == 0:
            return np.full(len(tid), NONE, np.int64)
        at = np.minimum(np.searchsorted(self.tid, tid), len(self.tid) - 1)
        return np.where(self.tid[at] == tid, self.pid[at], NONE)


def listed_threads(source: Source) -> list[tuple[int, int, str]]:
    """(tid, pid, name) of the manifest's threads; damaged rows left out."""
    rows = source.manifest.get("threads")
    good = [r for r in rows if isinstance(r, dict) and isinstance(r.get("tid"), int)] if isinstance(rows, list) else []
    return [(r["tid"], int(r.get("pid", NONE)), str(r.get("name", ""))) for r in good]


def target(source: Source) -> Target:
    """Threads that the manifest names, that did the program's work, or that such threads made."""
    listed = listed_threads(source)
    work = [source.rows(kind) for kind in WORKING]
    fork, switch = source.rows("task_fork"), source.rows("sched_switch")
    tid = [np.array([r[0] for r in listed], np.int64), *(rows["tid"] for rows in work), fork["tid"], fork["child_tid"]]
    unknown = np.full(len(fork), NONE, np.int64)
    pid = [np.array([r[1] for r in listed], np.int64), *(rows["pid"] for rows in work), fork["pid"], unknown]
    known = distinct(np.concatenate(tid))
    own = switch["tid"] == switch["prev_tid"]  # the header's process is that of the thread switched out
    tids = np.concatenate([*tid, switch["tid"][own]])
    pids = np.concatenate([*pid, switch["pid"][own]])
    told = pids >= 0
    who, first = first_rows(tids[told])
    process = dict(zip(who.tolist(), pids[told][first].tolist(), strict=True))
    return Target(known, np.array([process.get(t, NONE) for t in known.tolist()], np.int64))


@dataclass(frozen=True)
class Moments:
    """Scheduling events of single threads, sorted by thread and time; `state` is the state that each begins."""

    tid: np.ndarray
    ts: np.ndarray
    state: np.ndarray
    cpu: np.ndarray


def state_after(prev_state: np.ndarray) -> np.ndarray:
    """The state of a thread that was switched out with these kernel state bits."""
    bits = prev_state & REPORTED
    waiting = np.where(bits & UNINTERRUPTIBLE, WAITING, np.where(bits & HELD, STOPPED, SLEEPING))
    return np.where(bits == 0, RUNNABLE, np.where(bits & GONE, OVER, waiting))


def moments(switch: Rows, waking: Rows, fork: Rows, known: Target) -> Moments:
    """Every change of state of the target's threads; a waking changes nothing for a thread that still runs."""
    n = len(switch)
    none = np.full(n + len(waking) + len(fork), NONE, np.int64)
    tid = np.concatenate((switch["prev_tid"], switch["next_tid"], waking["woken_tid"], fork["child_tid"]))
    ts = np.concatenate((switch["ts"], switch["ts"], waking["ts"], fork["ts"]))
    runnable = np.full(len(waking) + len(fork), RUNNABLE)
    state = np.concatenate((state_after(switch["prev_state"]), np.full(n, RUNNING), runnable))
    cpu = np.concatenate((none[:n], switch["cpu"], none[n:]))
    position = np.concatenate((switch.position, switch.position, waking.position, fork.position))
    hint = np.concatenate((np.ones(2 * n, bool), np.zeros(len(waking) + len(fork), bool)))
    mine = np.flatnonzero(known.has(tid) & (tid > 0))
    rows = mine[order_in_groups(np.searchsorted(known.tid, tid[mine]), ts[mine], position[mine])]
    tid, ts, state, cpu, switched = tid[rows], ts[rows], state[rows], cpu[rows], hint[rows]
    last = np.maximum.accumulate(np.where(switched, np.arange(len(rows)), NONE))
    runs = ~switched & (last >= 0) & (tid[last] == tid) & (state[last] == RUNNING) if len(rows) else switched
    return Moments(tid[~runs], ts[~runs], state[~runs], cpu[~runs])


def thread_states(known: Target, events: Moments, gaps: list[Gaps]) -> pd.DataFrame:
    """The table `thread_states`: the states of each thread tile its time from its first to its last event, but for `gaps`."""
    if len(events.tid):
        change = (
            (events.tid[1:] != events.tid[:-1]) | (events.state[1:] != events.state[:-1]) | (events.cpu[1:] != events.cpu[:-1])
        )
        closing = np.append(events.tid[1:] != events.tid[:-1], True)
        starts = np.flatnonzero(np.append(True, change))
        keep = np.unique(np.concatenate((starts, np.flatnonzero(closing))))
        tid, ts, state, cpu = events.tid[keep], events.ts[keep], events.state[keep], events.cpu[keep]
        rows = np.flatnonzero((tid[1:] == tid[:-1]) & (state[:-1] != OVER) & (ts[1:] > ts[:-1]))
    else:
        tid, ts, state, cpu, rows = events.tid, events.ts, events.state, events.cpu, np.empty(0, np.int64)
    end = clipped(ts[rows], ts[rows + 1], gaps)
    rows, end = rows[end > ts[rows]], end[end > ts[rows]]
    return conform(
        "thread_states",
        {
            "tid": tid[rows],
            "pid": known.process(tid[rows]),
            "state": STATES[state[rows]],
            "cpu": cpu[rows],
            "begin_ns": ts[rows],
            "end_ns": end,
            "duration_ns": end - ts[rows],
        },
    )


def threads(source: Source, known: Target) -> pd.DataFrame:
    """The table `threads`: the target's, and everyone who took a CPU from them or woke them."""
    switch, waking = source.rows("sched_switch"), source.rows("sched_waking")
    of_next = switch["comm_of_next"] > 0
    named = np.concatenate((np.where(of_next, switch["next_tid"], switch["prev_tid"]), waking["woken_tid"]))
    comm = np.concatenate((texts(switch["comm"]), texts(waking["comm"])))
    ts = np.concatenate((switch["ts"], waking["ts"]))
    order = np.argsort(ts, kind="stable")[::-1]
    who, newest = np.unique(named[order], return_index=True)
    names = dict(zip(who.tolist(), comm[order][newest].tolist(), strict=True))
    names |= {tid: name for tid, _, name in listed_threads(source) if name}
    names.setdefault(0, "swapper")
    own = switch["tid"] == switch["prev_tid"]
    seen = (known.tid, switch["prev_tid"], switch["next_tid"], waking["tid"], waking["woken_tid"])
    tid = distinct(np.concatenate(seen))
    told = np.concatenate((switch["tid"][own], waking["tid"]))
    who, first = first_rows(told)
    process = dict(zip(who.tolist(), np.concatenate((switch["pid"][own], waking["pid"]))[first].tolist(), strict=True))
    pid, mine = known.process(tid), known.has(tid) & (tid > 0)
    others = np.array([process.get(t, NONE) for t in tid.tolist()], np.int64)
    label = np.array([*(names.get(t, "") for t in tid.tolist()), ""], object)[:-1]
    return conform("threads", {"tid": tid, "pid": np.where(pid >= 0, pid, others), "name": label, "target": mine})


def events(source: Source) -> pd.DataFrame:
    """The table `sched`: switches, wakings and wake-ups in order of time."""
    switch, waking, wakeup = (source.rows(f"sched_{kind}") for kind in ("switch", "waking", "wakeup"))
    kinds = (switch, waking, wakeup)
    ts = np.concatenate([rows["ts"] for rows in kinds])
    order = np.argsort(ts, kind="stable")
    none = [np.full(len(rows), NONE, np.int64) for rows in kinds]
    columns = {
        "cpu": [rows["cpu"] for rows in kinds],
        "event": [np.full(len(rows), name, object) for rows, name in zip(kinds, ("switch", "waking", "wakeup"), strict=True)],
        "prev_tid": (switch["prev_tid"], waking["tid"], wakeup["tid"]),
        "prev_state": (switch["prev_state"], *none[1:]),
        "prev_prio": (switch["prev_prio"], *none[1:]),
        "next_tid": (switch["next_tid"], waking["woken_tid"], wakeup["woken_tid"]),
        "next_prio": (switch["next_prio"], waking["prio"], wakeup["prio"]),
        "target_cpu": (none[0], waking["target_cpu"], wakeup["target_cpu"]),
    }
    merged = {name: np.concatenate(both)[order] for name, both in columns.items()}
    return conform("sched", {"ts_ns": ts[order], **merged})


def build(source: Source) -> dict[str, pd.DataFrame]:
    """The tables `thread_states`, `threads` and `sched`."""
    known = target(source)
    changes = moments(source.rows("sched_switch"), source.rows("sched_waking"), source.rows("task_fork"), known)
    return {
        "thread_states": thread_states(known, changes, gaps_of(source, "sched")),
        "threads": threads(source, known),
        "sched": events(source),
    }
