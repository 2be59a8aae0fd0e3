"""Costs of a ProfDAG's operators besides time: NPU cycles and loads of their experts."""

import networkx as nx
import numpy as np
import pandas as pd

from analyzer.records.schema import Tables
from analyzer.records.spans import innermost_span


def cycles_of(tables: Tables, operators: pd.DataFrame) -> dict[int, float]:
    """order → NPU cycles of the executions within each operator on its thread."""
    runs = tables["qnn_executes"].dropna(subset=["accel_cycles"])
    row = innermost_span(operators, runs)
    spent = pd.Series(runs["accel_cycles"].to_numpy()[row >= 0]).groupby(row[row >= 0]).sum()
    return {int(operators["order"].iloc[int(str(row_number))]): float(value) for row_number, value in spent.items()}


def loads_of(tables: Tables, operators: pd.DataFrame, token_id: int) -> dict[int, int]:
    """order → ns of the loads of its expert within the step, shared evenly by the expert's operators."""
    loads = tables["loads"].query("action == 'load' and complete")
    spent = loads[loads["token_id"] == token_id].groupby(["layer", "expert"])["duration_ns"].sum()
    of_experts = operators[operators["expert"] >= 0]
    count = of_experts.groupby(["layer", "expert"])["order"].transform("size").clip(lower=1)
    load_ns = spent.reindex(pd.MultiIndex.from_frame(of_experts[["layer", "expert"]])).fillna(0).to_numpy()
    return dict(zip(of_experts["order"].tolist(), (load_ns / count.to_numpy()).astype(np.int64).tolist(), strict=True))


def add_costs(graph: nx.DiGraph, tables: Tables, token_id: int) -> None:
    """Add `cycles` (from CPU counters if recorded, else from the NPU) and `load_ns` to the operators."""
    operators = tables["operators"][tables["operators"]["token_id"] == token_id].reset_index(drop=True)
    cycles, loads = cycles_of(tables, operators), loads_of(tables, operators, token_id)
    for _, values in graph.nodes(data=True):
        if values["role"] == "op":
            values.setdefault("cycles", cycles.get(values["order"]))
            values["load_ns"] = loads.get(values["order"])
