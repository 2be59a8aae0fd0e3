"""The slices on the program's own threads: from tables to slices with name, category and arguments.

Slices of one thread must nest; `lanes` moves those that do not to separate lanes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

import numpy as np
import pandas as pd
import pyarrow

from analyzer.questions.accelerators import first_waits
from analyzer.questions.experts import prefetched_runs
from analyzer.questions.parts import given_away
from views.timeline.protobuf import _messages

Tables = Mapping[str, pd.DataFrame]
SMALL = 1 << 16
PREFETCH, STEP, BATCH = 1 << 41, 1 << 42, 1 << 43  # offsets of flow ids of loads, steps and batches, distinct from graphs'


def drawn_frame(table: pyarrow.Table) -> pd.DataFrame:
    """A table as a new pandas frame, texts as categories, without copying values.

    Columns are looked up hundreds of times, at five times the cost if their names are Arrow strings.
    """
    return whole_frame(table) if table.num_rows else empty_frame(table.schema).copy()


@cache
def empty_frame(schema: pyarrow.Schema) -> pd.DataFrame:
    """The frame of a table without rows, as most tables of a recording are; copying it takes a tenth of making it."""
    return whole_frame(schema.empty_table())


def whole_frame(table: pyarrow.Table) -> pd.DataFrame:
    """See `drawn_frame`."""
    frame = pd.DataFrame(dict(enumerate(map(drawn_column, table.columns))), copy=False)
    frame.columns = pd.Index(table.column_names, dtype=object)
    return frame


def drawn_column(column: pyarrow.ChunkedArray) -> np.ndarray | pd.Categorical:
    """One column, which must have no nulls."""
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # combining would copy a single chunk
    if not pyarrow.types.is_dictionary(chunk.type):
        return chunk.to_numpy(zero_copy_only=False)
    labels = pd.Index(chunk.dictionary.to_numpy(zero_copy_only=False), dtype=object)
    return pd.Categorical.from_codes(chunk.indices.to_numpy(), labels, validate=False)


def text_column(codes: np.ndarray, labels: list[str]) -> pyarrow.DictionaryArray:
    """The texts `labels[codes[i]]`; labels may repeat."""
    return pyarrow.DictionaryArray.from_arrays(codes.astype(np.int64, copy=False), pyarrow.array(labels, pyarrow.string()))


def text_of(column: pd.Series | list[str]) -> pyarrow.DictionaryArray:
    """A text column as a dictionary array."""
    texts = pd.Categorical(column if isinstance(column, pd.Series) else pd.Series(column, dtype=object))
    return text_column(texts.codes, [str(label) for label in texts.categories])


def joined(make: Callable[..., str], *columns: pd.Series) -> pyarrow.DictionaryArray:
    """`make(a, b, ...)` for each row of the columns, called once per distinct row."""
    code, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        codes, n = coded(column)
        code, count = code * n + codes, count * n
        if count > SMALL:
            code, among = dense(code, count)
            count = len(among)
    code, among = dense(code, count)
    first = np.empty(len(among), np.int64)
    first[code] = np.arange(len(code))
    return text_column(code, [make(*row) for row in zip(*(column.iloc[first].tolist() for column in columns), strict=True)])


def coded(column: pd.Series) -> tuple[np.ndarray, int]:
    """(codes, n): a number below `n` for each row, equal for equal rows."""
    if column.dtype.kind == "O":
        texts = pd.Categorical(column)
        return texts.codes.astype(np.int64), len(texts.categories)
    values = column.to_numpy(np.int64)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low < SMALL:
        return values - low, high - low + 1
    codes, labels = distinct(values)
    return codes, len(labels)


def equals(column: pd.Series, text: str) -> np.ndarray:
    """Which rows of a text column equal this text [bool]."""
    return np.asarray(column == text)


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, labels) of integers: `labels[codes[i]]` is `values[i]`."""
    low = int(values.min(initial=0))
    codes, labels = dense(values.astype(np.int64) - low, int(values.max(initial=0)) - low + 1)
    return codes, labels + low


