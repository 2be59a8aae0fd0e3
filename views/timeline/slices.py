"""The slices on the program's own threads: from tables to slices with name, category and arguments."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import pandas as pd
import pyarrow

from analyzer.questions.accelerators import first_waits
from analyzer.questions.experts import prefetched_runs
from analyzer.questions.parts import given_away
from analyzer.questions.stacks import named_stacks, short_function, waiting_places
from analyzer.records.schema import Tables
from views.timeline.columns import map_rows, rows_equal, rows_of, text_column, text_of

PREFETCH, STEP, BATCH = 1 << 41, 1 << 42, 1 << 43  # offsets of flow ids of loads, steps and batches, distinct from graphs'

CALLER = " ← "
"""Between the functions of a stack, the innermost first."""
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
        some = replace(self, **columns, own=args_at(self.own, rows))
        return some if self.row is not None else replace(some, name=self.name.take(rows), args=args_at(self.args, rows))

    def alone(self) -> "Slices":
        """The same slices, each with its own row of `name` and `args`."""
        if self.row is None:
            return self
        return replace(self, name=self.name.take(self.row), args=args_at(self.args, self.row) | self.own, row=None, own={})


PER_SLICE = ("tid", "begin", "end", "complete", "flow", "ends_flow", "step_flow", "row")
"""The members of Slices with an item for each slice, if any."""


def args_at(args: dict[str, Column], rows: np.ndarray) -> dict[str, Column]:
    """The arguments in these rows."""
    return {label: column.take(rows) for label, column in args.items()}


def int_args(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Integer columns as arguments."""
    return {name: frame[name].to_numpy(np.int64) for name in names}


