"""Runs of graphs on the NPU, split into host, accelerator and residual, and the NPU's idle time within steps."""

import numpy as np
import pandas as pd

from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, merged, overlaps, uncovered
from analyzer.records.schema import Tables


def npu_windows(tables: Tables) -> pd.DataFrame:
    """Every run of a graph on the NPU, in ns: `before` and `after` the execution on the host, `accelerator`, and the `residual`.

    The residual is the execution's time outside the accelerator according to the backend: RPC and queueing. An execution
    without profile events has no `accelerator` (NaN) and no `residual`.
    """
    executes, graphs = tables["qnn_executes"], tables["graphs"].set_index("graph_id")
    runs = executes[executes["graph_id"].isin(graphs.index)]
    outer = graphs.loc[runs["graph_id"], ["begin_ns", "end_ns", "backend"]].reset_index(drop=True)
    runs = runs.reset_index(drop=True)
    accelerator = runs["accel_us"] * 1e3
    return pd.DataFrame(
        {
            "graph_id": runs["graph_id"],
            "execute_id": runs["execute_id"],
            "token_id": runs["token_id"],
            "window_ns": outer["end_ns"] - outer["begin_ns"],
            "before_ns": runs["begin_ns"] - outer["begin_ns"],
            "accelerator_ns": accelerator,
            "residual_ns": runs["duration_ns"] - accelerator,
            "after_ns": outer["end_ns"] - runs["end_ns"],
        }
    )


def npu_sum(tables: Tables) -> dict[str, float]:
    """Sums of `npu_windows` in ms: `total` = `before` + `accelerator` + `after` + `residual`; `residual_share` is relative to it.

    `untold` counts windows whose executions have no profile events; they are excluded. Empty if no graph ran on the NPU.
    """
    windows = npu_windows(tables)
    profiled = windows.dropna(subset=["accelerator_ns"])
    if len(windows) == 0:
        return {}
    parts = {name: float(profiled[f"{name}_ns"].sum()) / 1e6 for name in ("before", "accelerator", "after", "residual")}
    total = float(profiled["window_ns"].sum()) / 1e6
    share = parts["residual"] / total if total else 0.0
    return {"windows": len(profiled), "untold": len(windows) - len(profiled), "total": total, **parts, "residual_share": share}


def npu_gaps(tables: Tables) -> pd.DataFrame:
    """The rows of `time` of steps that use the NPU, cut to the times in which no execution was on it."""
    executes = tables["qnn_executes"]
    busy = Intervals.of_table(executes[executes["token_id"] >= 0], "token_id")
    time = step_time(tables)
    rows = time[time["token_id"].isin(np.unique(busy.key))]
    idle = uncovered(Intervals.of_table(rows, "token_id"), busy)
    met = overlaps(Intervals.of_table(rows, "token_id"), merged(idle))
    cut = rows.iloc[met.left].assign(begin_ns=met.begin, end_ns=met.end, duration_ns=met.length)
    return cut.reset_index(drop=True)
