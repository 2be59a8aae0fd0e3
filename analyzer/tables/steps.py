"""Steps and graphs: the spans that everything else is attributed to."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute

from analyzer.records.intervals import Intervals
from analyzer.records.observed import disturbed_spans
from analyzer.records.reading import BACKEND, USER, Source, pick_names
from analyzer.records.rows import UNKNOWN_U32, RecordSpans, Rows
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import EVER, NONE, NestedSpans, first_of_runs, if_lasting, latest, next_in_group, number_rows
from analyzer.tables import sequences
from analyzer.tables.sequences import CHECKED, DECODE, OTHER, PHASES, PREFILL, REFUSED, FedRows, RowSets
from analyzer.tables.sessions import model_names

WAIT = "wait"
"""The kind of graph that stands for a wait until a backend is done."""


def fault_counts(begin: Rows, end: Rows, matched: np.ndarray, field: str) -> np.ndarray:
    """Page faults between two readings of a 32-bit counter; -1 if the end is missing."""
    if len(end) == 0:
        return np.full(len(begin), NONE, np.int64)
    return np.where(matched >= 0, (end[field][matched] - begin[field]) & UNKNOWN_U32, NONE)


@dataclass
class Steps:
    """The steps of a recording, sorted by begin; `token_id` is the row number."""

    begin: Rows
    end: Rows
    spans: RecordSpans
    until: np.ndarray
    """Exclusive end; a step with a lost end lasts until the next step of its thread, or to the recording's end."""
    n_tokens: np.ndarray
    """How many tokens each was fed; 0 where neither the engine nor a stretch of time looked at so far gives it."""
    position: np.ndarray
    """Context length before each; of several sequences the longest. -1: unknown."""
    sets: RowSets
    """The rows that each feeds to each sequence; `step` is the row number."""
    first: int = 0
    """token_id of the first row: not 0 for the steps of a stretch of time."""
    not_language: tuple[int, ...] = ()
    """Engines whose graphs are steps of other models."""

    def begins_alone(self) -> np.ndarray:
        """Times at which a step begins while none is open, except the first."""
        ts = self.begin["ts"]
        reach = np.maximum.accumulate(self.until) if len(ts) else ts
        return np.unique(ts[1:][reach[:-1] <= ts[1:]])

    def begun_in(self, piece: Source) -> "Steps":
        """The steps that begin in a time range, with the number of input tokens of each."""
        low, high = np.searchsorted(self.begin["ts"], (piece.begin_ns, piece.end_ns)).tolist()
        rows, spans = np.arange(low, high), self.spans
        spans = RecordSpans(*(column[rows] for column in (spans.end, spans.begin_ns, spans.end_ns, spans.complete)))
        mine = self.begin.where(rows), self.end, spans, self.until[rows], self.n_tokens[rows], self.position[rows]
        steps = Steps(*mine, self.sets, low, self.not_language)
        if np.any(steps.n_tokens == 0):
            steps.n_tokens = np.where(steps.n_tokens > 0, steps.n_tokens, steps.tokens_of_graphs(piece.rows("graph_begin")))
        return steps

    def joined(self, pieces: list["Steps"]) -> "Steps":
        """The steps with what only their stretches of time, `pieces`, show: tokens fed, and waits behind them."""
        columns = zip(*((piece.n_tokens, piece.until, piece.spans.end_ns) for piece in pieces), strict=True)
        n_tokens, until, end_ns = map(np.concatenate, columns)
        return replace(self, n_tokens=n_tokens, until=until, spans=replace(self.spans, end_ns=end_ns))

    def awaited(self, waits: Intervals, backend: np.ndarray) -> "Steps":
        """The steps, each lasting until the first wait for every `backend` ends that its thread begins behind it.

        A call may return while another device still computes for it; the step is done when the program has waited for that.
        """
        step, last = (latest(self.begin["tid"], self.begin["ts"], waits.key, ts) for ts in (waits.begin, waits.end - 1))
        ended = np.where(self.spans.complete, self.spans.end_ns, EVER)
        behind = np.flatnonzero((step >= 0) & (step == last) & (waits.begin >= np.append(ended, EVER)[step]))
        first = behind[number_rows(step[behind], backend[behind])[1]]
        end_ns = self.spans.end_ns.copy()
        np.maximum.at(end_ns, step[first], waits.end[first])
        return replace(self, spans=replace(self.spans, end_ns=end_ns), until=np.maximum(self.until, end_ns + 1))

    def tokens_of_graphs(self, graphs: Rows) -> np.ndarray:
        """The number of input tokens of each step's graphs: of the first graph with any, plus the others of its handle.

        A batch is split into parts, and the graph of each part into one for each backend.
        """
        fed = graphs.where(graphs["n_tokens"] > 0)
        step = np.full(len(fed), NONE, np.int64)
        if_lasting((self.begin["tid"], self.begin["ts"], self.until), (fed["tid"], fed["ts"]), step)
        inside = np.flatnonzero(step >= 0)
        fed, step = fed.where(inside), step[inside]
        order = np.lexsort((fed["ts"], step))
        first = order[first_of_runs(step[order])]
        handle = np.zeros(len(self.begin), np.int64)
        handle[step[first]] = fed["handle"][first]
        same = fed["handle"] == handle[step]
        return np.bincount(step[same], fed["n_tokens"][same], len(self.begin)).astype(np.int64)

    def lengths(self) -> pd.DataFrame:
        """token_id, position and n_tokens."""
        numbers = self.first + np.arange(len(self.position))
        return pd.DataFrame({"token_id": numbers, "n_tokens": self.n_tokens, "position": self.position})

    def of(self, rows: Rows) -> np.ndarray:
        """token_id of the step that contains each record: a step of its thread if there is one, else of its process."""
        return self.containing({"tid": rows["tid"], "pid": rows["pid"]}, rows["ts"])

    def containing(self, owners: dict[str, np.ndarray], ts: np.ndarray) -> np.ndarray:
        """The same for times `ts`; `owners` has the columns `tid` and `pid`, in order of preference."""
        row = np.full(len(ts), NONE, np.int64)
        for field, owner in owners.items():
            if_lasting((self.begin[field], self.begin["ts"], self.until), (owner, ts), row)
        return np.where(row >= 0, row + self.first, NONE) if self.first else row

    def reported_phases(self) -> np.ndarray:
        """The phases that engines report, as indices into PHASES, REFUSED for calls with an error, OTHER; 0: none."""
        failed = np.isin(self.begin["engine"], CHECKED) & self.spans.complete & (self.spans.of_end(self.end, "result") != 0)
        other = np.isin(self.begin["engine"], self.not_language) & (self.begin["context"] == 0)
        return np.where(failed, REFUSED, np.where(other, OTHER, self.begin["phase"]))

    def fed(self, whole: bool) -> FedRows:
        """What each step feeds to each sequence; `whole`: all steps since the program's begin were recorded."""
        steps = {name: self.begin[name] for name in ("pid", "tid", "context", "engine")} | {"begin_ns": self.begin["ts"]}
        sets = sequences.complete_row_sets(self.sets, self.n_tokens, self.position)
        return sequences.fed_rows(sets, self.reported_phases()[sets.step], steps, whole)

    def contexts(self) -> np.ndarray:
        """The number of each step's context among those of its process; -1: unknown."""
        pid, context = self.begin["pid"], self.begin["context"]
        told, number = np.flatnonzero(context), np.full(len(pid), NONE, np.int64)
        code, first = number_rows(pid[told], context[told])
        of_process = pd.Series(pid[told][first]).groupby(pid[told][first]).cumcount().to_numpy()
        number[told] = of_process[code]
        return number

    def tables(self, source: Source) -> dict[str, Columns]:
        """The columns of `tokens` and `sequences`."""
        fed = self.fed(records_all(source))
        return {"tokens": self.table(source, fed), "sequences": fed.table(self.first)}

    def disturbed(self, source: Source, decodes: np.ndarray) -> np.ndarray:
        """Which steps the tracer disturbed; one that `decodes` counts from its thread's previous step's end, as its ITL does."""
        since, after = self.begin["ts"].copy(), next_in_group(self.begin["tid"], self.begin["ts"])
        before = np.flatnonzero((after >= 0) & np.append(decodes, False)[after])
        since[after[before]] = np.minimum(since[after[before]], self.spans.end_ns[before])
        return disturbed_spans(source.manifest.get("disturbances"), since, self.spans.end_ns)

    def table(self, source: Source, fed: FedRows) -> Columns:
        """The columns of `tokens`."""
        matched, steps = self.spans.end, len(self.begin)
        phase = sequences.step_phases(fed, self.reported_phases())
        return {
            "token_id": np.arange(len(self.begin)),
            **source.thread(self.begin),
            "seq": self.begin["seq"],
            "phase": text_array(phase, PHASES),
            "n_tokens": self.n_tokens,
            "prefill_rows": fed.rows_of(PREFILL, steps),
            "decode_rows": fed.rows_of(DECODE, steps),
            "position": self.position,
            "context": self.contexts(),
            "result": self.spans.of_end(self.end, "result"),
            "maj_flt": fault_counts(self.begin, self.end, matched, "maj_flt"),
            "min_flt": fault_counts(self.begin, self.end, matched, "min_flt"),
            "disturbed": self.disturbed(source, phase == DECODE),
            **self.spans.columns(),
        }


