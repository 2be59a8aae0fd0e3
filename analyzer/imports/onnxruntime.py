"""ONNX Runtime's own profile (SessionOptions.enable_profiling) as the tables of a recording.

    Session  model_run, and the creation of the session   a run is a step; the profile lacks its phase (prefill or decode)
    Node     <node>_kernel_time                           an operator: its type, provider, shape, and the threads that helped

Times are µs since the begin of profiling. A node of QNN's provider is the execution of a part of the model; QNN's own
events below it: `onnxruntime_qnn`.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.imports.onnxruntime_qnn import qnn_rows, qnn_tables
from analyzer.imports.optrace import complete_events
from analyzer.imports.run_folder import Run
from analyzer.records.spans import NONE
from tracer.recording.format import RecordingError

ENGINE, KERNEL, RUN, QNN = "onnxruntime", "_kernel_time", "model_run", "qnn"
MOST_NS, MOST_ID = 1 << 60, 1 << 31
"""Later times and larger process numbers are damage."""
MAKING = "session_initialization|model_loading.*"
ON_CPU = ("", "cpu", "xnnpack", "dnnl", "acl", "armnn")
LAYER = re.compile(r"(?:layers?|blk|blocks?|h)[._/](\d{1,6})(?=[._/]|$)", re.IGNORECASE)
COLUMNS = ["name", "type", "provider", "shape", "helpers", "pid", "tid", "begin_ns", "end_ns", "duration_ns"]
UNSAID = {
    "": "a run of the model is a step; the profile states neither its phase nor its number of tokens",
    QNN: "the profile does not state which QNN backend ran (HTP, its emulator, GPU), nor, without QNN's events, its time",
}


def is_profile(text: str) -> bool:
    """Whether a text begins like such a profile."""
    return bool(re.match(r'\s*\[\s*\{\s*"cat"\s*:\s*"(?:Session|Node|Kernel)"', text))


def read_profile(path: Path, text: str) -> Run:
    """The tables of a profile; of a truncated one, those of its complete events. Raises RecordingError if it has no run."""
    try:
        events, warnings = json.loads(text), []
    except (ValueError, RecursionError):
        events = complete_events(text)
        warnings = [f"{path.name} is truncated: its first {len(events):,} events were read"]
    events = events if isinstance(events, list) else []
    found = [span_of(event) for event in events if is_span(event)]
    rows = pd.DataFrame([span for span in found if span], columns=COLUMNS)
    if len(rows) < len(found):
        warnings.append(f"{path.name}: {len(found) - len(rows):,} damaged events are omitted")
    rows = rows.sort_values("begin_ns", kind="stable", ignore_index=True)
    if not (rows["name"] == RUN).any():
        raise RecordingError(f"{path} is a profile of ONNX Runtime without a run of the model: keep profiling until it has run")
    warnings += [text for provider, text in UNSAID.items() if provider in set(rows["provider"])]
    tables, (told, bad) = span_tables(rows), qnn_rows(events)
    warnings += [f"{path.name}: {bad} damaged events of QNN are omitted"] if bad else []
    return Run(ENGINE, tables | (qnn_tables(told, tables["qnn_executes"], KERNEL) if len(told) else {}), warnings)


def is_span(event: Any) -> bool:
    """Whether an event is a span of a known kind: of the session, or a node's kernel."""
    kind = event.get("cat") if isinstance(event, dict) else ""
    return kind == "Session" or (kind == "Node" and str(event.get("name")).endswith(KERNEL))


def span_of(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """COLUMNS of a span; None if it is damaged."""
    try:
        begin, lasted = round(float(event["ts"]) * 1000), round(float(event["dur"]) * 1000)
        where = int(event["pid"]), int(event["tid"]), begin, begin + lasted, lasted
        if not (0 <= begin <= MOST_NS - lasted and lasted >= 0 and max(map(abs, where[:2])) <= MOST_ID):
            return None
        name, args = str(event["name"]), event.get("args") or {}
        if event["cat"] == "Session":
            return name, "", "", "", 0, *where
        provider = str(args["provider"]).removesuffix("ExecutionProvider").lower()
        return name.removesuffix(KERNEL), str(args["op_name"]), provider, shape_of(args), helpers_of(args), *where
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def shape_of(args: dict[str, Any]) -> str:
    """The first result's dims, innermost first; "" if unknown."""
    results = args.get("output_type_shape") or [{}]
    dims: list[Any] = next(iter(results[0].values()), [])
    return "x".join(str(int(dim)) for dim in reversed(dims))


def helpers_of(args: dict[str, Any]) -> int:
    """The number of pool threads that ran a part of the operator."""
    stats = args.get("thread_scheduling_stats") or {}
    pool = stats.get("sub_threads", {}) if isinstance(stats, dict) else {}
    return sum(1 for each in pool.values() if int(each.get("num_run", 0)) > 0)


def span_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of a session's spans."""
    rows = rows.assign(engine=ENGINE, complete=True)
    runs, made = (rows[rows["name"].str.fullmatch(pattern)] for pattern in (RUN, MAKING))
    steps = runs.assign(token_id=np.arange(len(runs)), name="", type="")
    nodes = rows[rows["type"] != ""].reset_index(drop=True)
    nodes = nodes.assign(
        token_id=step_of_nodes(nodes, steps), op_id=nodes.index, layer=np.array([*map(layer_of, nodes["name"])], np.int64)
    )
    given = nodes[~nodes["provider"].isin((*ON_CPU, QNN))]
    parts = steps.assign(kind="run"), made.assign(token_id=NONE, kind="create_session", name=""), given.assign(kind="node")
    graphs = pd.concat(parts, ignore_index=True).rename(columns={"provider": "backend"})
    nodes = nodes.assign(graph_id=nodes["op_id"].map(pd.Series(np.arange(len(given)) + len(graphs) - len(given), given.index)))
    nodes["graph_id"] = nodes["graph_id"].fillna(nodes["token_id"])
    on_npu = nodes[nodes["provider"] == QNN].rename(columns={"name": "graph_name"}).assign(status=0, asynchronous=False)
    nodes = nodes.assign(order=nodes.groupby("token_id").cumcount(), n_threads=nodes["helpers"] + 1)
    return {
        "tokens": steps,
        "graphs": graphs.assign(graph_id=graphs.index, layer=graphs["layer"].fillna(NONE)),
        "operators": nodes.assign(busy_ns=nodes["duration_ns"], wait_ns=0),
        "op_threads": nodes.assign(wait_ns=nodes["end_ns"]),
        "qnn_executes": on_npu.assign(execute_id=np.arange(len(on_npu))),
        "threads": rows[["tid", "pid"]].drop_duplicates().assign(target=True),
    }


def layer_of(name: str) -> int:
    """The layer in a node's name (/model/layers.3/attn/MatMul); -1 for none."""
    match = LAYER.search(name)
    return int(match[1]) if match else NONE


def step_of_nodes(nodes: pd.DataFrame, steps: pd.DataFrame) -> np.ndarray:
    """The step of each node: the open one; if several are open, that of its thread; -1 for none."""
    by = None if (steps["begin_ns"] >= steps["end_ns"].cummax().shift(fill_value=0)).all() else "tid"
    edges = steps[["begin_ns", "token_id", "tid"]].assign(until=steps["end_ns"])
    met = pd.merge_asof(nodes[["begin_ns", "end_ns", "tid"]], edges if by else edges.drop(columns="tid"), on="begin_ns", by=by)
    return met["token_id"].where(met["end_ns"] <= met["until"]).fillna(NONE).to_numpy(np.int64)
