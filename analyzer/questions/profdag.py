"""ProfDAG: one step's operators as a graph with measurements.

Nodes are operators in execution order; an edge leads from an operator to one that reads its result. A source that no operator of
the step made is a constant (a weight, or state of an earlier step), or a view if its structure was recorded. A prompt in
chunks makes the same tensor in parts: an operator that reads more rows than the last part has also reads earlier parts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd

from analyzer.errors import AnalysisError
from analyzer.questions.roofline import operator_backends
from analyzer.questions.step_time import step_time
from analyzer.records.schema import Tables
from analyzer.tables.nodes import NEVER_RUN
from analyzer.tables.operators import layer_of
from moescope.answers import json_text

VIEWS_DEEP = 8
NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MEASURED = ("duration_ns", "busy_ns", "wait_ns", "maj_flt", "min_flt")
IN_PLACE = {"SET_ROWS": -1, "CPY": 1, "SET": 0, "ACC": 0}
"""Operators that write in place → index of the source that they write to."""
CACHING = ("attention",)
"""Operators that read the KV cache written by their own earlier parts."""
COPIED = (
    *("type", "name", "layer", "expert", "order", "shape", "n_threads"),
    *("flops", "read_bytes", "written_bytes", *MEASURED),
)


class DagError(AnalysisError):
    """No ProfDAG can be made; the message has the reason."""


@dataclass
class _Builder:
    """The graph under construction, and the latest producer of each tensor."""

    tensors: pd.DataFrame
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)
    maker: dict[int, str] = field(default_factory=dict)
    described: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    writer: dict[int, str] = field(default_factory=dict)
    parts: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    """Tensor → (node, rows, graph) of the operators that made it, in order."""

    def __post_init__(self) -> None:
        keys = zip(self.tensors["pid"].tolist(), self.tensors["tensor"].tolist(), strict=True)
        for row, (key, since) in enumerate(zip(keys, self.tensors["since_ns"].tolist(), strict=True)):
            self.described.setdefault(key, []).append((since, row))

    def describe(self, pid: int, tensor: int, ts: int) -> tuple[str, str, str, list[int]]:
        """(type, name, shape, sources) of a tensor at a time; empty if the tensor was not recorded."""
        definitions = self.described.get((pid, tensor))
        if not definitions:
            return "", "", "", []
        row = max((pair for pair in definitions if pair[0] <= ts), default=min(definitions))[1]
        definition = self.tensors.iloc[row]
        return definition["type"], definition["name"], definition["shape"], [int(s) for s in definition["sources"]]

    def source(self, pid: int, tensor: int, ts: int, ancestors: tuple[int, ...] = ()) -> str:
        """The node of a tensor as a source, added if missing."""
        if tensor in self.maker:
            return self.maker[tensor]
        kind, name, shape, sources = self.describe(pid, tensor, ts)
        sources = [s for s in sources if s != tensor and s not in ancestors]
        role = "view" if sources else "constant"
        node = f"{role} {tensor:x}"
        shown = {"role": role, "type": kind or "constant", "name": name or f"{tensor:x}", "layer": layer_of(name), "shape": shape}
        unmeasured = {"expert": -1, "order": -1, "backend": "", "begin_ns": -1, "end_ns": -1, **dict.fromkeys(MEASURED, 0)}
        self.graph.add_node(node, **shown, **unmeasured)
        self.maker[tensor] = node
        for above in sources:
            self.graph.add_edge(self.source(pid, above, ts, (*ancestors, tensor)), node, kind="data")
        return node

    def sources(self, operator: dict[str, Any], tensors: list[int]) -> Iterator[str]:
        """The nodes that an operator reads; for a tensor made in parts, as many parts as have the operator's rows."""
        for tensor in tensors:
            if tensor != operator["tensor"]:
                yield self.source(operator["pid"], tensor, operator["end_ns"])
                made = [part for part in self.parts.get(tensor, ()) if part[2] == operator["graph_id"]]
                rows = made[-1][1] if made else operator["n_tokens"]
                for node, count, _ in made[-2::-1] if rows > 0 else ():
                    if rows >= operator["n_tokens"]:
                        break
                    rows += count
                    yield node

    def made(self, operator: dict[str, Any], node: str) -> str | None:
        """Record that an operator made its tensor, or a part of it; returns the previous part if it reads that part's state."""
        tensor = int(operator["tensor"])
        parts = self.parts.setdefault(tensor, [])
        before = parts[-1][0] if parts and operator["type"] in CACHING else None
        parts.append((node, operator["n_tokens"], operator["graph_id"]))
        self.maker[tensor] = node
        return before

    def base(self, pid: int, tensor: int, ts: int) -> int:
        """The tensor whose memory a view aliases, through all views; the tensor itself if it is not a view."""
        for _ in range(VIEWS_DEEP):
            kind, _, _, sources = self.describe(pid, tensor, ts)
            if kind not in NEVER_RUN or not sources:
                return tensor
            tensor = sources[0]
        return tensor

    def note_writer(self, kind: str, pid: int, sources: list[int], ts: int, node: str) -> None:
        """Record the memory that an operator wrote in place."""
        if kind in IN_PLACE and sources:
            self.writer[self.base(pid, sources[IN_PLACE[kind]], ts)] = node

    def written_before(self, pid: int, sources: list[int], ts: int) -> set[str]:
        """The operators that wrote in place to memory now read through a view."""
        if not self.writer:
            return set()
        return {self.writer[base] for base in (self.base(pid, source, ts) for source in sources) if base in self.writer}


