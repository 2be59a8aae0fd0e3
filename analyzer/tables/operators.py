"""Operators: those of each thread, merged over the threads that share one, and the tensors that name them."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow

from analyzer.records.contents import address_numbers
from analyzer.records.reading import Source
from analyzer.records.rows import Rows, decode_texts
from analyzer.records.schema import Columns, arrow_table, conform, empty_table, equals_any, text_array
from analyzer.records.spans import (
    EVER,
    NONE,
    NestedSpans,
    distinct_sorted,
    first_of_runs,
    following,
    if_lasting,
    int64_codes,
    latest,
    next_in_group,
    number_rows,
    running_count,
    share_spans,
    shared_codes,
)
from analyzer.tables.complexity import FORMULAS, GGML_TYPES, OperatorWork, TensorLookup
from analyzer.tables.nodes import NEVER_RUN, OperatorRecords
from analyzer.tables.steps import Graphs, Steps, fault_counts

COUNTER = 0xFFFFFFFF
"""Page faults are counted in 32 bits."""
FUSED = tuple(name for name in FORMULAS if "+" in name)
"""Pairs of types that engines compute in one go and report as the second."""

LAYER = re.compile(r"-(\d+)(?:$|[ #])|^blk\.(\d+)\.|_l(\d+)(?:$| )")


def layer_of(name: str) -> int:
    """The layer in a ggml tensor's name (ffn_out-0, blk.3.attn_q.weight, cache_k_l2); -1 for none."""
    match = LAYER.search(name)
    return int(next(group for group in match.groups() if group)) if match else NONE


@dataclass
class OperatorThreads:
    """One row for each operator on each thread, sorted by begin."""

    rows: Rows
    begin: np.ndarray
    wait: np.ndarray
    end: np.ndarray
    complete: np.ndarray
    maj_flt: np.ndarray
    min_flt: np.ndarray
    merged: np.ndarray  # bool: the engine runs one operator on several threads
    step: np.ndarray
    graph: np.ndarray
    result: np.ndarray  # index of its result's identity in `results`
    results: np.ndarray

    @cached_property
    def nest(self) -> NestedSpans:
        """The operators of each thread as nested spans; an unfinished one includes its last instant."""
        return NestedSpans(self.rows["tid"], self.begin, self.end + ~self.complete)


def op_threads(source: Source, announced: OperatorRecords, steps: Steps, graphs: Graphs) -> OperatorThreads:
    """Every operator on every thread, with its end, its wait, and the graph and step that enclose it."""
    begin, ends = announced.begin, source.rows("op_end")
    paired = np.isin(begin["engine"], distinct_sorted(ends["engine"]))
    n = len(begin)
    end, complete = begin["ts"].copy(), np.zeros(n, bool)
    major, minor = np.full(n, NONE, np.int64), np.full(n, NONE, np.int64)
    ending = begin.where(paired)
    spans = source.spans("op", ("tensor",), unknown=0, begin=ending)
    end[paired], complete[paired] = spans.end_ns, spans.complete
    major[paired], minor[paired] = (fault_counts(ending, ends, spans.end, field) for field in ("maj_flt", "min_flt"))
    identity = address_numbers(begin["pid"], begin["tensor"])
    step = steps_of(steps, begin, identity)
    if not paired.all():
        loose = ~paired
        end[loose], complete[loose], major[loose], minor[loose] = bounded_ends(source, begin.where(loose), step[loose], steps)
    shared = begin["done_ns"] > 0
    major[shared], minor[shared] = (begin[field][shared] for field in ("maj_flt", "min_flt"))
    wait = wait_begins(announced.wait, begin, end)
    result, first = number_rows(identity)
    return OperatorThreads(
        begin, begin["ts"], wait, end, complete, major, minor, ~paired, step, graphs.of(begin), result, identity[first]
    )


