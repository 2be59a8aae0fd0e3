"""Operators that are told by one record each, `op_done`: turned into the begins and waits that all other analysis reads.

A thread's share of a node is done when it enters the barrier behind it; the barrier opens when the last thread has come,
and there the next node begins on every thread. So one time per thread and node tells begin, end and wait.
"""

import numpy as np

from analyzer.reading import Rows, Source, section
from analyzer.spans import NONE, codes, first_of_runs, following, latest, run_lengths, stable_order
from tracer.recording import RING_HEADER_BYTES

NEVER_RUN = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")  # nodes that only rename memory


def unfold(source: Source) -> None:
    """Put an op_begin and an op_wait in the place of each op_done.

    While the tracer learns where to look, operators are told in both ways: a graph is read the new way where that misses
    none of its operators, or the old way misses most.
    """
    done, graphs = source.rows("op_done"), source.rows("graph_begin")
    if len(done) == 0:
        return
    handles = np.concatenate((graphs["handle"], done["graph"]))
    key = codes(np.concatenate((graphs["pid"], done["pid"])), handles)
    graph = latest(key[: len(graphs)], graphs["ts"], key[len(graphs) :], done["ts"])
    tensor = descriptions(source, done)
    operator = np.append(source.rows("tensor")["type"], NONE)[tensor]
    real = ~np.isin(operator, never_run(source))
    source.leave_unpaired("op_done", done.where(real & (graph < 0)))
    kept = np.flatnonzero(real & (graph >= 0))
    announced = {kind: source.rows(kind) for kind in ("op_begin", "op_wait")}
    owner = {kind: latest(graphs["pid"], graphs["ts"], rows["pid"], rows["ts"]) for kind, rows in announced.items()}
    begun = owner["op_begin"] >= 0
    theirs, ours = (owner["op_begin"][begun], announced["op_begin"]["tensor"][begun]), (graph[kept], done["tensor"][kept])
    by_done = np.append(told_by_done(len(graphs), ours, theirs), False)
    kept = kept[by_done[graph[kept]]]
    begins = begin_times(graph[kept], done["node"][kept], done["ts"][kept], graphs["ts"])
    rows = done.where(kept)
    for kind, ts in (("op_begin", begins), ("op_wait", rows["ts"])):
        old = announced[kind].where(~by_done[owner[kind]])
        source.replace(kind, joined(source, kind, old, rows, ts, tensor[kept]))


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


def descriptions(source: Source, done: Rows) -> np.ndarray:
    """The row of `tensor` records that describes each result: the latest before it, else the first after it."""
    told = source.rows("tensor")
    pids, tensors = np.concatenate((told["pid"], done["pid"])), np.concatenate((told["tensor"], done["tensor"]))
    key = codes(pids, tensors)
    head = np.flatnonzero(told["first"] == 0)
    mine, ts = key[len(told) :], told["ts"][head]
    row = latest(key[head], ts, mine, done["ts"])
    late = np.flatnonzero(row < 0)
    row[late] = following(key[head], ts, mine[late], done["ts"][late])
    return np.where(row >= 0, np.append(head, NONE)[row], NONE)


def never_run(source: Source) -> list[int]:
    """The engine's numbers of the operators that only rename memory."""
    names = section(section(source.manifest, "engines"), "llamacpp").get("operators") or []
    return [number for number, name in enumerate(names) if name in NEVER_RUN]


def joined(source: Source, kind: str, old: Rows, done: Rows, ts: np.ndarray, tensor: np.ndarray) -> Rows:
    """Records of `kind` as they were, and those made of `done` at times `ts`, in order of time."""
    _, dtype = source.recording.layouts[kind]
    made = np.zeros(len(done), dtype)
    for name in ("pid", "tid", "cpu", "engine", "tensor", "maj_flt", "min_flt"):
        if name in (dtype.names or ()) and name in (done.dtype.names or ()):
            made[name] = done.records[name]
    made["ts"] = ts
    if kind == "op_begin":
        told = source.rows("tensor")
        made["type"], made["n_tokens"] = (np.append(column, 0)[tensor] for column in (told["type"], told["ne"][:, 1]))
        made["layer"] = NONE
        for name in ("maj_flt", "min_flt"):  # as they stood when the share began, which is when the one before was done
            made[name] = previous(done["tid"], done["ts"], made[name])
    slots = np.zeros((len(made), old.slots.dtype.itemsize), np.uint8)
    slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize] = made.view(np.uint8).reshape(len(made), -1)
    whole = np.concatenate((old.slots, slots.view(old.slots.dtype)[:, 0]))
    all_ts, position = np.concatenate((old["ts"], ts)), np.concatenate((old.position, done.position))
    order = np.argsort(all_ts, kind="stable")
    return Rows(whole[order], dtype, position[order])


def previous(group: np.ndarray, ts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of the row before each in its group, in order of time; its own where there is none."""
    by_time = np.argsort(ts, kind="stable")
    order = by_time[stable_order(codes(group)[by_time])]
    answer = values.copy()
    same = group[order[1:]] == group[order[:-1]]
    answer[order[1:][same]] = values[order[:-1][same]]
    return answer
