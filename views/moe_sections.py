"""The report's sections on experts, their cache, and the NPU."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer import experts as activation
from views import npu_blocks
from views.page import typed
from views.sections import (
    MS,
    US,
    Block,
    Run,
    Section,
    Tables,
    axis,
    binned,
    bytes_text,
    chart,
    finished,
    heads,
    label,
    labels,
    note,
    pairs,
    per_bin,
    table,
)

MAX_COLUMNS = 300
NODE = 404
EMULATED = "Measured on Qualcomm's emulator: results are exact; times and cycles are the host's and say nothing about a device."


def cells(frame: pd.DataFrame, layer: int, column: dict[int, int], shape: tuple[int, int], values: str) -> np.ndarray:
    """Sums by expert and column of one layer."""
    mine = frame[frame["layer"] == layer]
    flat = mine["expert"].to_numpy() * shape[1] + np.array([column[token] for token in mine["token_id"].tolist()], np.int64)
    weights = mine[values].to_numpy(np.float64)
    return np.bincount(flat, weights, shape[0] * shape[1]).reshape(shape)


def heat(tables: Tables) -> Block | None:
    """Rows routed and cache misses, iteration by expert, one matrix per layer."""
    rows = activation.activations(tables)
    rows = rows[(rows["expert"] >= 0) & (rows["layer"] >= 0)]
    if not len(rows):
        return None
    ids = np.sort(rows["token_id"].unique())
    width = -(-len(ids) // MAX_COLUMNS)
    column = {int(token): i // width for i, token in enumerate(ids)}
    shape = (int(rows["expert"].max()) + 1, (len(ids) - 1) // width + 1)
    runs = tables["experts"]
    missed = runs[(runs["cache"] == "miss") & runs["token_id"].isin(ids) & (runs["expert"] < shape[0]) & (runs["expert"] >= 0)]
    missed = missed.drop_duplicates(["token_id", "layer", "expert"]).assign(misses=1)
    layers = sorted(rows["layer"].unique().tolist())
    matrices = []
    for layer in layers:
        views = {"rows routed": cells(rows, layer, column, shape, "n_tokens")}
        if len(missed):
            views["cache misses"] = cells(missed, layer, column, shape, "misses")
        matrices.append({name: typed(np.minimum(z, 65535).astype(np.uint16)) for name, z in views.items()})
    return {
        "kind": "heat",
        "title": "Which expert ran when",
        "layers": layers,
        "matrices": matrices,
        "steps_per_column": width,
        "steps": len(ids),
    }


def hits(tables: Tables) -> list[Block]:
    """Hit rate over steps, and per layer."""
    rates = activation.hit_rate(tables)
    if not len(rates):
        return []
    by_step = rates.groupby("token_id")[["hits", "misses"]].sum()
    summed = by_step.groupby(binned(len(by_step))).sum()
    step = summed["hits"] / summed.sum(axis=1) * 100
    by_layer = rates.groupby("layer")[["hits", "misses"]].sum()
    layer = by_layer["hits"] / by_layer.sum(axis=1) * 100
    over = {
        "type": "scatter",
        "mode": "lines",
        "x": by_step.index.to_numpy()[:: -(-len(by_step) // len(step))],
        "y": step.round(2).to_numpy(),
        "slot": 0,
    }
    each = {"type": "bar", "x": layer.index.to_numpy(), "y": layer.round(2).to_numpy(), "slot": 1}
    percent = axis("hit rate %", range=[0, 103])
    return [
        chart(
            "Cache hits over steps", [over], per_bin(len(by_step)), 240, xaxis=axis("token id"), yaxis=percent, showlegend=False
        ),
        chart("Cache hits by layer", [each], "", 240, xaxis=axis("layer", type="category"), yaxis=percent, showlegend=False),
    ]


def experts(run: Run) -> Section | None:
    """Which experts ran, and whether they were there."""
    map_of = heat(run.tables)
    runs = finished(run.tables["experts"])
    blocks: list[Block] = [map_of] if map_of else []
    if len(runs):
        grouped = runs.groupby(["backend", "cache"])["duration_ns"].agg(["size", "sum", "mean"]).reset_index()
        rows = [[b or "unknown", c or "unknown", int(n), s / MS, m / US] for b, c, n, s, m in grouped.itertuples(index=False)]
        columns = heads("text backend, text cache, number runs, bar total ms, number mean µs")
        blocks.append(table(columns, rows, "Expert runs"))
    blocks += hits(run.tables)
    return Section("experts", "Experts", blocks) if blocks else None


def counters(frame: pd.DataFrame) -> list[Block]:
    """Every counter over time."""
    blocks: list[Block] = []
    origin = frame["ts_ns"].min()
    for name, rows in frame.groupby("name"):
        rows = rows.sort_values("ts_ns")
        bins = binned(len(rows))
        x, y = ((rows[c].groupby(bins).last()).to_numpy() for c in ("ts_ns", "value"))
        mebibytes = str(name).endswith("bytes")
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "x": np.round((x - origin) / 1e9, 6),
            "y": y / 2**20 if mebibytes else y,
            "slot": len(blocks),
        }
        trace["line"] = {"shape": "hv"}
        title = label(str(name).capitalize())
        blocks.append(
            chart(
                title,
                [trace],
                "",
                220,
                xaxis=axis("s"),
                yaxis=axis("MiB" if mebibytes else "", rangemode="tozero"),
                showlegend=False,
            )
        )
    return blocks


def cache(run: Run) -> Section | None:
    """Loads, evictions and the counters."""
    blocks: list[Block] = []
    loads = run.tables["loads"]
    loaded = finished(loads[loads["action"] == "load"])
    if len(loaded):
        rows = []
        for (reason, backend), part in loaded.groupby(["reason", "backend"]):
            seconds, size = part["duration_ns"].sum() / 1e9, float(part["bytes"].clip(lower=0).sum())
            speed = size / seconds / 1e9 if seconds else None
            rows.append(
                [
                    reason,
                    backend,
                    len(part),
                    size / 2**20,
                    seconds * 1e3,
                    part["duration_ns"].mean() / MS,
                    part["duration_ns"].max() / MS,
                    speed,
                ]
            )
        columns = heads(
            "text reason, text backend, number loads, number MiB, bar total ms, number mean ms, number max ms, number GB/s"
        )
        blocks.append(table(columns, rows, "Loads"))
    evicted = loads[loads["action"] == "evict"]
    if len(evicted):
        blocks.append(
            pairs([("evictions", f"{len(evicted):,}"), ("evicted", bytes_text(float(evicted["bytes"].clip(lower=0).sum())))])
        )
    if len(run.tables["counters"]):
        blocks += counters(run.tables["counters"])
    return Section("cache", "Cache and loads", blocks) if blocks else None


def graph_labels(executes: pd.DataFrame) -> pd.Series:
    """The subgraph kind, where the engine tells one, before QNN's own name of the graph."""
    kind, name = executes["kind"], executes["graph_name"]
    return kind.where(kind == "", kind + " · ") + name


