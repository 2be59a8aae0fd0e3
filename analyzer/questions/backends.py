"""Comparison of CPU and accelerators: operators of equal type, role in the model and shape that ran on both."""

import re

import numpy as np
import pandas as pd

from analyzer.questions.parts import BESIDE, submitted_only
from analyzer.records.schema import Tables, conform

CPU = "cpu"
SAME = ["type", "role", "shape"]
LAYER = re.compile(r"-\d+(?=$|[ #])|(?<=blk\.)\d+|(?<=_l)\d+(?=$| )")


def tensor_role(name: str) -> str:
    """A tensor's name without its layer number: ffn_out for ffn_out-3."""
    return LAYER.sub("", name)


def timed_operators(tables: Tables) -> pd.DataFrame:
    """Every operator with a known time: type, role, shape, backend, us. Submitted operators have one only from a profile."""
    operators, measured = tables["operators"], tables["npu_operators"]
    graphs = tables["graphs"].set_index("graph_id")[["backend", "kind"]].reindex(operators["graph_id"])
    known = operators["complete"].to_numpy() & ~submitted_only(tables) & ~graphs["kind"].isin(BESIDE).to_numpy()
    host = operators.assign(backend=graphs["backend"].to_numpy(), us=operators["duration_ns"] / 1e3)[known]
    npu = measured[measured["us"] >= 0].assign(backend="hexagon")
    columns = ["type", "name", "shape", "backend", "us"]
    rows = pd.concat([frame[columns] for frame in (host, npu) if len(frame)] or [host[columns]], ignore_index=True)
    codes, names = pd.factorize(rows["name"])
    return rows.assign(role=np.array([*map(tensor_role, names), ""], object)[codes])


def compare_backends(*recordings: Tables) -> pd.DataFrame:
    """The table `backends`: each kind of operator that ran on the CPU and elsewhere, with both medians, costliest first."""
    rows = pd.concat([timed_operators(tables) for tables in recordings], ignore_index=True)
    rows = rows[(rows["shape"] != "") & (rows["backend"] != "")]
    by_backend = rows.groupby([*SAME, "backend"], observed=True)["us"]
    times = by_backend.agg(runs="size", median_us="median", total_us="sum").reset_index()
    of_cpu = times["backend"] == CPU
    both = times[~of_cpu].merge(times[of_cpu].drop(columns="backend"), on=SAME, suffixes=("", "_cpu"))
    both = both.rename(columns={"runs_cpu": "cpu_runs", "median_us_cpu": "cpu_median_us"})
    both["times_cpu"] = both["median_us"] / both["cpu_median_us"].where(both["cpu_median_us"] > 0)
    return conform("backends", both.sort_values(["total_us", *SAME], ascending=[False, True, True, True], ignore_index=True))
