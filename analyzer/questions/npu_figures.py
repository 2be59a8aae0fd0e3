"""NPU figures per graph, expert and node; first executions, context loads, stages and idle time are separate."""

import re
from typing import Any

import numpy as np
import pandas as pd

from analyzer.imports.opmap import SourceOperators
from analyzer.records.schema import Tables
from analyzer.tables.qnn.busy import overlap_ms
from analyzer.tables.qnn.checks import all_checks
from analyzer.tables.qnn.enums import LEVELS, NODE, RESOURCES
from analyzer.tables.qnn.queue import own_ns, queue_figures

Row = dict[str, Any]
OpMap = dict[str, SourceOperators]
OP_ID = re.compile(r"(.*?)[: ]OpId_(\d+)( \(.*\))?")
NUMBERED = re.compile(r"(.*?)[_./]?\d+")
RESOURCE_MASK = 5004


def node_names(names: pd.Series) -> pd.DataFrame:
    """QNN's identifiers, `name:OpId_12 (cycles)`, as columns `node` (the model's name) and `op_id` (-1 for none)."""
    matches = [OP_ID.fullmatch(name) for name in names]
    nodes = [match[1] if match else name.removesuffix(" (cycles)") for match, name in zip(matches, names, strict=True)]
    return pd.DataFrame({"node": nodes, "op_id": [int(match[2]) if match else -1 for match in matches]}, index=names.index)


def node_type(name: str, op_map: OpMap) -> str:
    """A node's operator type from the op map; without one, its name without the trailing number."""
    if name in op_map:
        return op_map[name].type
    match = NUMBERED.fullmatch(name)
    return match[1] if match and match[1] else name


def graph_labels(executes: pd.DataFrame) -> pd.Series:
    """A label for each execution's graph: kind and tier if the engine records them, else QNN's name and the object's number.

    If executions have several profile levels, the label includes the level: their times are not comparable.
    """
    tier = np.where(executes["tier"] > 0, " T" + executes["tier"].astype(str), "")
    number = np.where(executes["object_id"] >= 0, " #" + executes["object_id"].astype(str), "")
    named = executes["graph_name"] + number
    level = " " + level_names(executes) if executes["profile_level"].nunique() > 1 else ""
    return pd.Series(np.where(executes["kind"] != "", executes["kind"] + tier, named), executes.index) + level


def level_names(executes: pd.DataFrame) -> pd.Series:
    """The name of each execution's profile level in QNN."""
    return executes["profile_level"].map(lambda level: LEVELS.get(level, str(level)))


def known_sum(values: pd.Series) -> float | None:
    """The sum of the known values; None without any."""
    numbers = values.dropna()
    return float(numbers.sum()) if len(numbers) else None


def group_figures(rows: pd.DataFrame) -> Row:
    """Figures of some executions, without the time behind others (`own_ns`); medians exclude first ones if there are others."""
    warm = rows[~rows["first"]] if (~rows["first"]).any() else rows
    first = rows[rows["first"]]
    host, accel = rows["own_ns"].sum() / 1e3, known_sum(rows["accel_us"])
    timed = rows[rows["accel_us"].notna()]
    beside = (timed["own_ns"] / 1e3 - timed["accel_us"]).sum()
    return {
        "executes": len(rows),
        "host_us": float(host),
        "median_us": float(warm["own_ns"].median() / 1e3),
        "first_us": float(first["own_ns"].mean() / 1e3) if len(first) else None,
        "accel_us": accel,
        "cycles": known_sum(rows["accel_cycles"]),
        "rpc_share": float(beside / (timed["own_ns"].sum() / 1e3)) if len(timed) and timed["own_ns"].sum() else None,
    }


def figures_by(executes: pd.DataFrame, by: list[str], count: int | None = None) -> list[Row]:
    """`group_figures` for each combination of the columns `by`, costliest first."""
    rows = [dict(zip(by, key, strict=True)) | group_figures(part) for key, part in executes.groupby(by, sort=False)]
    return sorted(rows, key=lambda row: -row["host_us"])[:count]


def node_cycles(tables: Tables, op_map: OpMap) -> pd.DataFrame:
    """Cycles per graph and node: columns graph, node, type, source, op_id, runs, cycles, share (of all nodes'), resources."""
    events = tables["qnn_events"]
    node_events = events[(events["type"] == NODE) & (events["unit"] == "cycles") & (events["execute_id"] >= 0)]
    label = graph_labels(tables["qnn_executes"]).set_axis(tables["qnn_executes"]["execute_id"])
    frame = pd.concat([node_events, node_names(node_events["name"])], axis=1).assign(graph=node_events["execute_id"].map(label))
    frame["cycles"] = frame["value"].astype(np.float64)
    units = units_by_node(events)
    frame["resources"] = [units.get(event, "") for event in frame["event_id"]]
    totals = frame.groupby(["graph", "node", "op_id", "resources"], as_index=False)["cycles"].agg(runs="size", cycles="sum")
    totals["type"] = [node_type(name, op_map) for name in totals["node"]]
    totals["source"] = [" ".join(op_map[name].sources) if name in op_map else "" for name in totals["node"]]
    totals["share"] = totals["cycles"] / max(float(totals["cycles"].sum()), 1.0)
    return totals.sort_values("cycles", ascending=False, kind="stable", ignore_index=True)


