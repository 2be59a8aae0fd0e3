"""Operators that are told by a thread's shares of a graph's nodes alone: turned into the begins and waits that others read.

A thread's share of a node is done when it enters the barrier behind it; the barrier opens when the last thread has come,
and there the next node begins on every thread. So one time per thread and node tells begin, end and wait.
"""

import numpy as np

from analyzer.records.reading import Rows, Source, section
from analyzer.records.spans import NONE, codes, first_of_runs, following, latest, run_lengths
from tracer.recording.format import RING_HEADER_BYTES

SLOT = np.dtype("V96")
SHARE = np.dtype(
    [(name, "<u8") for name in ("ts", "graph")]
    + [(name, "<u4") for name in ("pid", "tid", "node", "maj_flt", "min_flt")]
    + [("cpu", "<u2"), ("engine", "<u2")]
)
LLAMACPP = 2  # ENGINE_LLAMACPP of bpf/records.h
NEVER_RUN = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")  # nodes that only rename memory


def shares(source: Source) -> Rows:
    """One row per share, in order of time: its time `ts`, `graph`, `node`, and the page faults since the share before."""
    batches = source.rows("op_shares")
    records, count = batches.records, batches["count"]
    if len(batches) == 0:
        return Rows(np.empty(0, SLOT), SHARE, np.empty(0, np.int64))
    inside = np.arange(records["after"].shape[1]) < count[:, None]
    owner = np.repeat(np.arange(len(batches)), inside.sum(axis=1))
    made = np.zeros(len(owner), SHARE)
    for name in ("pid", "tid", "cpu", "engine", "graph"):
        made[name] = records[name][owner]
    for name in ("node", "maj_flt", "min_flt"):
        made[name] = records[name][inside]
    made["ts"] = batches["ts"][owner] + records["after"][inside]
    order = np.argsort(made["ts"], kind="stable")
    return in_slots(made[order], SHARE, SLOT, batches.position[owner[order]])


def in_slots(records: np.ndarray, dtype: np.dtype, slot: np.dtype, position: np.ndarray) -> Rows:
    """Records made here, as rows; `position` is the slot of the file that each was made from."""
    raw = np.zeros((len(records), slot.itemsize), np.uint8)
    raw[:, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize] = records.view(np.uint8).reshape(len(records), dtype.itemsize)
    return Rows(raw.view(slot)[:, 0], dtype, position)


def unfold(source: Source) -> None:
    """Put an op_begin and an op_wait in the place of each share.

    While the tracer learns where to look, operators are told in both ways: a graph is read the new way where that misses
    none of its operators, or the old way misses most.
    """
    done, graphs = shares(source), source.rows("graph_begin")
    if len(done) == 0:
        return
    handles = np.concatenate((graphs["handle"], done["graph"]))
    key = codes(np.concatenate((graphs["pid"], done["pid"])), handles)
    graph = latest(key[: len(graphs)], graphs["ts"], key[len(graphs) :], done["ts"])
    until = np.append(source.next_step(graphs["ts"]), 0)
    graph = np.where(done["ts"] < until[graph], graph, NONE)
    tensor = tensors_of(source, done)
    described = descriptions(source, done, tensor)
    real = ~np.isin(np.append(source.rows("tensor")["type"], NONE)[described], never_run(source))
    source.leave_unpaired("op", done.where(real & (graph < 0)))
    kept = np.flatnonzero(real & (graph >= 0))
    announced = {kind: source.rows(kind) for kind in ("op_begin", "op_wait")}
    owner = {kind: latest(graphs["pid"], graphs["ts"], rows["pid"], rows["ts"]) for kind, rows in announced.items()}
    owner = {kind: np.where(announced[kind]["ts"] < until[row], row, NONE) for kind, row in owner.items()}
    begun = owner["op_begin"] >= 0
    theirs, ours = (owner["op_begin"][begun], announced["op_begin"]["tensor"][begun]), (graph[kept], tensor[kept])
    by_done = np.append(told_by_done(len(graphs), ours, theirs), False)
    kept = kept[by_done[graph[kept]]]
    rows = done.where(kept)
    begins = begin_times(graph[kept], rows["node"], rows["ts"], graphs["ts"])
    for kind, ts in (("op_begin", begins), ("op_wait", rows["ts"])):
        old = announced[kind].where(~by_done[owner[kind]])
        source.replace(kind, joined(source, kind, old, rows, ts, tensor[kept], described[kept]))