def records_all(source: Source) -> bool:
    """Whether the recording has all steps since the program's begin."""
    return not source.attached and not source.manifest.get("dropped")


def recorded_steps(source: Source) -> Steps:
    """The recording's steps. If the engine records no number of input tokens, `begun_in` takes it from the graphs."""
    begin, spans = source.rows("token_begin"), source.spans("token", ("seq",), unknown=NONE)
    after = next_in_group(begin["tid"], begin["ts"])
    following_ns = np.where(after >= 0, begin["ts"][after] if len(begin) else 0, spans.until())
    until = np.where(spans.complete, spans.end_ns + 1, following_ns)
    position = np.where(begin["position"] == UNKNOWN_U32, NONE, begin["position"])
    counted = begin["n_tokens"], position, sequences.NO_SETS
    ends, others = source.rows("token_end"), (USER, *source.not_language)
    return with_batches(Steps(begin, ends, spans, until, *counted, not_language=others), source)


def with_batches(steps: Steps, source: Source) -> Steps:
    """The steps with the sequences, positions and number of tokens of recorded batches."""
    rows = source.rows("batch_rows")
    step = np.full(len(rows), NONE, np.int64)
    if_lasting((steps.begin["tid"], steps.begin["ts"], steps.until), (rows["tid"], rows["ts"]), step)
    n_tokens, fed = steps.n_tokens.copy(), np.flatnonzero(step >= 0)
    n_tokens[step[fed]] = rows["n_rows"][fed]
    known = replace(steps, n_tokens=n_tokens, sets=sequences.recorded_row_sets(source, step))
    position = np.full(len(n_tokens), NONE, np.int64)
    answer = known.fed(records_all(source)).sets
    np.maximum.at(position, answer.step, answer.position)
    return replace(known, position=position)