def achieved_speed(operator: dict[str, Any]) -> dict[str, float]:
    """An operator's achieved gflops and gbytes_per_s; NaN if its work is unknown."""
    ns = max(int(operator["duration_ns"]), 1)
    return {"gflops": operator["flops"] / ns, "gbytes_per_s": (operator["read_bytes"] + operator["written_bytes"]) / ns}


def operator_counters(tables: Tables, operators: pd.DataFrame) -> dict[int, dict[str, float]]:
    """op_id → hardware counters of the operator, summed over its threads."""
    pmc = tables["pmc"]
    rows = pmc[pmc["op_id"].isin(operators["op_id"])]
    answer: dict[int, dict[str, float]] = {}
    for (operator, event), value in rows.groupby(["op_id", "event"])["value"].sum().items():
        answer.setdefault(int(operator), {})[str(event)] = float(value)
    return answer


def build_profdag(
    tables: Tables, token_id: int, mean_over: list[int] | None = None, time: pd.DataFrame | None = None
) -> nx.DiGraph:
    """The ProfDAG of a step. Node attributes: role (op | view | constant), type, name, layer, expert, order, shape, backend,
    begin_ns, end_ns (from the step's begin), duration_ns, busy_ns, wait_ns, maj_flt, min_flt; operators also n_threads, flops,
    read_bytes, written_bytes, gflops, gbytes_per_s, hardware counters by name, and `causes`: ns of the step's time in it by cause
    (step_time). Edges: kind (data | memory | order), memory
    if one reads what the other wrote in place.

    `mean_over`: steps whose times are averaged if they ran the same types in the same layers and order; the graph's
    attributes `tokens_used` and `tokens_skipped` count them. Without any recorded structure, edges follow execution order.
    `time`: the table `time`, where the caller has it.
    """
    operators = step_operators(tables, token_id)
    backends = dict(zip(tables["operators"]["op_id"].tolist(), operator_backends(tables).tolist(), strict=True))
    begun = tables["tokens"].loc[tables["tokens"]["token_id"] == token_id, "begin_ns"]
    origin = int(begun.iloc[0] if len(begun) else operators["begin_ns"].iloc[0])
    builder, structured = _Builder(tables["tensors"]), False
    counted = operator_counters(tables, operators)
    for operator in operators.to_dict("records"):
        sources = builder.describe(operator["pid"], operator["tensor"], operator["end_ns"])[3]
        structured |= bool(sources)
        makers = list(builder.sources(operator, sources))
        writers = builder.written_before(operator["pid"], sources, operator["end_ns"])
        copied = {name: operator[name] for name in COPIED}
        times = {"begin_ns": operator["begin_ns"] - origin, "end_ns": operator["end_ns"] - origin}
        node, backend = f"op {operator['order']}", backends[operator["op_id"]]
        builder.graph.add_node(
            node, role="op", **copied, **times, backend=backend, **achieved_speed(operator), **counted.get(operator["op_id"], {})
        )
        builder.graph.add_edges_from(((writer, node) for writer in writers), kind="memory")
        builder.graph.add_edges_from(((maker, node) for maker in makers), kind="data")
        before = builder.made(operator, node)
        builder.graph.add_edges_from([(before, node)] if before else [], kind="memory")
        builder.note_writer(operator["type"], operator["pid"], sources, operator["end_ns"], node)
    graph = builder.graph
    if not structured:
        nx.add_path(graph, [f"op {order}" for order in operators["order"].tolist()], kind="order")
    alike = same_structure(operators, tables["operators"], mean_over or [])
    used = average_over(graph, alike, step_time(tables) if time is None else time)
    graph.graph.update(token_id=token_id, tokens_used=used, tokens_skipped=len(set(mean_over or []) | {token_id}) - used)
    return graph


def step_operators(tables: Tables, token_id: int) -> pd.DataFrame:
    """The operators of a step in execution order; raises DagError if there are none."""
    operators = tables["operators"]
    rows = operators[operators["token_id"] == token_id].sort_values("order")
    if len(rows) == 0:
        token_ids = operators["token_id"].unique()
        token_ids = np.sort(token_ids[token_ids >= 0])
        have = f"steps {token_ids[0]} to {token_ids[-1]} have" if len(token_ids) else "none has: record at level operator"
        raise DagError(f"step {token_id} has no operators; {have}")
    return rows


