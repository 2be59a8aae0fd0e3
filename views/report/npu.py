"""The report's section on the NPU: executions by graph, QNN's profile of them, and the blocks of npu_blocks."""

import pandas as pd

from analyzer.tables.qnn.enums import LEVELS
from views.report import npu_blocks
from views.report.sections import Block, Run, Section, axis, chart, labels, note, table, table_of

EMULATED = "Measured on Qualcomm's emulator: results are exact; times and cycles are those of the host, not of a device."
LABEL = "if(kind = '', replace(graph_name, 'QNNExecutionProvider_', ''), kind || if(tier > 0, ' T' || tier, ''))"
"""Subgraph kind and tier, where the engine names them, else QNN's name of the graph without what ONNX Runtime puts before it."""
OF_OBJECT = "if(kind = '' and object_id >= 0, ' #' || object_id, '')"
"""Distinguishes graphs of the same name: a program's graphs are often named by a hash of their contents."""
TIMES = "host_rpc_us, htp_rpc_us, accel_us, accel_cycles"
GRAPHS_QUERY = (
    f"select {LABEL} || {OF_OBJECT} as graph, profile_level as level, count(*) executions, "
    "sum(duration_ns)/1e6 ms, avg(duration_ns)/1e3 mean_us, "
    + ", ".join(f"avg({name}) filter (not isnan({name})) as {name}" for name in TIMES.split(", "))
    + " from qnn_executes where complete group by 1, 2 order by ms desc, graph"
)
KNOWN = "if({0} < 0, null, {0})::double"
NODES_QUERY = (
    f"select {LABEL} as graph, coalesce(nullif(s.name, ''), if(o.session_id < 0, '', 'session ' || o.session_id)) as model, "
    f"{KNOWN.format('x.object_id')} as object, x.profile_level as level, {KNOWN.format('x.layer')} as layer, "
    f"{KNOWN.format('x.expert')} as expert, e.name as node, count(*) runs, sum(e.value) cycles, avg(e.value) mean_cycles, "
    "100 * sum(e.value)/greatest(sum(sum(e.value)) over (), 1) as share from qnn_events e join qnn_executes x using (execute_id) "
    "left join (select object_id, session_id from qnn_objects) o on o.object_id = x.object_id "
    "left join (select session_id, name from sessions) s on s.session_id = o.session_id "
    "where e.type = 404 and e.unit = 'cycles' group by all order by cycles desc, object, node"
)
CALLS = (
    "Other calls",
    "select call, name, count(*) calls, if(max(bytes) > 0, max(bytes)/1048576, null) mib, sum(duration_ns)/1e6 ms "
    "from qnn_calls where complete group by all order by ms desc, call, name",
    "text call, text graph, number calls, number MiB, bar total ms",
)

GENIE = (
    "Genie's own figures (medians; sums of tokens)",
    "select component, type, count(*) calls, median(ttft_us) filter (not isnan(ttft_us)) ttft, "
    "sum(prompt_tokens) filter (not isnan(prompt_tokens)) prompt, "
    "median(prompt_tokens_s) filter (not isnan(prompt_tokens_s)) prompt_rate, "
    "sum(generated_tokens) filter (not isnan(generated_tokens)) generated, "
    "median(generated_tokens_s) filter (not isnan(generated_tokens_s)) rate "
    "from genie_events group by all order by min(event_id)",
    "text component, text call, number calls, number TTFT µs, number prompt tokens, number prompt tokens/s, "
    "number generated tokens, number generated tokens/s",
)


def with_levels(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with profile levels replaced by their names."""
    return rows.assign(level=[LEVELS.get(level, "unknown") for level in rows["level"]])


def by_graph(run: Run) -> list[Block]:
    """Executions by graph: the parts of the call's time that QNN reports."""
    rows = with_levels(run.ask(GRAPHS_QUERY))
    columns = (
        "text graph, text profile, number executions, bar total ms, number mean µs, number host RPC µs, number HTP RPC µs, "
        "number accelerator µs, number accelerator cycles"
    )
    blocks = [table(columns, rows, "By graph (means per execution)", GRAPHS_QUERY)]
    timed = rows[rows["accel_us"].notna()].head(16).iloc[::-1]
    return [*blocks, execution_chart(timed)] if len(timed) else blocks


def execution_chart(rows: pd.DataFrame) -> Block:
    """Time of a mean execution: the accelerator, then the additional time of each level around it."""
    y = labels([name or "unnamed" for name in rows["graph"]], 36)
    accelerator = rows["accel_us"]
    host, htp = rows["host_rpc_us"].fillna(accelerator), rows["htp_rpc_us"].fillna(accelerator)
    parts = (
        ("accelerator", accelerator, {"cause": "accelerator"}),
        ("HTP RPC beyond it", htp - accelerator, {"slot": 1}),
        ("host RPC beyond it", host - htp, {"slot": 2}),
        ("call beyond RPC", rows["mean_us"] - host, {"slot": 7}),
    )
    bar = {"type": "bar", "orientation": "h", "y": y}
    traces = [{**bar, "name": name, "x": values.clip(lower=0).round(3), **colour} for name, values, colour in parts]
    axes = {"xaxis": axis("µs per execution"), "yaxis": {"automargin": True}}
    return chart("An execution's time", traces, "", 120 + 28 * len(rows), GRAPHS_QUERY, barmode="stack", **axes)


def npu_section(run: Run) -> Section | None:
    """QNN on the NPU, or on its emulator."""
    executes = run.tables["qnn_executes"]
    if not any(len(run.tables[name]) for name in ("qnn_executes", "qnn_calls", "genie_events")):
        return None
    backend = (run.summary.get("machine") or {}).get("npu") or "NPU"
    blocks: list[Block] = []
    if (run.manifest.get("qnn") or {}).get("emulator"):
        blocks.append(note(EMULATED))
    if len(executes):
        blocks += by_graph(run)
        blocks += npu_blocks.npu_blocks(run.tables)
    blocks += table_of(run, *GENIE)
    nodes = with_levels(run.ask(NODES_QUERY))
    if len(nodes):
        columns = (
            "text graph, text model, number object, text profile, number layer, number expert, text node, number runs, "
            "bar total cycles, number mean cycles, number share %"
        )
        blocks.append(table(columns, nodes, "Cycles by node", NODES_QUERY))
    return Section("npu", f"NPU: {backend}", [*blocks, *table_of(run, *CALLS)])