def dense(values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for numbers from 0 to `n` - 1."""
    if n > max(SMALL, 4 * len(values)):
        return pd.factorize(values)
    seen = np.zeros(n, bool)
    seen[values] = True
    return (np.cumsum(seen) - 1)[values], np.flatnonzero(seen)


Column: TypeAlias = np.ndarray | pyarrow.DictionaryArray


@dataclass
class Slices:
    """Slices or instants of one category. An argument that is -1 or "" is not written.

    `flow`: the flow id of each, `step_flow`: that of the flow from a step to its graphs on other threads; 0: none.
    `row`: the row of `name` and `args` for each slice, if several share one, like the threads of an operator; `own`: additional
    arguments of each slice.
    """

    category: str
    name: pyarrow.DictionaryArray
    tid: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    complete: np.ndarray
    args: dict[str, Column] = field(default_factory=dict)
    flow: np.ndarray | None = None
    instant: bool = False
    ends_flow: np.ndarray | None = None
    step_flow: np.ndarray | None = None
    row: np.ndarray | None = None
    own: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, rows: np.ndarray) -> "Slices":
        """The slices in these rows."""
        columns = {name: column[rows] for name in PER_SLICE if (column := getattr(self, name)) is not None}
        some = replace(self, **columns, own=taken(self.own, rows))
        return some if self.row is not None else replace(some, name=self.name.take(rows), args=taken(self.args, rows))

    def alone(self) -> "Slices":
        """The same slices, each with its own row of `name` and `args`."""
        if self.row is None:
            return self
        return replace(self, name=self.name.take(self.row), args=taken(self.args, self.row) | self.own, row=None, own={})


PER_SLICE = ("tid", "begin", "end", "complete", "flow", "ends_flow", "step_flow", "row")
"""The members of Slices with an item for each slice, if any."""


def taken(args: dict[str, Column], rows: np.ndarray) -> dict[str, Column]:
    """The arguments in these rows."""
    return {label: column.take(rows) for label, column in args.items()}


def ints(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Integer columns as arguments."""
    return {name: frame[name].to_numpy(np.int64) for name in names}


def texts(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Text columns as arguments."""
    return {name: text_of(frame[name]) for name in names}


def positive(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Integer columns as arguments if above zero: counts of 0 are omitted to save space."""
    return {name: np.where(column > 0, column, -1) for name, column in ints(frame, *names).items()}


def several_tokens(frame: pd.DataFrame) -> dict[str, Column]:
    """`n_tokens` as argument if above one: most slices have one row, and readers store every argument."""
    tokens = frame["n_tokens"].to_numpy(np.int64)
    return {"n_tokens": np.where(tokens > 1, tokens, -1)}


def of_frame(category: str, name: pyarrow.DictionaryArray, frame: pd.DataFrame, args: dict[str, Column]) -> Slices:
    """Slices from a table with the span columns."""
    tid, begin, end = (frame[c].to_numpy(np.int64) for c in ("tid", "begin_ns", "end_ns"))
    return Slices(category, name, tid, begin, end, frame["complete"].to_numpy(bool), args)


def place(kind: str, layer: int, expert: int) -> str:
    """`kind.layer.expert`, without unknown parts."""
    return ".".join([kind or "graph", *(str(i) for i in (layer, expert) if i >= 0)])


def step_name(phase: str, token: int, position: int, n_tokens: int, context: int) -> str:
    """A step's phase, number and position: `decode 17 at position 64`, `prefill 0: 48 tokens`.

    Includes the context if the process has several: `decode 17 in context 1`.
    """
    name = f"{phase or 'step'} {token}" + (f" in context {context}" if context >= 0 else "")
    if n_tokens > 1:
        return f"{name}: {n_tokens} tokens"
    return f"{name} at position {position}" if position >= 0 else name


def token_slices(tables: Tables) -> Slices:
    """One slice per step of the model."""
    frame = tables["tokens"]
    args = texts(frame, "phase") | ints(frame, "token_id", "seq", "n_tokens", "position", "context", "result")
    several = frame["context"].groupby(frame["pid"]).transform("max") > 0
    context = frame["context"].where(several, -1)
    name = joined(step_name, frame["phase"], frame["token_id"], frame["position"], frame["n_tokens"], context)
    slices = of_frame("token", name, frame, args | positive(frame, "maj_flt", "min_flt"))
    slices.step_flow = np.where(np.isin(frame["token_id"], graph_steps(tables)), frame["token_id"] + STEP, 0)
    return slices


def graph_steps(tables: Tables) -> np.ndarray:
    """For each graph that ran on another thread than its step, the step's token_id; else -1."""
    frame, steps = tables["graphs"], tables["tokens"]
    row = rows_of(steps["token_id"], frame["token_id"])
    step_tid = np.append(steps["tid"].to_numpy(np.int64), -1)[row]
    elsewhere = (step_tid >= 0) & (step_tid != frame["tid"].to_numpy())
    return np.where(elsewhere, frame["token_id"].to_numpy(np.int64), -1)


def repeats_operator(tables: Tables, rows: pd.DataFrame) -> pd.Series:
    """Which graphs or expert runs are within an operator of the same step, layer and expert, whose name has these [bool]."""
    operators = tables["operators"]
    named, places = model_places(operators, rows)
    return pd.Series(np.isin(places, named[operators["layer"].to_numpy() >= 0]))


def repeats_kind(tables: Tables, graphs: pd.DataFrame) -> np.ndarray:
    """Which graphs without a layer are within an operator of the same step and name [bool]."""
    operators, repeated = tables["operators"], np.zeros(len(graphs), bool)
    apart = np.flatnonzero(graphs["layer"].to_numpy() < 0)
    if not len(apart):
        return repeated
    mine, theirs = graphs.iloc[apart], operators[operators["layer"].to_numpy() < 0]
    given, kinds = pd.factorize(mine["kind"])
    types, labels = pd.factorize(theirs["type"])
    named = pd.Index(kinds).get_indexer(labels)[types]
    steps, own_steps = (frame["token_id"].to_numpy(np.int64) * len(kinds) for frame in (theirs, mine))
    repeated[apart] = np.isin(own_steps + given, (steps + named)[named >= 0])
    return repeated


def model_places(*frames: pd.DataFrame) -> list[np.ndarray]:
    """One number for the step, layer and expert of each row, consistent across frames and as small as possible for look-ups."""
    columns = [[frame[name].to_numpy(np.int64) + 1 for name in ("token_id", "layer", "expert")] for frame in frames]
    layers, experts = (max(int(column[i].max(initial=0)) for column in columns) + 1 for i in (1, 2))
    return [(token * layers + layer) * experts + expert for token, layer, expert in columns]


def graph_name(kind: str, layer: int, expert: int, backend: str, repeated: bool) -> str:
    """A graph's kind, layer and expert, or only its backend if the enclosing operator's name has these (`repeated`)."""
    if kind == "wait":
        return f"wait for {backend.upper()}"
    return f"graph on {backend.upper()}" if repeated and backend else place(kind, layer, expert)


def run_name(layer: int, expert: int, cache: str, repeated: bool) -> str:
    """The expert, or only its cache state if the enclosing operator names the expert (`repeated`)."""
    return f"cache {cache}" if repeated and cache else place("expert", layer, expert)


def graph_slices(tables: Tables) -> Slices:
    """One slice per graph run; submissions start a flow to the NPU or the wait; graphs on other threads join the step's flow."""
    frame = tables["graphs"]
    submitted = frame["graph_id"].isin(tables["qnn_executes"]["graph_id"]).to_numpy()
    args = texts(frame, "backend", "name") | ints(frame, "layer", "expert") | several_tokens(frame) | positive(frame, "tier")
    args["status"] = np.where(frame["status"] != 0, frame["status"], -1).astype(np.int64)
    repeated = repeats_operator(tables, frame) | repeats_kind(tables, frame)
    name = joined(graph_name, frame["kind"], frame["layer"], frame["expert"], frame["backend"], repeated)
    slices = of_frame("graph", name, frame, args)
    flow = np.where(submitted, frame["graph_id"] + 1, 0).astype(np.int64)
    slices.flow, slices.ends_flow = flow_to_waits(tables, flow)
    step = graph_steps(tables)
    slices.step_flow = np.where(step >= 0, step + STEP, 0)
    return slices


def flow_to_waits(tables: Tables, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(flow ids of graphs, including flows from a submission to the wait for it; which graphs end their flow)."""
    given = given_away(tables)
    if not len(given):
        return flow, np.zeros(len(flow), bool)
    waits = first_waits(tables, given)["graph_id"].to_numpy(np.int64)
    ids, given_ids = tables["graphs"]["graph_id"], given["graph_id"].to_numpy(np.int64)[waits >= 0]
    begun, ended = rows_of(ids, pd.Series(given_ids)), rows_of(ids, pd.Series(waits[waits >= 0]))
    flow[begun] = flow[ended] = given_ids + 1
    return flow, np.isin(np.arange(len(flow)), ended)


def operator_name(kind: str, name: str) -> str:
    """The type, then the name, so that lists group equal work; only the name if it contains the type."""
    return name if name.startswith(kind) else f"{kind} {name}"


def rows_of(ids: pd.Series, sought: pd.Series) -> np.ndarray:
    """The row of each `sought` id, -1 for none; fast for ids that are row numbers, as in most tables."""
    existing, sought_ids = ids.to_numpy(np.int64), sought.to_numpy(np.int64)
    if np.array_equal(existing, np.arange(len(existing))):
        return np.where((sought_ids >= 0) & (sought_ids < len(existing)), sought_ids, -1)
    return pd.Index(existing).get_indexer(sought_ids)


def moved(frame: pd.DataFrame) -> dict[str, Column]:
    """An operator's minimum bytes and its speed, if its shapes are known."""
    work = (frame["read_bytes"] + frame["written_bytes"]).fillna(-1).to_numpy()
    rate = np.where(work > 0, 1e3 * work / frame["duration_ns"].clip(lower=1).to_numpy(), -1)
    return {"bytes": np.where(work > 0, work, -1).astype(np.int64), "MB_per_s": rate.astype(np.int64)}


def operator_slices(tables: Tables) -> tuple[Slices, Slices]:
    """One slice per operator and thread, and within it one for the thread's wait for the others.

    An operator without thread rows is drawn on the thread that began it.
    """
    frame, threads = tables["operators"], tables["op_threads"]
    args = texts(frame, "shape") | ints(frame, "layer", "expert") | several_tokens(frame) | positive(frame, "maj_flt")
    if frame["read_bytes"].notna().any():
        args |= moved(frame)
    operators = of_frame("operator", joined(operator_name, frame["type"], frame["name"]), frame, args)
    row = rows_of(frame["op_id"], threads["op_id"])
    matched, has_threads = np.flatnonzero(row >= 0), np.zeros(len(frame), bool)
    has_threads[row[matched]] = True
    alone = np.flatnonzero(~has_threads)
    on_threads = (threads[column].to_numpy(np.int64)[matched] for column in ("tid", "begin_ns", "end_ns", "wait_ns"))
    elsewhere = (column[alone] for column in (operators.tid, operators.begin, operators.end, operators.end))
    tid, begin, end, since = (np.concatenate(both) for both in zip(on_threads, elsewhere, strict=True))
    row, wait = np.concatenate([row[matched], alone]), np.maximum(end - since, 0)
    own_args: dict[str, Column] = {"wait_ns": np.where(wait > 0, wait, -1)}
    slices = replace(operators, tid=tid, begin=begin, end=end, complete=operators.complete[row], row=row, own=own_args)
    waited = np.flatnonzero((wait > 0) & slices.complete)
    label = text_column(np.zeros(len(waited), np.int64), ["wait for threads"])
    since, end = since[waited], end[waited]
    return slices, Slices("wait", label, tid[waited], since, end, np.ones(len(waited), bool))


def flow_of(ids: pd.Series, column: pd.Series, flow: pd.Series) -> np.ndarray:
    """The flow ids of rows: `flow` of the pair whose `column` equals the row's id, else 0."""
    if not len(column):
        return np.zeros(len(ids), np.int64)
    return ids.map(dict(zip(column.tolist(), flow.tolist(), strict=True))).fillna(0).to_numpy(np.int64)


def expert_slices(tables: Tables, used: pd.DataFrame) -> Slices:
    """One slice per expert run; runs that used a prefetched expert end the prefetch's flow."""
    frame = tables["experts"]
    name = joined(run_name, frame["layer"], frame["expert"], frame["cache"], repeats_operator(tables, frame))
    args = texts(frame, "cache", "backend") | ints(frame, "layer", "expert") | several_tokens(frame)
    args |= positive(frame, "tier", "maj_flt")
    slices = of_frame("expert", name, frame, args)
    slices.flow = flow_of(frame["run_id"], used["run_id"], used["load_id"] + PREFETCH)
    slices.ends_flow = slices.flow > 0
    return slices


def load_slices(tables: Tables, used: pd.DataFrame) -> tuple[Slices, Slices]:
    """Expert loads as slices, evictions as instants; used prefetches begin a flow."""
    frame = tables["loads"]
    name = joined(place, frame["action"], frame["layer"], frame["expert"])
    both = of_frame("cache", name, frame, ints(frame, "bytes", "resident_bytes") | texts(frame, "reason", "backend"))
    both.flow = flow_of(frame["load_id"], used["load_id"], used["load_id"] + PREFETCH)
    evicted = equals(frame["action"], "evict")
    return both.take(np.flatnonzero(~evicted)), replace(both.take(np.flatnonzero(evicted)), instant=True)


def qnn_call_slices(tables: Tables) -> Slices:
    """Context and graph calls of QNN on their threads."""
    frame = tables["qnn_calls"]
    return of_frame("qnn", text_of(frame["call"]), frame, texts(frame, "name") | ints(frame, "bytes", "status"))


def batch_call_slices(tables: Tables) -> tuple[Slices, Slices]:
    """The sending of a batch to an NPU queue, which begins its flow, and the wait for its response, which ends it."""
    frame = tables["npu_batches"].assign(complete=True)
    sent, waited = frame[frame["submit_ns"] >= 0], frame[frame["wait_ns"] >= 0]
    sent = sent.assign(end_ns=sent["begin_ns"] + sent["submit_ns"])
    waited = waited.assign(begin_ns=waited["end_ns"] - waited["wait_ns"])
    sending = of_frame("npu", text_of(["send batch"] * len(sent)), sent, {})
    waiting = of_frame("npu", text_of(["wait for batch"] * len(waited)), waited, {})
    for slices, rows in ((sending, sent), (waiting, waited)):
        slices.flow = rows["batch_id"].to_numpy(np.int64) + BATCH
    waiting.ends_flow = np.ones(len(waited), bool)
    return sending, waiting


def call_slices(tables: Tables) -> tuple[Slices, Slices]:
    """Calls of functions that the user named, as slices; as instants if probed at one end only."""
    frame = tables["calls"]
    args = texts(frame, "args") | positive(frame, "depth")
    both = of_frame("call", text_of(frame["function"]), frame, args)
    lasting = equals(frame["at"], "both")
    return both.take(np.flatnonzero(lasting)), replace(both.take(np.flatnonzero(~lasting)), instant=True)


def lone_execute_slices(tables: Tables) -> Slices:
    """Executions outside the engine's graphs: the call itself is drawn on the thread and starts the flow."""
    frame = tables["qnn_executes"]
    frame = frame[frame["graph_id"] < 0]
    slices = of_frame("qnn", text_column(np.zeros(len(frame), np.int64), ["graphExecute"]), frame, texts(frame, "graph_name"))
    slices.flow = execute_flow(frame)
    return slices


def execute_flow(executes: pd.DataFrame) -> np.ndarray:
    """Flow id of an execution: its graph's, else a separate one."""
    ids = executes["graph_id"] + 1
    return np.where(ids > 0, ids, (1 << 40) + executes["execute_id"]).astype(np.int64)


def file_name(file: str) -> str:
    """A path without its folder."""
    return file.rsplit("/", 1)[-1] or "memory"


def read_slices(tables: Tables) -> Slices:
    """One slice per read of a file."""
    frame = tables["reads"]
    name = joined(lambda call, file: f"{call} {file_name(file)}", frame["call"], frame["file"])
    args = texts(frame, "file") | ints(frame, "offset", "bytes") | positive(frame, "missed_bytes", "error")
    return of_frame("io", name, frame, args)


def major_fault_slices(tables: Tables) -> tuple[Slices, Slices]:
    """Major page faults: slices, and instants where their begin is unknown."""
    frame = tables["faults"]
    frame = frame[frame["kind"] == "major"].assign(complete=True)
    name = joined(lambda file: f"major fault {file_name(file)}", frame["file"])
    both = of_frame("io", name, frame, texts(frame, "file") | ints(frame, "offset", "bytes"))
    timed = (frame["duration_ns"] >= 0).to_numpy()
    return both.take(np.flatnonzero(timed)), replace(both.take(np.flatnonzero(~timed)), instant=True)


def close_open(slices: Slices, end: int) -> Slices:
    """Limit an unfinished slice to the begin of its thread's next one of the kind, else to the trace's end."""
    opened = ~slices.complete
    if slices.instant or not opened.any():
        return slices
    order = np.lexsort((slices.begin, slices.tid))
    after = np.full(len(slices), end, np.int64)
    same = slices.tid[order][1:] == slices.tid[order][:-1]
    after[order[:-1][same]] = slices.begin[order[1:][same]]
    return replace(slices, end=np.where(opened, np.maximum(after, slices.begin), slices.end))


def on_program(tables: Tables) -> Iterator[Slices]:
    """Everything drawn on threads, outermost level first, without empty levels."""
    used = prefetched_runs(tables)
    operator, wait = operator_slices(tables)
    drawn: tuple[tuple[str, Callable[[], Iterable[Slices]]], ...] = (
        ("tokens", lambda: [token_slices(tables)]),
        ("graphs", lambda: [graph_slices(tables)]),
        ("operators", lambda: [operator]),
        ("experts", lambda: [expert_slices(tables, used)]),
        ("loads", lambda: load_slices(tables, used)),
        ("qnn_calls", lambda: [qnn_call_slices(tables)]),
        ("qnn_executes", lambda: [lone_execute_slices(tables)]),
        ("npu_batches", lambda: batch_call_slices(tables)),
        ("calls", lambda: call_slices(tables)),
        ("operators", lambda: [wait]),
        ("reads", lambda: [read_slices(tables)]),
        ("faults", lambda: major_fault_slices(tables)),
    )
    return (slices for table, make in drawn if len(tables[table]) for slices in make() if len(slices))


def preorder(begin: np.ndarray, end: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Slice numbers sorted by begin, then longest first, then by rank. Fast if the levels are sorted, as tables are."""
    order = np.argsort(begin, kind="stable")
    by_begin = begin[order]
    same = by_begin[1:] == by_begin[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        rows = order[tied]
        order[tied] = rows[np.lexsort((rank[rows], -end[rows], begin[rows]))]
    return order


def nested(begin: np.ndarray, end: np.ndarray, instant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(events, crossed): begin (i) and end (~i) events, in the order to write them, of one thread's slices in their `preorder`.

    At equal times, ends come first, innermost first, then begins, outermost first; an empty slice ends immediately, an
    instant has no end. `crossed` [bool] marks slices that outlast the one in which they began: at least one in each stretch (from
    one moment without a slice to the next) in which slices do not nest; the order of that stretch's events is then invalid.
    """
    events, crossed = np.empty(2 * len(begin), np.int64), np.zeros(len(begin), bool)
    count = _messages.nested(begin, end, instant, events, crossed)
    return events[:count], crossed


def lanes(
    begin: np.ndarray, end: np.ndarray, rank: np.ndarray, complete: np.ndarray, crossed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(lane, end) of every slice such that each lane nests; an unfinished slice is clipped to the enclosing one.

    Processes slices one by one, but only in stretches (between two moments without a slice) with `crossed` slices.
    """
    lane, end, stacks = np.zeros(len(begin), np.int64), end.copy(), list[list[int]]()
    order = preorder(begin, end, rank)
    until = np.maximum.accumulate(end[order])
    stretch = np.cumsum(np.append(True, begin[order][1:] >= until[:-1])[: len(order)])
    order = order[np.isin(stretch, stretch[crossed[order]])]
    for i in order.tolist():
        for k in range(len(stacks) + 1):
            if k == len(stacks):
                stacks.append([])
            stack = stacks[k]
            while stack and stack[-1] <= begin[i]:
                stack.pop()
            if stack and stack[-1] < end[i] and not complete[i]:
                end[i] = stack[-1]
            if not stack or end[i] <= stack[-1]:
                stack.append(int(end[i]))
                lane[i] = k
                break
    return lane, end