def units_by_node(events: pd.DataFrame) -> dict[int, str]:
    """event_id of a node → the units that it used, if its sub-events name them (linting)."""
    mask_events = events[(events["type"] == RESOURCE_MASK) & (events["parent_id"] >= 0)]
    units = [" ".join(name for bit, name in RESOURCES.items() if int(value) & bit) for value in mask_events["value"]]
    return dict(zip(mask_events["parent_id"], units, strict=True))


def context_creation(tables: Tables) -> Row:
    """How contexts were created: from binaries, with bytes and time, or composed and finalized."""
    calls = tables["qnn_calls"]
    loads = calls[calls["call"].str.startswith("contextCreateFromBinary")]
    finalizes = calls[calls["call"] == "graphFinalize"]
    written = calls[calls["call"] == "contextGetBinary"]
    return {
        "loads": len(loads),
        "load_ms": float(loads["duration_ns"].sum()) / 1e6,
        "load_bytes": int(loads["bytes"].sum()),
        "finalizes": len(finalizes),
        "finalize_ms": float(finalizes["duration_ns"].sum()) / 1e6,
        "written_bytes": int(written["bytes"].sum()),
    }


def idle_times(tables: Tables) -> Row:
    """The NPU's idle time between executions, and the activity of the thread that ended it, in ms."""
    gaps = tables["qnn_gaps"]
    names = ("running", "runnable", "sleeping", "waiting")
    by = gaps.groupby("doing")["duration_ns"].sum().sort_values(ascending=False)
    return {
        "gaps": len(gaps),
        "ms": float(gaps["duration_ns"].sum()) / 1e6,
        "longest_ms": float(gaps["duration_ns"].max()) / 1e6 if len(gaps) else None,
        **{f"{name}_ms": float(gaps[f"{name}_ns"].sum()) / 1e6 for name in names},
        "doing_ms": {str(name) or "outside operators": float(ns) / 1e6 for name, ns in by.head(6).items()},
    }


def check_residuals(tables: Tables) -> list[Row]:
    """Each consistency check: the number of cases, the number of violations, and the residual."""
    rows = []
    for check in all_checks(tables["qnn_executes"], tables["qnn_events"]):
        comparable = ~np.isnan(check.found) & ~np.isnan(check.expected)
        if comparable.any():
            residual = float((check.expected - check.found)[comparable].sum())
            counts = {"looked_at": int(comparable.sum()), "broken": int(check.broken.sum())}
            rows.append({"check": check.name, "unit": check.unit, **counts, "residual": residual})
    return rows


def genie_figures(events: pd.DataFrame) -> list[Row]:
    """Genie's own figures of its calls, by component and type: medians over the calls that have them, sums of tokens."""
    medians = ("ttft_us", "prompt_tokens_s", "generated_tokens_s")
    return [
        {
            "component": component,
            "type": kind,
            "calls": len(rows),
            **{name: known_sum(rows[name]) for name in ("prompt_tokens", "generated_tokens")},
            **{name: float(rows[name].median()) if rows[name].notna().any() else None for name in medians},
        }
        for (component, kind), rows in events.groupby(["component", "type"], observed=True, sort=False)
    ]


def stage_figures(rows: pd.DataFrame) -> Row:
    """How often a host stage ran, how long those took whose end is known, and how many have none: an exception left them."""
    ended = rows[rows["complete"]]
    return {"count": len(rows), "ms": float(ended["duration_ns"].sum()) / 1e6, "unended": len(rows) - len(ended)}


def npu_statistics(tables: Tables, op_map: OpMap | None = None) -> Row:
    """All figures, JSON-able; the suffix of a key is the unit of its time."""
    executes, events, stages = tables["qnn_executes"], tables["qnn_events"], tables["qnn_stages"]
    done = executes[executes["complete"]].assign(graph=graph_labels(executes), own_ns=own_ns(executes))
    by_node = node_cycles(tables, op_map or {})
    by_type = by_node.groupby("type", as_index=False)[["runs", "cycles", "share"]].sum().sort_values("cycles", ascending=False)
    levels = level_names(done).value_counts()
    return {
        "executes": len(executes),
        "failed": int((executes["complete"] & (executes["status"] != 0)).sum()),
        "queue": queue_figures(executes),
        "levels": {str(name): int(count) for name, count in levels.items()},
        "graphs": figures_by(done, ["graph"]),
        "experts": figures_by(done[done["expert"] >= 0], ["layer", "expert"]),
        "nodes": by_node.to_dict("records"),
        "types": by_type.to_dict("records"),
        "contexts": context_creation(tables),
        "stages": {str(name): stage_figures(rows) for name, rows in stages.groupby("stage")},
        "genie": genie_figures(tables["genie_events"]),
        "idle": idle_times(tables),
        "overlap": overlap_ms(tables),
        "closure": check_residuals(tables),
        "findings": tables["qnn_findings"]["text"].tolist(),
        "events": len(events),
        "unjoined_events": int(((events["execute_id"] < 0) & (events["call_id"] < 0)).sum()),
    }
