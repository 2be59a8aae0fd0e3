"""NPU and CPU activity: idle times of the NPU with the CPU's activity in them, and the time in which both worked.

The NPU counts as busy from a graphExecute to its return (or its completion notice), as the host sees it; not in rejected
asynchronous calls. The CPU counts as
busy while a thread of the program runs that is not inside an execution and does not belong to the emulator.
"""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.intervals import Intervals, common_time, covered_ns, merge_intervals, uncovered_parts
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, latest
from analyzer.tables.qnn.queue import is_rejected

EMULATOR_THREADS = r"thr_h[vml]x_"
STATES = ("running", "runnable", "sleeping", "waiting")


def union_of_all(spans: Intervals) -> Intervals:
    """The union of all intervals, regardless of key."""
    return merge_intervals(Intervals.of(spans.begin, spans.end))


def accepted(tables: Tables) -> pd.DataFrame:
    """The executions that were not rejected."""
    return tables["qnn_executes"][~is_rejected(tables["qnn_executes"])]


def gap_table(tables: Tables) -> pd.DataFrame:
    """The table `qnn_gaps`: each time without an execution between two executions of a process."""
    executes = accepted(tables)
    rows = tables["thread_states"]
    states = dict.fromkeys(STATES, rows[:0]) | dict(iter(rows.groupby("state")))
    parts = [gaps_of(runs, states, tables["operators"]) for _, runs in executes.groupby("pid")]
    if not parts:
        return pd.DataFrame()
    frame = pd.concat(parts, ignore_index=True).sort_values("begin_ns", kind="stable", ignore_index=True)
    return frame.assign(gap_id=np.arange(len(frame)))


def gaps_of(runs: pd.DataFrame, states: dict[str, pd.DataFrame], operators: pd.DataFrame) -> pd.DataFrame:
    """The gaps of one process with the states of the thread that submitted the next execution; `states` are grouped by state."""
    busy = union_of_all(Intervals.of_table(runs))
    begin, end = busy.end[:-1], busy.begin[1:]
    starts = runs.sort_values("begin_ns", kind="stable")
    after = starts.iloc[np.searchsorted(starts["begin_ns"].to_numpy(), end)]
    frame = pd.DataFrame({"begin_ns": begin, "end_ns": end, "duration_ns": end - begin, "pid": after["pid"].to_numpy()})
    frame["tid"], frame["execute_id"] = after["tid"].to_numpy(), after["execute_id"].to_numpy()
    for state in STATES:
        frame[f"{state}_ns"] = covered_ns(Intervals.of_table(states[state]), Intervals.of_table(frame))
    running = states["running"][states["running"]["pid"] == int(runs["pid"].iloc[0])]
    on_cpu = Intervals.of(running["begin_ns"].to_numpy(), running["end_ns"].to_numpy())
    frame["cpu_ns"] = covered_ns(on_cpu, Intervals.of(begin, end))
    frame["doing"] = operator_in_gap(frame, operators)
    return frame


def operator_in_gap(frame: pd.DataFrame, operators: pd.DataFrame) -> np.ndarray:
    """The submitting thread's operator at the middle of each gap; "" for none."""
    ordered = operators.sort_values("begin_ns", kind="stable")
    middle = ((frame["begin_ns"] + frame["end_ns"]) // 2).to_numpy()
    row = latest(ordered["tid"].to_numpy(), ordered["begin_ns"].to_numpy(), frame["tid"].to_numpy(), middle)
    inside = (row >= 0) & (np.append(ordered["end_ns"].to_numpy(), NONE)[row] >= middle)
    return np.where(inside, np.append(ordered["type"].to_numpy(object), "")[row], "")


def cpu_busy(tables: Tables, pid: int) -> Intervals:
    """The times in which the program's own work ran on a CPU."""
    states, names = tables["thread_states"], tables["threads"]
    emulator = names[names["name"].str.match(EMULATOR_THREADS)]["tid"]
    running = ((states["state"] == "running") & (states["pid"] == pid)).to_numpy()
    program = states[running & ~states["tid"].isin(emulator).to_numpy()]
    executes = accepted(tables)
    return union_of_all(
        uncovered_parts(merge_intervals(Intervals.of_table(program)), Intervals.of_table(executes[~executes["asynchronous"]]))
    )


def overlap_ms(tables: Tables) -> dict[str, Any]:
    """For the process with the most executions, from its first to its last: ms in which both, one or none worked."""
    executes = accepted(tables)
    if not len(executes) or not len(tables["thread_states"]):
        return {}
    pid = int(executes["pid"].value_counts().index[0])
    npu = union_of_all(Intervals.of_table(executes[executes["pid"] == pid]))
    if not len(npu):
        return {}
    first, last = int(npu.begin[0]), int(npu.end[-1])
    cpu = common_time(cpu_busy(tables, pid), Intervals.of(npu.begin[:1], npu.end[-1:]))
    both_ns, window_ns = int(common_time(npu, cpu).length.sum()), last - first
    busy_ns = {"both": both_ns, "npu_only": int(npu.length.sum()) - both_ns, "cpu_only": int(cpu.length.sum()) - both_ns}
    return {
        "window_ms": window_ns / 1e6,
        **{f"{k}_ms": v / 1e6 for k, v in busy_ns.items()},
        "none_ms": (window_ns - sum(busy_ns.values())) / 1e6,
    }