def steps_of(steps: Steps, begin: Rows, result: np.ndarray) -> np.ndarray:
    """token_id of each begin: of its thread's step, else of the step in which another thread began the same result.

    If the steps of several threads overlap, worker threads are assigned by the result that they work on; otherwise the step is
    that of the process.
    """
    if len(distinct_sorted(steps.begin["tid"])) < 2:
        return steps.of(begin)
    row = np.full(len(begin), NONE, np.int64)
    if_lasting((steps.begin["tid"], steps.begin["ts"], steps.until), (begin["tid"], begin["ts"]), row)
    row = share_spans(row, result, begin["ts"], (steps.begin["ts"], steps.until))
    return np.where(row >= 0, row + steps.first, steps.of(begin))


def bounded_ends(source: Source, begin: Rows, step: np.ndarray, steps: Steps) -> tuple[np.ndarray, ...]:
    """(end, end is known, major faults, minor faults) of operators for which the engine reports begins but no ends.

    End: the thread's next operator, or the next end of a graph or step on the thread that runs the step (of the process, if
    there is no step). An operator that nothing of its step ends, ends with the step or with the recording. Faults: up to the
    thread's next fault counts, those of its next operator or of the end of its step, whichever is first; -1 if neither is of the
    same step.
    """
    closing, graph = source.rows("token_end"), source.rows("graph_end")
    ended = np.flatnonzero(steps.spans.end >= 0)
    ended = ended[np.argsort(closing["ts"][steps.spans.end[ended]], kind="stable")]
    reading, ts = closing.where(steps.spans.end[ended]), int64_codes(begin["ts"])

    leader = at_rows(steps.begin["tid"], np.where(step >= 0, step - steps.first, NONE), NONE)

    def next_of(rows: Rows) -> np.ndarray:
        of_process = following(rows["pid"], rows["ts"], begin["pid"], ts)
        return np.where(leader >= 0, following(rows["tid"], rows["ts"], leader, ts), of_process)

    after, read = next_in_group(begin["tid"], ts), following(reading["tid"], reading["ts"], begin["tid"], ts - 1)
    operator_ns, read_ns = at_rows(ts, after, EVER), at_rows(reading["ts"], read, EVER)
    step_ns = at_rows(source.step_begins, np.searchsorted(source.step_begins, ts, "right"), EVER)
    end = np.minimum(operator_ns, at_rows(graph["ts"], next_of(graph), EVER))
    end = np.minimum(end, at_rows(closing["ts"], next_of(closing), EVER))
    by_reading = read_ns < operator_ns
    owner = np.where(by_reading, at_rows(steps.first + ended, read, EVER), at_rows(step, after, EVER))
    same = (owner == step) & (np.minimum(read_ns, operator_ns) < step_ns)
    faults = []
    for field in ("maj_flt", "min_flt"):
        then = np.where(by_reading, at_rows(reading[field], read, 0), at_rows(begin[field], after, 0))
        faults.append(np.where(same, (then - begin[field]) & COUNTER, NONE))
    return np.where(end < step_ns, end, np.minimum(step_ns, source.last_ns)), end < step_ns, *faults


def at_rows(column: np.ndarray, row: np.ndarray, missing: int) -> np.ndarray:
    """The column at these rows; `missing` for row -1 and for the row after the last."""
    return np.append(int64_codes(column), missing)[row]


def wait_begins(mark: Rows, begin: Rows, end: np.ndarray) -> np.ndarray:
    """The last begin of a wait within the operator on its thread, else its end. Earlier barriers are part of the operator."""
    marked_ns = at_rows(mark["ts"], latest(mark["tid"], mark["ts"], begin["tid"], end - 1), NONE)
    marked_ns = np.where(begin["done_ns"] > 0, begin["done_ns"], marked_ns)
    return np.where((marked_ns > begin["ts"]) & (marked_ns < end), marked_ns, end)


