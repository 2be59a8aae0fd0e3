"""The operator records of a time range: those with a begin of their own, and shares (one thread's part of one graph node).

A thread has finished its share of a node when it enters the barrier after it; the barrier opens when the last thread arrives,
and then the next node begins on every thread. So one time per thread and node determines begin, end and wait.
"""

from dataclasses import dataclass

import numpy as np

from analyzer.records.manifest import section
from analyzer.records.reading import Source
from analyzer.records.rows import Rows
from analyzer.records.spans import (
    NONE,
    first_of_runs,
    following,
    if_lasting,
    latest,
    latest_or_following,
    row_codes,
    run_lengths,
    share_spans,
    shared_codes,
)

LLAMACPP = 2  # ENGINE_LLAMACPP of bpf/records.h
NEVER_RUN = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")  # nodes that only alias memory


@dataclass(frozen=True)
class OperatorRecords:
    """The operator records of one time range: begins, and those waits that were recorded apart from them.

    `begin["done_ns"]`: of a share, when its thread was done with it, else 0; a share's page faults are its own, no running count.
    """

    begin: Rows
    wait: Rows


def share_rows(source: Source) -> Rows:
    """One row for each share, in time order: time `ts`, `graph`, `node`, and the page faults since the previous share."""
    batches = source.rows("op_shares")
    if len(batches) == 0:
        return Rows.of_columns({}, np.empty(0, np.int64))
    records, count = batches.records, batches["count"]
    inside = np.arange(records["after"].shape[1]) < count[:, None]
    owner = np.repeat(np.arange(len(batches)), inside.sum(axis=1))
    ts = batches["ts"][owner] + records["after"][inside]
    order = np.argsort(ts, kind="stable")
    owner = owner[order]
    columns = {name: batches[name][owner] for name in ("pid", "tid", "cpu", "engine", "graph")}
    columns |= {name: records[name][inside][order].astype(np.int64) for name in ("node", "maj_flt", "min_flt")}
    return Rows.of_columns({"ts": ts[order], **columns}, batches.position[owner])


def operator_records(source: Source) -> OperatorRecords:
    """The operators' begins, those of shares among them.

    While the tracer locates the barrier, operators are recorded in both ways: a graph is read from shares if these miss none
    of its operators, or if the other records miss most.
    """
    done, graphs = share_rows(source), source.rows("graph_begin")
    announced = only_computed(source)
    if len(done) == 0:
        return OperatorRecords(announced["op_begin"], announced["op_wait"])
    graph, until = graphs_of(source, graphs, done)
    known_ns = described_until(source, done)
    tensor = tensors_of(source, done, known_ns)
    described = tensor_rows(source, done, tensor, known_ns)
    real = ~np.isin(np.append(source.rows("tensor")["type"], NONE)[described], never_run(source))
    source.leave_unpaired("op", done.where(real & (graph < 0)))
    used = np.flatnonzero(real & (graph >= 0))
    owner = owner_graphs(graphs, until[:-1], announced["op_begin"], announced["op_wait"])
    begun = owner["op_begin"] >= 0
    begun_ops = owner["op_begin"][begun], announced["op_begin"]["tensor"][begun], announced["op_begin"]["tid"][begun]
    done_ops = graph[used], tensor[used], done["tid"][used]
    by_shares = np.append(graphs_by_shares(len(graphs), done_ops, begun_ops, have_elements(source, described[used])), False)
    used = used[by_shares[graph[used]]]
    rows = done.where(used)
    begins = begin_times(graph[used], rows["node"], rows["ts"], graphs["ts"])
    old = {kind: announced[kind].where(~by_shares[owner[kind]]) for kind in announced}
    fields = described_fields(source, rows, tensor[used], described[used])
    return OperatorRecords(join_records(old["op_begin"], rows, begins, fields), old["op_wait"])


def only_computed(source: Source) -> dict[str, Rows]:
    """The records op_begin and op_wait without nodes that do not compute: some builds announce these like others."""
    begin, wait = source.rows("op_begin"), source.rows("op_wait")
    renames = (begin["engine"] == LLAMACPP) & np.isin(begin["type"], never_run(source))
    if not renames.any():
        return {"op_begin": begin, "op_wait": wait}
    begun = latest(begin["tid"], begin["ts"], wait["tid"], wait["ts"])
    return {"op_begin": begin.where(~renames), "op_wait": wait.where(~np.append(renames, False)[begun])}