def same_structure(operators: pd.DataFrame, everything: pd.DataFrame, token_ids: list[int]) -> pd.DataFrame:
    """The operators of a step and of those steps that ran the same types in the same layers and order."""
    shape, token_id = operators[["type", "layer"]].to_numpy().tolist(), int(operators["token_id"].iloc[0])
    rows = everything[everything["token_id"].isin(set(token_ids) - {token_id})].sort_values(["token_id", "order"])
    same = [part for _, part in rows.groupby("token_id") if part[["type", "layer"]].to_numpy().tolist() == shape]
    return pd.concat([operators, *same], ignore_index=True)


def average_over(graph: nx.DiGraph, used: pd.DataFrame, time: pd.DataFrame) -> int:
    """Replace measured values by means over the steps `used`, and add `causes`; returns the number of steps."""
    count, step = used["token_id"].nunique(), used.set_index("op_id")["order"]
    if count > 1:
        for order, values in used.groupby("order")[list(MEASURED)].mean().iterrows():
            graph.nodes[f"op {order}"].update(values.to_dict())
    rows = time[time["op_id"].isin(step.index)]
    cause = rows["cause"].astype(object)
    spent = rows["duration_ns"].groupby([step.reindex(rows["op_id"]).to_numpy(), cause]).sum().div(count)
    for order in used["order"].unique().tolist():
        graph.nodes[f"op {order}"]["causes"] = spent[order].to_dict() if order in spent.index.levels[0] else {}
    return count


def decode_steps(tables: Tables) -> list[int]:
    """Ids of complete decode steps that have operators."""
    tokens = tables["tokens"]
    good = tokens[(tokens["phase"] == "decode") & tokens["complete"]]["token_id"]
    return sorted(set(good.tolist()) & set(tables["operators"]["token_id"].unique().tolist()))


def middle_step(tables: Tables) -> int:
    """The middle complete decode step, else the first step that has operators."""
    decode = decode_steps(tables)
    with_operators = tables["operators"].loc[tables["operators"]["token_id"] >= 0, "token_id"]
    return decode[len(decode) // 2] if decode else int(with_operators.min()) if len(with_operators) else 0


def to_json(graph: nx.DiGraph) -> str:
    """The graph as JSON text: {graph, nodes, edges}."""
    nodes = [{"id": node, **values} for node, values in graph.nodes(data=True)]
    edges = [{"source": a, "target": b, **values} for a, b, values in graph.edges(data=True)]
    return json_text({"graph": graph.graph, "nodes": nodes, "edges": edges})


def export_graph(graph: nx.DiGraph, path: Path, form: str) -> None:
    """Write the graph as `graphml`, `dot` or `json`."""
    path.write_text(as_text(graph, form))


def as_text(graph: nx.DiGraph, form: str) -> str:
    """The graph as `graphml`, `dot` or `json`."""
    if form == "json":
        return to_json(graph)
    if form == "dot":
        return to_dot(graph)
    plain = nx.DiGraph(**in_xml(graph.graph))
    plain.add_nodes_from((xml_value(node), in_xml(values)) for node, values in graph.nodes(data=True))
    plain.add_edges_from((xml_value(a), xml_value(b), in_xml(values)) for a, b, values in graph.edges(data=True))
    return "\n".join(nx.generate_graphml(plain))


def xml_value(value: Any) -> Any:
    """A text without characters that XML cannot represent, or a number as one of Python's."""
    if isinstance(value, str):
        return NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", value)
    return value.item() if isinstance(value, np.generic) else value


def in_xml(values: dict[str, Any]) -> dict[str, Any]:
    """Attributes converted to types that GraphML supports; a dictionary's entries become attributes of their own."""
    flat = {name: value for name, value in values.items() if not isinstance(value, dict)}
    flat |= {f"{name} {key}": each for name, value in values.items() if isinstance(value, dict) for key, each in value.items()}
    return {name: xml_value(value) for name, value in flat.items()}


def to_dot(graph: nx.DiGraph) -> str:
    """The graph for Graphviz: operators with type, name and time, the darker the longer; views dashed, constants plain."""
    longest = max((values["duration_ns"] for _, values in graph.nodes(data=True)), default=0) or 1
    lines = ["digraph profdag {", "  node [fontname=sans, fontsize=10, style=filled, fillcolor=white];"]
    for node, values in graph.nodes(data=True):
        label = [values["type"], values["name"]]
        look = {"view": "shape=box, style=dashed", "constant": "shape=plain"}.get(values["role"], "")
        if values["role"] == "op":
            label.append(f"{values['duration_ns'] / 1e3:,.1f} µs")
            look = f'shape=box, fillcolor="0.08 {values["duration_ns"] / longest:.3f} 1.0"'
        lines.append(f"  {dot_string(node)} [label={dot_string(*label)}, {look}];")
    style = {"memory": " [style=dotted]", "order": " [color=gray]", "next layer": " [style=bold]"}
    lines += [f"  {dot_string(a)} -> {dot_string(b)}{style.get(kind, '')};" for a, b, kind in graph.edges(data="kind")]
    return "\n".join([*lines, "}", ""])


def dot_string(*lines: str) -> str:
    """A quoted DOT string of one or more lines, with quotes and backslashes escaped."""
    texts = (NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", str(line)) for line in lines)
    return '"' + "\\n".join(text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for text in texts) + '"'