def merge_threads(source: Source, operators: OperatorThreads, graphs: Graphs) -> tuple[np.ndarray, np.ndarray]:
    """(operator number of each row, first row of each operator): operators are numbered in order of begin.

    Threads share an operator at the same occurrence of the same tensor in the same step, and in the same graph if known: some
    builds start new threads for each graph.
    """
    rows = operators.rows
    numbers = np.arange(len(rows))
    if not operators.merged.any() or len(distinct_sorted(rows["tid"])) < 2:
        return numbers, numbers
    step = operators.step
    if step.min() < 0:  # operators between steps
        step = np.where(step < 0, NONE - np.searchsorted(source.step_begins, rows["ts"], "right"), step)
    work, first = number_rows(operators.result, step, rows["engine"])
    thread, threads = number_rows(rows["tid"])
    runs = work * len(threads) + thread
    if len(number_rows(runs)[1]) < len(runs):  # a thread runs an operator more than once within a step
        own = np.where(operators.graph >= 0, operators.graph - graphs.first, NONE)
        graph = share_spans(own, work, operators.begin, (graphs.begin["ts"], graphs.spans.until()))
        work, first = number_rows(work, graph if (graph >= 0).all() else running_count(runs, operators.begin))
    return (work, first) if operators.merged.all() else number_rows(np.where(operators.merged, work, len(rows) + numbers))


def reduce_threads(operators: OperatorThreads, op_id: np.ndarray, first: np.ndarray) -> dict[str, np.ndarray]:
    """The numeric columns of each operator, aggregated over its threads; `first` is its first row.

    It ends when its last thread is done: they leave its barrier one by one, when others already compute the next operator.
    """
    n = len(first)
    end, graph = operators.wait[first], operators.graph[first]
    np.maximum.at(end, op_id, operators.wait)
    np.maximum.at(graph, op_id, operators.graph)
    return {
        "begin_ns": operators.begin[first],  # rows come in order of begin
        "end_ns": end,
        "complete": np.bincount(op_id[~operators.complete], minlength=n) == 0,
        "n_threads": np.bincount(op_id, minlength=n),
        "busy_ns": group_sums(op_id, operators.wait - operators.begin, n),
        "wait_ns": group_sums(op_id, np.minimum(end[op_id], operators.end) - operators.wait, n),
        "maj_flt": known_total(op_id, operators.maj_flt, n),
        "min_flt": known_total(op_id, operators.min_flt, n),
        "step": operators.step[first],
        "graph": graph,
    }