def graphs_of(source: Source, graphs: Rows, done: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(the graph of each share, -1 for none; for each graph the time before which its shares end, and a final 0)."""
    handles, key = shared_codes((graphs["pid"], graphs["handle"]), (done["pid"], done["graph"]))
    graph = latest(handles, graphs["ts"], key, done["ts"])
    until = np.append(source.next_step(graphs["ts"]), 0)
    return np.where(done["ts"] < until[graph], graph, NONE), until


def owner_graphs(graphs: Rows, until: np.ndarray, begin: Rows, wait: Rows) -> dict[str, np.ndarray]:
    """The graph of each op_begin and op_wait: that of its thread, else the one in which another thread began the same result.

    If neither exists, it is the latest graph of its process.
    """
    graph = np.full(len(begin), NONE, np.int64)
    if_lasting((graphs["tid"], graphs["ts"], until), (begin["tid"], begin["ts"]), graph)
    graph = share_spans(graph, row_codes(begin["pid"], begin["tensor"]), begin["ts"], (graphs["ts"], until))
    if_lasting((graphs["pid"], graphs["ts"], until), (begin["pid"], begin["ts"]), graph)
    return {"op_begin": graph, "op_wait": np.append(graph, NONE)[latest(begin["tid"], begin["ts"], wait["tid"], wait["ts"])]}


def described_until(source: Source, done: Rows) -> np.ndarray:
    """The time up to which definitions of each share's node and tensor count: the end of its graph.

    The leading thread records them after its own share, possibly after the shares of all threads.
    """
    ends = source.rows("graph_end")
    handles, key = shared_codes((ends["pid"], ends["handle"]), (done["pid"], done["graph"]))
    end = following(handles, ends["ts"], key, done["ts"])
    until = np.where(end >= 0, np.append(ends["ts"], 0)[end], source.last_ns)
    return np.minimum(until, source.next_step(done["ts"]) - 1)


def tensors_of(source: Source, done: Rows, until: np.ndarray) -> np.ndarray:
    """The result tensor of each share's node, as recorded up to `until`, else later; 0 if never."""
    nodes = source.rows("node")
    told, asked = shared_codes(*([rows[name] for name in ("pid", "graph", "node")] for rows in (nodes, done)))
    return np.append(nodes["tensor"], 0)[latest_or_following(told, nodes["ts"], asked, until)]


def graphs_by_shares(n: int, done: tuple[np.ndarray, ...], begun: tuple[np.ndarray, ...], made: np.ndarray) -> np.ndarray:
    """For each of `n` graphs, whether to read its operators from shares; `done` (shares) and `begun` are (graph, tensor, thread).

    `made` marks shares whose result has elements: threads pass operators without any, but none begins them. Probes may be
    attached after one thread has passed the first operators and before another has: the shares of all threads must exist.
    """
    count, count_begun = (np.bincount(graph, minlength=n) for graph in (done[0][made], begun[0]))
    by_share, announced = shared_codes(done, begun)
    missed = np.bincount(begun[0][~np.isin(announced, by_share)], minlength=n)
    return np.isin(np.arange(n), done[0]) & ((missed == 0) | (count > 2 * count_begun))


def begin_times(graph: np.ndarray, node: np.ndarray, ts: np.ndarray, graph_ts: np.ndarray) -> np.ndarray:
    """The begin of each share: when the last thread finished the graph's previous node; for the first node, the graph's begin."""
    order = np.lexsort((ts, node, graph))
    starts = first_of_runs(graph[order] * (int(node.max(initial=0)) + 1) + node[order])
    if len(starts) == 0:
        return np.empty(0, np.int64)
    owner = graph[order][starts]
    opened = np.maximum.reduceat(ts[order], starts)
    before = np.concatenate(([0], opened[:-1]))
    before = np.where(np.concatenate(([True], owner[1:] != owner[:-1])), graph_ts[owner], before)
    begins = np.empty(len(ts), np.int64)
    begins[order] = np.minimum(np.repeat(before, run_lengths(starts, len(order))), ts[order])
    return begins


def tensor_rows(source: Source, done: Rows, tensor: np.ndarray, until: np.ndarray) -> np.ndarray:
    """The row of the `tensor` record that defines each result: the latest up to `until`, else the first after it."""
    tensors = source.rows("tensor")
    told, asked = shared_codes((tensors["pid"], tensors["tensor"]), (done["pid"], tensor))
    head = np.flatnonzero(tensors["first"] == 0)
    row = latest_or_following(told[head], tensors["ts"][head], asked, until)
    return np.where(row >= 0, np.append(head, NONE)[row], NONE)


def have_elements(source: Source, described: np.ndarray) -> np.ndarray:
    """Whether the tensors of these rows of `tensor` have elements. Parts of a prompt without logits have empty ones."""
    return np.append((source.rows("tensor")["ne"] != 0).all(axis=1), True)[described]


def never_run(source: Source) -> list[int]:
    """The engine's numbers of the operators that do not compute."""
    names = section(section(source.manifest, "engines"), source.engine_names.get(LLAMACPP, "")).get("operators") or []
    return [number for number, name in enumerate(names) if name in NEVER_RUN]


def described_fields(source: Source, done: Rows, tensor: np.ndarray, described: np.ndarray) -> dict[str, np.ndarray]:
    """The other fields of an op_begin, besides time and thread, for each share."""
    tensors = source.rows("tensor")
    kind, rows = (np.append(column, 0)[described] for column in (tensors["type"], tensors["ne"][:, 1]))
    layer = np.full(len(done), NONE, np.int64)
    faults = {name: done[name] for name in ("maj_flt", "min_flt")}
    return {"tensor": tensor, "layer": layer, "type": kind, "n_tokens": rows, "done_ns": done["ts"]} | faults


def join_records(old: Rows, done: Rows, ts: np.ndarray, fields: dict[str, np.ndarray]) -> Rows:
    """The `old` records and shares, which begin at times `ts`, in time order."""
    merged = {"ts": ts, **{name: done[name] for name in ("pid", "tid", "cpu", "engine")}, **fields}
    order = np.argsort(np.concatenate((old["ts"], ts)), kind="stable")
    merged = {name: np.concatenate((old[name], column))[order] for name, column in merged.items()}
    return Rows.of_columns(merged, np.concatenate((old.position, done.position))[order])