def tensors_of(source: Source, done: Rows) -> np.ndarray:
    """The tensor that each share's node makes, as told before the graph's next run or, failing that, later; 0: never told.

    Nodes are told by the thread that leads, maybe behind another thread's share; hence the look ahead to the graph's end.
    """
    told, ends = source.rows("node"), source.rows("graph_end")
    columns = [np.concatenate((told[name], done[name])) for name in ("pid", "graph", "node")]
    key = codes(*columns)
    left, right = key[len(told) :], key[: len(told)]
    end = following(ends["pid"], ends["ts"], done["pid"], done["ts"])
    until = np.where(end >= 0, np.append(ends["ts"], 0)[end], source.last_ns)
    until = np.minimum(until, source.next_step(done["ts"]) - 1)
    row = latest(right, told["ts"], left, until)
    late = np.flatnonzero(row < 0)
    row[late] = following(right, told["ts"], left[late], until[late])
    return np.append(told["tensor"], 0)[row]


def told_by_done(n: int, done: tuple[np.ndarray, np.ndarray], begun: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Of each of `n` graphs, whether op_done tells it; both are given as (graph, tensor) of each record."""
    count, count_begun = (np.bincount(graph, minlength=n) for graph, _ in (done, begun))
    key = codes(np.concatenate((done[0], begun[0])), np.concatenate((done[1], begun[1])))
    missed = np.bincount(begun[0][~np.isin(key[len(done[0]) :], key[: len(done[0])])], minlength=n)
    return (count > 0) & ((missed == 0) | (count > 2 * count_begun))


def begin_times(graph: np.ndarray, node: np.ndarray, ts: np.ndarray, graph_ts: np.ndarray) -> np.ndarray:
    """When each share began: when the last thread was done with the graph's node before; the first, with the graph."""
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


def descriptions(source: Source, done: Rows, tensor: np.ndarray) -> np.ndarray:
    """The row of `tensor` records that describes each result: the latest before it, else the first after it."""
    told = source.rows("tensor")
    key = codes(np.concatenate((told["pid"], done["pid"])), np.concatenate((told["tensor"], tensor)))
    head = np.flatnonzero(told["first"] == 0)
    mine, ts = key[len(told) :], told["ts"][head]
    row = latest(key[head], ts, mine, done["ts"])
    late = np.flatnonzero(row < 0)
    row[late] = following(key[head], ts, mine[late], done["ts"][late])
    return np.where(row >= 0, np.append(head, NONE)[row], NONE)


def never_run(source: Source) -> list[int]:
    """The engine's numbers of the operators that only rename memory."""
    names = section(section(source.manifest, "engines"), source.engine_names.get(LLAMACPP, "")).get("operators") or []
    return [number for number, name in enumerate(names) if name in NEVER_RUN]


def joined(source: Source, kind: str, old: Rows, done: Rows, ts: np.ndarray, tensor: np.ndarray, described: np.ndarray) -> Rows:
    """Records of `kind` as they were, and those made of shares at times `ts`, in order of time."""
    _, dtype = source.recording.layouts[kind]
    made = np.zeros(len(done), dtype)
    for name in ("pid", "tid", "cpu", "engine"):
        made[name] = done.records[name]
    made["ts"] = ts
    if kind == "op_begin":
        told = source.rows("tensor")
        made["tensor"], made["layer"] = tensor, NONE
        made["type"], made["n_tokens"] = (np.append(column, 0)[described] for column in (told["type"], told["ne"][:, 1]))
        for name in ("maj_flt", "min_flt"):
            made[name] = done[name]
    both = in_slots(made, dtype, old.slots.dtype, done.position)
    whole = np.concatenate((old.slots, both.slots))
    all_ts, position = np.concatenate((old["ts"], ts)), np.concatenate((old.position, done.position))
    order = np.argsort(all_ts, kind="stable")
    if kind == "op_begin":
        source.told_by_share = order >= len(old)
    return Rows(whole[order], dtype, position[order])
