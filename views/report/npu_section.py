"""The report's section on the NPU: executions by graph, what QNN tells of them, and what npu_blocks adds."""

import numpy as np
import pandas as pd

from views.report import npu_blocks
from views.report.sections import MS, US, Block, Run, Section, axis, chart, finished, heads, labels, note, table

NODE = 404
EMULATED = "Measured on Qualcomm's emulator: results are exact; times and cycles are the host's and say nothing about a device."
GRAPHS_QUERY = (
    "select kind, graph_name, count(*) executions, sum(duration_ns)/1e6 ms, avg(host_rpc_us) host_rpc_us, "
    "avg(htp_rpc_us) htp_rpc_us, avg(accel_us) accel_us, avg(accel_cycles) cycles "
    "from qnn_executes where complete group by all order by ms desc"
)
NODES_QUERY = (
    "select x.graph_name, e.name, count(*) runs, sum(e.value) cycles from qnn_events e join qnn_executes x using (execute_id) "
    "where e.type = 404 and e.unit = 'cycles' group by all order by cycles desc"
)
CALLS_QUERY = (
    "select call, name, count(*) calls, max(bytes) bytes, sum(duration_ns)/1e6 ms from qnn_calls group by all order by ms desc"
)

PROVIDER = "QNNExecutionProvider_"
"""What ONNX Runtime puts before the name of every graph, twice."""


def graph_labels(executes: pd.DataFrame) -> pd.Series:
    """The subgraph kind, where the engine tells one, before QNN's own name of the graph, as far as that tells graphs apart."""
    kind, name = executes["kind"], executes["graph_name"].str.replace(PROVIDER, "")
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
    blocks = [table(columns, body, "By graph (means per execution)", GRAPHS_QUERY)]
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
    return chart("An execution's time", traces, "", 120 + 28 * len(rows), GRAPHS_QUERY, barmode="stack", **axes)


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
        blocks.append(table(columns, rows, "Cycles by node", NODES_QUERY))
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
            table(heads("text call, text graph, number calls, number MiB, bar total ms"), body, "Other calls", CALLS_QUERY)
        )
    return Section("npu", f"NPU: {backend}", blocks)
