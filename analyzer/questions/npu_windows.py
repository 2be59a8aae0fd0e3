"""Runs of graphs on the NPU, split into host, accelerator and residual, and the NPU's idle time within steps."""

import pandas as pd

from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, merge_intervals, split_intervals
from analyzer.records.schema import Tables

WINDOW = ("window", "before", "accelerator", "residual", "after")


def npu_windows(tables: Tables) -> pd.DataFrame:
    """Every run of a graph on the NPU, in ns: `before` and `after` the execution on the host, `accelerator`, and the `residual`.

    The residual is the execution's time outside the accelerator according to the backend: RPC and queueing. An execution
    without profile events has no `accelerator` (NaN) and no `residual`.
    """
    graphs = tables["graphs"][["graph_id", "begin_ns", "end_ns"]]
    runs = tables["qnn_executes"].merge(graphs, on="graph_id", suffixes=("", "_outer"))
    runs["window_ns"] = runs["end_ns_outer"] - runs["begin_ns_outer"]
    runs["before_ns"] = runs["begin_ns"] - runs["begin_ns_outer"]
    runs["accelerator_ns"] = runs["accel_us"] * 1e3
    runs["residual_ns"] = runs["duration_ns"] - runs["accelerator_ns"]
    runs["after_ns"] = runs["end_ns_outer"] - runs["end_ns"]
    return runs[["graph_id", "execute_id", "token_id", *(f"{name}_ns" for name in WINDOW)]]


def npu_sum(tables: Tables) -> dict[str, float]:
    """Sums of `npu_windows`: `total_ms` = before + accelerator + after + residual; `residual_share` is relative to it.

    `unprofiled` counts windows whose executions have no profile events; they are excluded. Empty if no graph ran on the NPU.
    """
    windows = npu_windows(tables)
    profiled = windows.dropna(subset=["accelerator_ns"])
    if len(windows) == 0:
        return {}
    parts = {f"{name}_ms": float(profiled[f"{name}_ns"].sum()) / 1e6 for name in ("before", "accelerator", "after", "residual")}
    total, unprofiled = float(profiled["window_ns"].sum()) / 1e6, len(windows) - len(profiled)
    share = parts["residual_ms"] / total if total else 0.0
    return {
        "windows": len(profiled),
        "unprofiled": unprofiled,
        "total_ms": total,
        **parts,
        "residual_share": share,
    }


def npu_gaps(tables: Tables) -> pd.DataFrame:
    """The rows of `time` of steps that use the NPU, cut to the times in which no execution was on it."""
    executes = tables["qnn_executes"]
    busy = Intervals.of_table(executes[executes["token_id"] >= 0], "token_id")
    time = step_time(tables)
    rows = time[time["token_id"].isin(busy.key)]
    parts = split_intervals(Intervals.of_table(rows, "token_id"), merge_intervals(busy))
    cut = rows.iloc[parts.left].assign(begin_ns=parts.begin, end_ns=parts.end, duration_ns=parts.length)
    return cut[parts.right < 0].reset_index(drop=True)