def by_graph(executes: pd.DataFrame) -> list[Block]:
    """Executions by graph: where the call's time goes, as far as QNN tells."""
    grouped = executes.assign(graph=graph_labels(executes)).groupby("graph")
    rows = grouped.agg(
        n=("execute_id", "size"),
        ns=("duration_ns", "sum"),
        mean=("duration_ns", "mean"),
        rpc=("host_rpc_us", "mean"),
        htp=("htp_rpc_us", "mean"),
        accel=("accel_us", "mean"),
        cycles=("accel_cycles", "mean"),
    ).reset_index()
    rows = rows.sort_values("ns", ascending=False)
    body = rows.assign(ns=rows["ns"] / MS, mean=rows["mean"] / US)
    columns = heads(
        "text graph, number executions, bar total ms, number mean µs, number host RPC µs, number HTP RPC µs, "
        "number accelerator µs, number accelerator cycles"
    )
    blocks = [table(columns, body, "By graph (means per execution)")]
    told = rows[rows["accel"].notna()].head(16).iloc[::-1]
    return [*blocks, execution_chart(told)] if len(told) else blocks


def execution_chart(rows: pd.DataFrame) -> Block:
    """A mean execution's time: accelerator, then what each level adds around it."""
    y = labels([name or "unnamed" for name in rows["graph"]], 36)
    host, htp = rows["rpc"].fillna(rows["accel"]), rows["htp"].fillna(rows["accel"])
    parts = (
        ("accelerator", rows["accel"], 0),
        ("HTP RPC beyond it", htp - rows["accel"], 1),
        ("host RPC beyond it", host - htp, 2),
        ("call beyond RPC", rows["mean"] / US - host, 7),
    )
    bar = {"type": "bar", "orientation": "h", "y": y}
    traces = [{**bar, "name": name, "x": values.clip(lower=0).round(3), "slot": slot} for name, values, slot in parts]
    axes = {"xaxis": axis("µs per execution"), "yaxis": {"automargin": True}}
    return chart("An execution's time", traces, "", 120 + 28 * len(rows), barmode="stack", **axes)


def npu(run: Run) -> Section | None:
    """QNN on the NPU, or on its emulator."""
    executes, events, calls = (run.tables[name] for name in ("qnn_executes", "qnn_events", "qnn_calls"))
    if not len(executes) and not len(calls):
        return None
    backend = (run.summary.get("machine") or {}).get("npu") or "NPU"
    blocks: list[Block] = []
    if (run.manifest.get("qnn") or {}).get("emulator"):
        blocks.append(note(EMULATED))
    if len(executes):
        blocks += by_graph(finished(executes))
        blocks += npu_blocks.blocks(run.tables)
    nodes = events[(events["type"] == NODE) & (events["unit"] == "cycles") & (events["execute_id"] >= 0)]
    if len(nodes):
        graph = nodes["execute_id"].map(graph_labels(executes).set_axis(executes["execute_id"])).fillna("")
        grouped = nodes.assign(graph=graph, cycles=nodes["value"].astype(np.float64)).groupby(["graph", "name"])["cycles"]
        rows = grouped.agg(["size", "sum", "mean"]).reset_index().sort_values("sum", ascending=False)
        rows["share"] = 100 * rows["sum"] / max(float(rows["sum"].sum()), 1.0)
        columns = heads("text graph, text node, number runs, bar total cycles, number mean cycles, number share %")
        blocks.append(table(columns, rows, "Cycles by node"))
    if len(calls):
        grouped = finished(calls).groupby(["call", "name"])
        rows = (
            grouped.agg(n=("call_id", "size"), size=("bytes", "max"), ns=("duration_ns", "sum"))
            .reset_index()
            .sort_values("ns", ascending=False)
        )
        body = [
            [c, name, n, size / 2**20 if size > 0 else None, ns / MS] for c, name, n, size, ns in rows.itertuples(index=False)
        ]
        blocks.append(
            table(
                heads("text call, text graph, number calls, number MiB, bar total ms"),
                body,
                "Other calls",
            )
        )
    return Section("npu", f"NPU: {backend}", blocks)