def group_sums(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    """The sum of each group's values."""
    answer = np.zeros(groups, np.int64)
    np.add.at(answer, group, values)
    return answer


def known_total(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    """The sum of each group's known values (>= 0); -1 if none is known."""
    some = np.zeros(groups, bool)
    some[group[values >= 0]] = True
    return np.where(some, group_sums(group, np.maximum(values, 0), groups), NONE)


def tensor_table(source: Source) -> pd.DataFrame:
    """The table `tensors`: one row for each definition; long source lists are joined from their parts."""
    rows = source.rows("tensor")
    if len(rows) == 0:
        return empty_table("tensors")
    head = rows.where(rows["first"] == 0)
    dims, names = head["ne"], decode_texts(head["name"])
    shape = ["x".join(str(d) for d in row if d > 0) for row in dims.tolist()]
    return conform(
        "tensors",
        {
            "engine": source.engines(head["engine"]),
            "pid": head["pid"],
            "tensor": head.raw("tensor"),
            "type": source.named(head["engine"], head["type"], "operators"),
            "name": names,
            "shape": np.array([*shape, ""], object)[:-1],
            "dtype": element_types(head, shape),
            "bytes": np.where(head["bytes"] > 0, head["bytes"], NONE),
            "sources": source_lists(rows, head),
            "since_ns": head["ts"],
        },
    )


def element_types(head: Rows, shape: list[str]) -> np.ndarray:
    """The name of each tensor's element type, by ggml's numbers; "" if no shape, and therefore no type, was recorded."""
    names = [GGML_TYPES.get(number, ("",))[0] if dims else "" for number, dims in zip(head["dtype"].tolist(), shape, strict=True)]
    return np.array([*names, ""], object)[:-1]


def source_lists(rows: Rows, head: Rows) -> np.ndarray:
    """The sources of each definition, including those of its continuation records; empty slots dropped."""
    answer = np.empty(len(head), object)
    sources = rows.records["sources"].astype(np.uint64)
    owner = latest(codes_of(head), head["ts"], codes_of(rows), rows["ts"])
    order = np.lexsort((rows["first"], owner))
    slot = rows["first"][order, None] + np.arange(sources.shape[1])
    used = (sources[order] != 0) & (slot < rows["n_sources"][order, None]) & (owner[order, None] >= 0)
    owners = np.repeat(owner[order], used.sum(axis=1))
    cuts = np.searchsorted(owners, np.arange(1, len(head)))
    answer[:] = [*np.split(sources[order][used], cuts), None][: len(head)]
    return answer


def codes_of(rows: Rows) -> np.ndarray:
    """A number for each (process, tensor), the same in all records of a recording."""
    return rows["tensor"] ^ (rows["pid"] << 48)


class Definitions:
    """The tensors of a recording, with the types, names and layers that their definitions give."""

    def __init__(self, source: Source):
        self.table = tensor_table(source)
        self.described = TensorLookup(self.table)
        self.types = self.table["type"].to_numpy()
        self.names, self.shapes = self.table["name"].to_numpy(), self.table["shape"].to_numpy()
        self.same = self.table.groupby(["pid", "tensor", "type", "name", "shape"], sort=False).ngroup().to_numpy()
        """A number for each definition that those of the same result share: engines' results are described more than once."""
        self.layers = np.array([layer_of(name) for name in self.names], np.int64)
        self.work = OperatorWork(self.table, self.described)


@dataclass
class FirstNumbers:
    """The numbers of the first rows of a time range, and the number of earlier operators outside steps."""

    operator: int = 0
    graph: int = 0
    run: int = 0
    loose: int = 0


def build_operators(
    source: Source, announced: OperatorRecords, steps: Steps, graphs: Graphs, definitions: Definitions, first_of: FirstNumbers
) -> tuple[dict[str, Any], OperatorThreads, np.ndarray]:
    """(columns of `operators` except names, rows per thread, operator number of each row, from 0)."""
    operators = op_threads(source, announced, steps, graphs)
    op_id, first = merge_threads(source, operators, graphs)
    merged = reduce_threads(operators, op_id, first)
    rows = operators.rows.where(first)
    step = merged.pop("step")
    order = running_count(step - NONE, merged["begin_ns"])
    columns: dict[str, Any] = {
        "op_id": first_of.operator + np.arange(len(first)),
        "token_id": step,
        "graph_id": merged.pop("graph"),
        **source.thread(rows),
        "type": source.named(rows["engine"], rows["type"], "operators"),
        "n_tokens": rows["n_tokens"],
        "tensor": rows.raw("tensor"),
        "order": np.where(step < 0, first_of.loose + order, order),
        **merged,
        "duration_ns": merged["end_ns"] - merged["begin_ns"],
    }
    columns["described_ns"] = described_by(merged["end_ns"], columns["graph_id"] - first_of.graph, graphs, rows["done_ns"] > 0)
    described = definitions.described.rows_of(operators.result[first], operators.results, columns["described_ns"])
    columns["described"], columns["layer"] = described, rows["layer"]
    columns["shape"] = text_array(described, np.append(definitions.shapes, ""))
    made = np.where(np.append(np.isin(definitions.types, NEVER_RUN), False)[described], NONE, described)  # a copy has no producer
    columns["type"] = where_described(columns["type"], made, definitions.types)
    columns["type"] = fused_types(columns, definitions, rows["pid"])
    if len(definitions.layers):
        columns["layer"] = np.where((described >= 0) & (rows["layer"] < 0), definitions.layers[described], rows["layer"])
    return columns, operators, op_id


def described_by(end_ns: np.ndarray, graph: np.ndarray, graphs: Graphs, by_share: np.ndarray) -> np.ndarray:
    """The time up to which definitions of each operator and its sources count: its end; if made from a share, its graph's end.

    `graph` has the row of each operator's graph, negative for none.
    """
    late = by_share & (graph >= 0)
    return np.where(late, np.maximum(end_ns, np.append(graphs.spans.end_ns, 0)[np.where(late, graph, NONE)]), end_ns)


def where_described(default: pyarrow.DictionaryArray, described: np.ndarray, values: np.ndarray) -> pyarrow.DictionaryArray:
    """values[described]; `default` where `described` is -1."""
    row = np.where(described >= 0, described, len(values) + default.indices.to_numpy())
    return text_array(row, [*values, *default.dictionary.to_pylist()])


def fused_types(columns: Columns, definitions: Definitions, pid: np.ndarray) -> pyarrow.DictionaryArray:
    """The operators' types; "A+B" if the first source of B is the result of an A that did not run in the same step.

    Definitions are compared, not only addresses, and step by step: other graphs use the same memory for other results, or
    compute the same A by itself on another device.
    """
    described, step = columns["described"], np.where(columns["token_id"] >= 0, columns["token_id"], -2 - columns["graph_id"])
    source, maker = definitions.work.sources[described, 0], np.full(len(described), NONE)
    real = np.flatnonzero(source != 0)
    maker[real] = definitions.described.rows(pid[real], source[real], columns["described_ns"][real])
    same = np.append(definitions.same, NONE)
    ran, sought = shared_codes((step, same[described]), (step, same[maker]))
    absent = (maker >= 0) & ~np.isin(sought, ran)
    code, kinds = columns["type"].indices.to_numpy().copy(), [*columns["type"].dictionary.to_pylist(), *FUSED]
    for number, pair in enumerate(FUSED, len(kinds) - len(FUSED)):
        first, second = pair.split("+")
        code[absent & np.append(definitions.types == first, False)[maker] & equals_any(columns["type"], second)] = number
    return text_array(code, kinds)


def finish_operators(
    columns: Columns, definitions: Definitions, operators: OperatorThreads, op_id: np.ndarray, experts: Rows
) -> np.ndarray:
    """Add `expert` and `name` to the operators' columns; returns the operator number of each expert run."""
    enclosing = np.full(len(experts), NONE, np.int64)
    if len(experts) and len(op_id):
        inner = operators.nest.innermost(experts["tid"], experts["ts"])
        enclosing = np.where(inner >= 0, op_id[inner], NONE)
    columns["expert"] = sole_expert(len(columns["op_id"]), enclosing, experts["expert"])
    named = np.append(definitions.names != "", False).astype(bool)[columns["described"]]
    described = np.where(named, columns["described"], NONE)
    columns["name"] = where_described(composed_names(columns, ~named), described, definitions.names)
    return enclosing


def composed_names(columns: Columns, unnamed: np.ndarray) -> pyarrow.DictionaryArray:
    """Names composed of type, layer and expert, for operators without a name."""
    rows, answer = np.flatnonzero(unnamed), np.full(len(unnamed), NONE)
    kind, kinds = columns["type"].indices.to_numpy(), columns["type"].dictionary.to_pylist()
    answer[rows], first = number_rows(*(column[rows] for column in (kind, columns["layer"], columns["expert"])))
    parts = (column[rows[first]].tolist() for column in (kind, columns["layer"], columns["expert"]))
    names = [".".join(str(p) for p in (kinds[t], *place) if p != NONE) for t, *place in zip(*parts, strict=True)]
    return text_array(answer, [*names, ""])


def sole_expert(n_operators: int, operator: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """The expert that ran within each operator; -1 if none or several did."""
    answer = np.full(n_operators, NONE, np.int64)
    inside = np.flatnonzero(operator >= 0)
    order = inside[np.argsort(operator[inside], kind="stable")]
    starts = first_of_runs(operator[order])
    if len(starts):
        low, high = np.minimum.reduceat(expert[order], starts), np.maximum.reduceat(expert[order], starts)
        answer[operator[order[starts]]] = np.where(low == high, low, NONE)
    return answer


def thread_table(operators: OperatorThreads, op_id: np.ndarray) -> pyarrow.Table:
    """The table `op_threads`; `op_id` as in the table `operators`."""
    times = {"begin_ns": operators.begin, "wait_ns": operators.wait, "end_ns": operators.end}
    return arrow_table("op_threads", {"op_id": op_id, "tid": operators.rows["tid"], **times})