@dataclass
class Graphs:
    """The graphs of one time range, sorted by begin; `graph_id` is `first` + row number."""

    begin: Rows
    end: Rows
    spans: RecordSpans
    kind: pyarrow.DictionaryArray
    first: int

    def waits(self) -> tuple[Intervals, np.ndarray]:
        """The complete waits for other devices, by thread, and the backend that each is for."""
        rows = np.flatnonzero(pyarrow.compute.equal(self.kind, WAIT).to_numpy(zero_copy_only=False) & self.spans.complete)
        columns = (self.begin["tid"], self.spans.begin_ns, self.spans.end_ns)
        return Intervals(*(column[rows] for column in columns)), self.begin["handle"][rows]

    @cached_property
    def nest(self) -> NestedSpans:
        """The graphs of each thread as nested spans."""
        return NestedSpans(self.begin["tid"], self.begin["ts"], self.spans.until())

    def of(self, rows: Rows) -> np.ndarray:
        """graph_id of the innermost graph that contains each record on its thread."""
        row = self.nest.innermost(rows["tid"], rows["ts"])
        return np.where(row >= 0, row + self.first, NONE)

    def table(self, source: Source, steps: Steps) -> Columns:
        """The columns of `graphs`."""
        begin, matched = self.begin, self.spans.end
        handle = begin.raw("handle").copy()
        makes = (handle == 0) & (matched >= 0)  # the end of the call has the handle that it created
        handle[makes] = self.end.raw("handle")[matched[makes]]
        return {
            "graph_id": self.first + np.arange(len(begin)),
            "token_id": steps.of(begin),
            **source.thread(begin),
            "kind": self.kind,
            "layer": begin["layer"],
            "expert": begin["expert"],
            "backend": pick_names(BACKEND, begin["backend"]),
            "tier": begin["tier"],
            "n_tokens": begin["n_tokens"],
            "handle": handle,
            "name": model_names(source, begin["pid"], handle, begin["ts"], makes),
            "status": self.spans.of_end(self.end, "status"),
            **self.spans.columns(),
        }


def range_graphs(source: Source, first: int) -> Graphs:
    """The graphs of one time range, numbered from `first`."""
    begin, spans = source.rows("graph_begin"), source.spans("graph", ("handle",), unknown=0)
    return Graphs(begin, source.rows("graph_end"), spans, source.named(begin["engine"], begin["type"], "graphs"), first)
