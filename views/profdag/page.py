"""`profdag.html`: one token's operators as an interactive page; layout.py places, static/profdag.js draws and moves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd

from analyzer.questions.critical_path import critical_path
from analyzer.records.spans import Nest
from views.profdag.layout import document, drawn, lay_out
from views.report.page import write_page

Tables = Mapping[str, pd.DataFrame]


def about_token(tables: Tables, manifest: dict[str, Any], token_id: int) -> dict[str, Any]:
    """What the heading says about the token, and where Perfetto's clock stood when it began."""
    mine = tables["tokens"][tables["tokens"]["token_id"] == token_id]
    if not len(mine):
        return {"token_id": token_id}
    row, clock = mine.iloc[0], (manifest.get("clocks") or [{}])[0]
    begin = int(row["begin_ns"]) + int(clock.get("boottime_ns", 0) - clock.get("monotonic_ns", 0))
    facts = {name: row[name] for name in ("phase", "position", "duration_ns")}
    return {"token_id": token_id, "begin_boot_ns": begin, **facts}


def cycles_of(tables: Tables, operators: pd.DataFrame) -> dict[int, float]:
    """order → cycles of the NPU in the executions that lie within each operator on its thread."""
    nest = Nest(*(operators[name].to_numpy(np.int64) for name in ("tid", "begin_ns", "end_ns")))
    runs = tables["qnn_executes"].dropna(subset=["accel_cycles"])
    row = nest.innermost(runs["tid"].to_numpy(np.int64), runs["begin_ns"].to_numpy(np.int64))
    spent = pd.Series(runs["accel_cycles"].to_numpy()[row >= 0]).groupby(row[row >= 0]).sum()
    return {int(operators["order"].iloc[int(str(at))]): float(value) for at, value in spent.items()}


def loads_of(tables: Tables, operators: pd.DataFrame, token_id: int) -> dict[int, int]:
    """order → ns of the loads of its expert within the token, shared evenly by the expert's operators."""
    loads = tables["loads"].query("action == 'load' and complete")
    spent = loads[loads["token_id"] == token_id].groupby(["layer", "expert"])["duration_ns"].sum()
    mine = operators[operators["expert"] >= 0]
    count = mine.groupby(["layer", "expert"])["order"].transform("size").clip(lower=1)
    told = spent.reindex(pd.MultiIndex.from_frame(mine[["layer", "expert"]])).fillna(0).to_numpy()
    return dict(zip(mine["order"].tolist(), (told / count.to_numpy()).astype(np.int64).tolist(), strict=True))


def add_measures(graph: nx.DiGraph, tables: Tables, token_id: int) -> None:
    """Add `cycles` (counted by the CPU where it was asked to, else by the NPU) and `load_ns` to the operators."""
    operators = tables["operators"][tables["operators"]["token_id"] == token_id].reset_index(drop=True)
    cycles, loads = cycles_of(tables, operators), loads_of(tables, operators, token_id)
    for _, values in graph.nodes(data=True):
        if values["role"] == "op":
            values.setdefault("cycles", cycles.get(values["order"]))
            values["load_ns"] = loads.get(values["order"])


def write_profdag(graph: nx.DiGraph, tables: Tables, manifest: dict[str, Any], path: Path) -> int:
    """Write the page of a graph from analyzer.profdag; returns its size in bytes."""
    token_id = int(graph.graph.get("token_id", -1))
    add_measures(graph, tables, token_id)
    chain, spent = critical_path(graph, drawn(graph))
    shown = document(graph, lay_out(graph), frozenset(chain))
    shown["critical_ns"] = spent
    shown["token"] = about_token(tables, manifest, token_id) | {"tokens_used": graph.graph.get("tokens_used", 1)}
    shown["command"] = " ".join(map(str, manifest.get("command") or []))
    shown["emulator"] = bool((manifest.get("qnn") or {}).get("emulator"))
    return write_page(path, "profdag", f"ProfDAG: {shown['command']}", shown)
