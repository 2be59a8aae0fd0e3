"""Asynchronous executions: which were rejected, how many were in flight at once, how long each was behind earlier ones."""

from typing import Any

import numpy as np
import pandas as pd


def is_rejected(executes: pd.DataFrame) -> pd.Series:
    """Whether an asynchronous call returned an error: nothing was submitted, and nobody is notified of an end."""
    return executes["asynchronous"] & executes["complete"] & (executes["returned_ns"] < 0)


def queue_times(executes: pd.DataFrame) -> pd.DataFrame:
    """For each execution: `depth`, in flight in its process when it was submitted, itself included (0: not asynchronous), and
    `behind_ns`, how long one submitted before it had not ended. Durations less `behind_ns` add up to the time in which any ran.
    """
    answer = pd.DataFrame({"depth": 0, "behind_ns": 0}, executes.index)
    for _, rows in executes[executes["complete"] & ~is_rejected(executes)].groupby("pid"):
        rows = rows.sort_values("begin_ns", kind="stable")
        begin, end = rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy()
        before = np.append(begin[:1], np.maximum.accumulate(end)[:-1])
        depth = np.arange(1, len(rows) + 1) - np.searchsorted(np.sort(end), begin, "right")
        late = rows["asynchronous"].to_numpy()
        answer.loc[rows.index[late], "depth"] = depth[late]
        answer.loc[rows.index[late], "behind_ns"] = np.clip(np.minimum(before, end) - begin, 0, None)[late]
    return answer


def own_ns(executes: pd.DataFrame) -> pd.Series:
    """The duration of each execution without the time behind others; 0 of a rejected call."""
    return (executes["duration_ns"] - queue_times(executes)["behind_ns"]).where(~is_rejected(executes), 0)


def queue_figures(executes: pd.DataFrame) -> dict[str, Any]:
    """Figures of the asynchronous executions; {} without any."""
    late = executes[executes["asynchronous"]]
    if not len(late):
        return {}
    times = queue_times(executes).loc[late.index]
    submitted = late["complete"] & ~is_rejected(late)
    behind, depth = times.loc[submitted, "behind_ns"], times.loc[submitted, "depth"]
    return {
        "executes": int(submitted.sum()),
        "rejected": int(is_rejected(late).sum()),
        "most_in_flight": int(depth.max()) if len(depth) else 0,
        "mean_in_flight": float(depth.mean()) if len(depth) else None,
        "behind_ms": float(behind.sum()) / 1e6,
        "median_behind_ms": float(behind.median()) / 1e6 if len(behind) else None,
        "own_ms": float((late["duration_ns"] - times["behind_ns"])[submitted].sum()) / 1e6,
    }