def text_args(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Text columns as arguments."""
    return {name: text_of(frame[name]) for name in names}


def positive(frame: pd.DataFrame, *names: str) -> dict[str, Column]:
    """Integer columns as arguments if above zero: counts of 0 are omitted to save space."""
    return {name: np.where(column > 0, column, -1) for name, column in int_args(frame, *names).items()}


def several_tokens(frame: pd.DataFrame) -> dict[str, Column]:
    """`n_tokens` as argument if above one: most slices have one row, and readers store every argument."""
    tokens = frame["n_tokens"].to_numpy(np.int64)
    return {"n_tokens": np.where(tokens > 1, tokens, -1)}


def of_frame(category: str, name: pyarrow.DictionaryArray, frame: pd.DataFrame, args: dict[str, Column]) -> Slices:
    """Slices from a table with the span columns."""
    tid, begin, end = (frame[c].to_numpy(np.int64) for c in ("tid", "begin_ns", "end_ns"))
    return Slices(category, name, tid, begin, end, frame["complete"].to_numpy(bool), args)


def expert_place(kind: str, layer: int, expert: int) -> str:
    """`kind.layer.expert`, without unknown parts."""
    return ".".join([kind or "graph", *(str(i) for i in (layer, expert) if i >= 0)])


def step_name(phase: str, step: int, position: int, n_tokens: int, context: int) -> str:
    """A step's phase, number and position: `decode 17 at position 64`, `prefill 0: 48 tokens`.

    Includes the context if the process has several: `decode 17 in context 1`.
    """
    name = f"{phase or 'step'} {step}" + (f" in context {context}" if context >= 0 else "")
    if n_tokens > 1:
        return f"{name}: {n_tokens} tokens"
    return f"{name} at position {position}" if position >= 0 else name


def step_slices(tables: Tables) -> Slices:
    """One slice per step of the model."""
    frame = tables["tokens"]
    args = text_args(frame, "phase") | int_args(frame, "token_id", "seq", "n_tokens", "position", "context", "result")
    several = frame["context"].groupby(frame["pid"]).transform("max") > 0
    context = frame["context"].where(several, -1)
    phase = frame["phase"].mask(frame["engine"] == "found", "found step")  # no engine declared it
    name = map_rows(step_name, phase, frame["token_id"], frame["position"], frame["n_tokens"], context)
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
    return [(step * layers + layer) * experts + expert for step, layer, expert in columns]


def graph_name(kind: str, layer: int, expert: int, backend: str, repeated: bool) -> str:
    """A graph's kind, layer and expert, or only its backend if the enclosing operator's name has these (`repeated`)."""
    if kind == "wait":
        return f"wait for {backend.upper()}"
    return f"graph on {backend.upper()}" if repeated and backend else expert_place(kind, layer, expert)


def run_name(layer: int, expert: int, cache: str, repeated: bool) -> str:
    """The expert, or only its cache state if the enclosing operator names the expert (`repeated`)."""
    return f"cache {cache}" if repeated and cache else expert_place("expert", layer, expert)


def graph_slices(tables: Tables) -> Slices:
    """One slice per graph run; submissions start a flow to the NPU or the wait; graphs on other threads join the step's flow."""
    frame = tables["graphs"]
    submitted = frame["graph_id"].isin(tables["qnn_executes"]["graph_id"]).to_numpy()
    args = (
        text_args(frame, "backend", "name") | int_args(frame, "layer", "expert") | several_tokens(frame) | positive(frame, "tier")
    )
    args["status"] = np.where(frame["status"] != 0, frame["status"], -1).astype(np.int64)
    repeated = repeats_operator(tables, frame) | repeats_kind(tables, frame)
    name = map_rows(graph_name, frame["kind"], frame["layer"], frame["expert"], frame["backend"], repeated)
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


def traffic_args(frame: pd.DataFrame) -> dict[str, Column]:
    """An operator's minimum bytes and its speed, if its shapes are known."""
    work = (frame["read_bytes"] + frame["written_bytes"]).fillna(-1).to_numpy()
    rate = np.where(work > 0, 1e3 * work / frame["duration_ns"].clip(lower=1).to_numpy(), -1)
    return {"bytes": np.where(work > 0, work, -1).astype(np.int64), "MB_per_s": rate.astype(np.int64)}


def operator_slices(tables: Tables) -> tuple[Slices, Slices]:
    """One slice per operator and thread, and within it one for the thread's wait for the others.

    An operator without thread rows is drawn on the thread that began it.
    """
    frame, threads = tables["operators"], tables["op_threads"]
    args = text_args(frame, "shape") | int_args(frame, "layer", "expert") | several_tokens(frame) | positive(frame, "maj_flt")
    if frame["read_bytes"].notna().any():
        args |= traffic_args(frame)
    operators = of_frame("operator", map_rows(operator_name, frame["type"], frame["name"]), frame, args)
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
    name = map_rows(run_name, frame["layer"], frame["expert"], frame["cache"], repeats_operator(tables, frame))
    args = text_args(frame, "cache", "backend") | int_args(frame, "layer", "expert") | several_tokens(frame)
    args |= positive(frame, "tier", "maj_flt")
    slices = of_frame("expert", name, frame, args)
    slices.flow = flow_of(frame["run_id"], used["run_id"], used["load_id"] + PREFETCH)
    slices.ends_flow = slices.flow > 0
    return slices


def load_slices(tables: Tables, used: pd.DataFrame) -> tuple[Slices, Slices]:
    """Expert loads as slices, evictions as instants; used prefetches begin a flow."""
    frame = tables["loads"].query("action != 'hit'").reset_index(drop=True)
    name = map_rows(expert_place, frame["action"], frame["layer"], frame["expert"])
    both = of_frame("cache", name, frame, int_args(frame, "bytes", "resident_bytes") | text_args(frame, "reason", "backend"))
    both.flow = flow_of(frame["load_id"], used["load_id"], used["load_id"] + PREFETCH)
    evicted = rows_equal(frame["action"], "evict")
    return both.take(np.flatnonzero(~evicted)), replace(both.take(np.flatnonzero(evicted)), instant=True)


def qnn_call_slices(tables: Tables) -> Slices:
    """Context and graph calls of QNN on their threads."""
    frame = tables["qnn_calls"]
    return of_frame("qnn", text_of(frame["call"]), frame, text_args(frame, "name") | int_args(frame, "bytes", "status"))


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
    args = text_args(frame, "args") | positive(frame, "depth")
    both = of_frame("call", text_of(frame["function"]), frame, args)
    lasting = rows_equal(frame["at"], "both")
    return both.take(np.flatnonzero(lasting)), replace(both.take(np.flatnonzero(~lasting)), instant=True)


def lone_execute_slices(tables: Tables) -> Slices:
    """Executions outside the engine's graphs: the call itself is drawn on the thread and starts the flow."""
    frame = tables["qnn_executes"]
    frame = frame[frame["graph_id"] < 0]
    slices = of_frame("qnn", text_column(np.zeros(len(frame), np.int64), ["graphExecute"]), frame, text_args(frame, "graph_name"))
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
    name = map_rows(lambda call, file: f"{call} {file_name(file)}", frame["call"], frame["file"])
    args = text_args(frame, "file") | int_args(frame, "offset", "bytes") | positive(frame, "missed_bytes", "error")
    return of_frame("io", name, frame, args)


def major_fault_slices(tables: Tables) -> tuple[Slices, Slices]:
    """Major page faults: slices, and instants where their begin is unknown."""
    frame = tables["faults"]
    frame = frame[frame["kind"] == "major"].assign(complete=True)
    name = map_rows(lambda file: f"major fault {file_name(file)}", frame["file"])
    both = of_frame("io", name, frame, text_args(frame, "file") | int_args(frame, "offset", "bytes"))
    timed = (frame["duration_ns"] >= 0).to_numpy()
    return both.take(np.flatnonzero(timed)), replace(both.take(np.flatnonzero(~timed)), instant=True)


def wait_slices(tables: Tables) -> Slices:
    """One slice per long wait, named after where the thread waited, with its stack and who woke it in which function."""
    frame = tables["waits"].assign(complete=True)
    places = waiting_places(tables).tolist()
    stacks = [*(CALLER.join(map(short_function, reversed(stack))) for stack in named_stacks(tables)), ""]
    name = map_rows(lambda stack: f"wait: {short_function(places[stack])}", frame["stack_id"])
    args: dict[str, Column] = {
        "stack": text_column(frame["stack_id"].to_numpy(), stacks),
        **positive(frame, "waker_tid"),
        "woken_in": text_column(frame["waker_stack_id"].to_numpy() % len(stacks), [*places]),
    }
    return of_frame("off-cpu", name, frame, args)


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
        ("tokens", lambda: [step_slices(tables)]),
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
        ("waits", lambda: [wait_slices(tables)]),
    )
    return (slices for table, make in drawn if len(tables[table]) for slices in make() if len(slices))
