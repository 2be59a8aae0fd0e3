"""The ledger: one cause for every moment of a token, from its own thread's view; causes and residual add up to the token.

Precedence: the thread's own work, then its lack of a CPU, then the work of other threads and the accelerator while it sleeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import phases, rpc
from analyzer.questions.groups import BESIDE, HOST, enqueued, given_away
from analyzer.questions.phases import RESIDUAL
from analyzer.records.intervals import Intervals, by_precedence, common, covered, merged, overlaps
from analyzer.records.schema import MADE, Tables, conform, framed
from analyzer.records.spans import EVER, NONE, following, shared_codes, successors

ABOUT = ("token_id", "phase", "position", "complete")
CAUSES = tuple(name for name in (c.name for c in MADE["ledger"]) if name not in (*ABOUT, RESIDUAL, "total"))
QUEUED = "hexagon"
"""The backend whose graphs go to the NPU through a queue, batch by batch, in `npu_batches`."""
HANDING_OVER = ("submission", "queue", "rpc", "completion")
"""Causes that occur with every submission to an accelerator, regardless of its work."""
ASLEEP = ("sleeping", "waiting")
EXECUTION = ["token_id", "tid", "begin_ns", "end_ns", "worked_ns", "queue_us", "accel_us", "asynchronous"]
TABLES = (
    *("tokens", "graphs", "operators", "op_threads", "loads", "qnn_executes", "qnn_calls", "thread_states", "faults", "reads"),
    *("npu_batches", "npu_operators", "driver_events"),
)
"""The tables that the ledger is made from."""
FASTER = 0.08
"""Default share by which `faster` speeds the accelerator up."""


@dataclass(frozen=True)
class Spans:
    """The intervals from which the causes are made, keyed by the thread that ran the token."""

    tables: Tables

    @cached_property
    def owner(self) -> pd.Series:
        """token_id → thread that ran the token."""
        return self.tables["tokens"].set_index("token_id")["tid"]

    def table(self, name: str, where: np.ndarray | None = None, end: str = "end_ns") -> Intervals:
        """Rows of a table on tokens' own threads, as intervals."""
        spans = Intervals.of_table(self.tables[name], end=end)
        mine = np.isin(spans.key, self.owner.unique())
        return spans.where(mine if where is None else mine & where)

    def owned(self, spans: Intervals) -> Intervals:
        """Intervals keyed by token, rekeyed by the token's thread."""
        spans = spans.where(spans.key >= 0)
        return Intervals(self.owner.reindex(spans.key).to_numpy(), spans.begin, spans.end)

    @cached_property
    def states(self) -> tuple[Intervals, pd.Categorical]:
        """The states of tokens' threads, by thread and time, and the name of each."""
        table = self.tables["thread_states"]
        spans, rows = Intervals.of_table(table), np.flatnonzero(np.isin(table["tid"], self.owner.unique()))
        rows = rows[np.lexsort((spans.begin[rows], spans.key[rows]))]
        return spans.where(rows), pd.Categorical(table["state"].array[rows])

    def state(self, *names: str) -> Intervals:
        """The times in which tokens' threads were in these states."""
        spans, named = self.states
        return spans.where(named.isin(names))

    @cached_property
    def woken(self) -> Intervals:
        """The times in which tokens' threads had been woken but had no CPU yet."""
        spans, named = self.states
        slept = named.isin(ASLEEP)[:-1] & (spans.key[1:] == spans.key[:-1])
        return spans.where(np.append(False, slept)[: len(spans)] & np.asarray(named == "runnable"))

    @cached_property
    def accelerated(self) -> pd.DataFrame:
        """The graphs that an accelerator computes."""
        graphs = self.tables["graphs"]
        return graphs[~graphs["backend"].isin(HOST) & ~graphs["kind"].isin(BESIDE)]

    def beside(self, kind: str) -> Intervals:
        """The times in which tokens' threads copied between backends or waited for one."""
        return self.table("graphs", (self.tables["graphs"]["kind"] == kind).to_numpy())

    def waits(self, answered: bool) -> Intervals:
        """The times in which tokens' threads waited for a backend with recorded responses (`answered`), or for another one."""
        graphs = self.tables["graphs"]
        told = (graphs["backend"] == QUEUED) & bool(len(self.tables["npu_batches"]))
        return self.table("graphs", ((graphs["kind"] == "wait") & (told == answered)).to_numpy())

    def windows(self) -> Intervals:
        """Tokens, each extended by the waits for its accelerator work that follow it before its thread begins the next token."""
        tokens, waits = Intervals.of_table(self.tables["tokens"]), merged(self.beside("wait"))
        following = np.append(tokens.begin, EVER)[successors(tokens.key, tokens.begin)]
        until = tokens.end.copy()
        met = overlaps(Intervals(tokens.key, tokens.end, following), waits)
        np.maximum.at(until, met.left, met.end)
        return Intervals(tokens.key, tokens.begin, until)

    @cached_property
    def handed_over(self) -> Intervals:
        """The times in which tokens' threads were in an accelerator's graph or in an execution on it."""
        graphs, executes = (Intervals.of_table(frame) for frame in (self.accelerated, self.executes(waited=True)))
        spans = Intervals.joined(graphs, executes, self.beside("wait"))
        return merged(spans.where(np.isin(spans.key, self.owner.unique())))

    def executes(self, waited: bool) -> pd.DataFrame:
        """Executions on the NPU whose call waits for the end (`waited`), or those whose call does not."""
        executes = self.tables["qnn_executes"]
        executes = executes[(executes["token_id"] >= 0) & (executes["asynchronous"] != waited)]
        executes = executes.assign(worked_ns=executes["begin_ns"])
        return pd.concat([executes[EXECUTION], self.answers], ignore_index=True) if waited and len(self.answers) else executes

    @cached_property
    def answers(self) -> pd.DataFrame:
        """Waits for batches of an NPU queue, as executions. `worked_ns`: the earliest possible begin on the NPU."""
        batches = self.tables["npu_batches"]
        batches = batches.assign(worked_ns=earliest(batches), begin_ns=batches["end_ns"] - batches["wait_ns"])
        batches = batches[(batches["token_id"] >= 0) & (batches["wait_ns"] >= 0)]
        return batches.assign(queue_us=np.nan, accel_us=batches["npu_us"], asynchronous=False)[EXECUTION]

    @cached_property
    def messages(self) -> pd.DataFrame:
        """Completed calls of tokens' own threads to the NPU's driver."""
        rows = rpc.messages(self.tables)
        return rows[(rows["answered_ns"] >= 0) & (rows["end_ns"] >= 0) & rows["tid"].isin(self.owner.unique())]

    def message(self, begin: str, end: str) -> Intervals:
        """A part of each of these calls, between two columns of `rpc_messages`."""
        return Intervals(*(self.messages[name].to_numpy() for name in ("tid", begin, end)))

    def batches_sent(self) -> Intervals:
        """The times in which batches were written to an NPU queue."""
        batches = self.tables["npu_batches"]
        return Intervals.of_table(batches.assign(end_ns=batches["begin_ns"] + batches["submit_ns"].clip(lower=0)))

    def loads(self) -> Intervals:
        """Expert loads and the creation of NPU contexts on tokens' own threads."""
        calls = self.tables["qnn_calls"]["call"].isin(phases.SETUPS).to_numpy()
        return Intervals.joined(
            self.table("loads", (self.tables["loads"]["action"] == "load").to_numpy()), self.table("qnn_calls", calls)
        )

    def stalls(self) -> Intervals:
        """Major faults, waits for pages that are being read ahead, and reads of tokens' own threads."""
        faults = self.table("faults", (self.tables["faults"]["kind"] == "major").to_numpy())
        return Intervals.joined(faults, common(merged(self.state("waiting")), merged(self.table("faults"))), self.table("reads"))

    def operators(self, which: np.ndarray) -> tuple[Intervals, Intervals]:
        """(on tokens' own threads, on other threads for a token) of the operators selected by `which`, rows of `operators`."""
        shares = self.tables["op_threads"]
        op = shares["op_id"].to_numpy()
        spans, token = Intervals.of_table(shares), self.tables["operators"]["token_id"].reindex(op, fill_value=NONE).to_numpy()
        own = np.isin(spans.key, self.owner.unique())
        some = np.append(which, False)[np.minimum(op, len(which))]
        return spans.where(own & some), self.owned(Intervals(token, spans.begin, spans.end).where(some & ~own))


@dataclass(frozen=True)
class Executions:
    """The causes that executions on the NPU account for."""

    profiled: list[tuple[str, Intervals]]
    """Parts on tokens' own threads from the profile: valid whatever the thread does at the time."""
    rest: list[tuple[str, Intervals]]
    """The rest of these executions."""
    elsewhere: list[tuple[str, Intervals]]
    """Parts on other threads, and of calls that had returned."""


def executions(spans: Spans) -> Executions:
    """The executions of a recording, by the thread that waited for them."""
    waited, late = spans.executes(waited=True), spans.executes(waited=False)
    own = waited["tid"].isin(spans.owner.unique()).to_numpy()
    return Executions(
        parts(waited[own], "tid", profiled_parts),
        parts(waited[own], "tid", other_parts) + parts(late, "tid", lambda rows: {"submission": ends(rows, "returned_ns")}),
        [
            (cause, spans.owned(piece))
            for rows, cutting in ((waited[~own], profiled_parts), (waited[~own], other_parts), (late, other_parts))
            for cause, piece in parts(rows, "token_id", cutting)
        ],
    )


Ends = tuple[np.ndarray, np.ndarray]


def ends(rows: pd.DataFrame, until: str = "end_ns") -> Ends:
    """Begins and ends."""
    return rows["begin_ns"].to_numpy(), rows[until].to_numpy()


def parts(executes: pd.DataFrame, key: str, cutting: Callable[[pd.DataFrame], dict[str, Ends]]) -> list[tuple[str, Intervals]]:
    """The parts that `cutting` splits executions into, keyed by thread or token."""
    return [(cause, Intervals(executes[key].to_numpy(), *piece)) for cause, piece in cutting(executes).items()]


def earliest(batches: pd.DataFrame) -> np.ndarray:
    """The earliest possible begin of each batch on the NPU: when it was sent and the previous batches of its queue were done."""
    begun = (batches["begin_ns"] + batches["submit_ns"].clip(lower=0)).to_numpy(np.int64, copy=True)
    took = np.nan_to_num(batches["npu_us"].to_numpy() * 1e3).astype(np.int64)
    for rows in batches.groupby(["pid", "queue"]).indices.values():
        before = np.cumsum(took[rows]) - took[rows]
        begun[rows] = before + np.maximum.accumulate(begun[rows] - before)
    return begun


def profiled_parts(executes: pd.DataFrame) -> dict[str, Ends]:
    """Queueing and work from each execution's profile, which gives durations only: both are placed as early as possible."""
    begin, end = ends(executes)
    queue, busy = (np.nan_to_num(executes[name].to_numpy() * 1e3).astype(np.int64) for name in ("queue_us", "accel_us"))
    given = executes["worked_ns"].to_numpy()
    cuts = [np.clip(at, begin, end) for at in (given, given + queue, given + queue + busy)]
    return {"queue": (cuts[0], cuts[1]), "accelerator": (cuts[1], cuts[2])}


def other_parts(executes: pd.DataFrame) -> dict[str, Ends]:
    """The time outside the profile's durations is RPC; without a profile, all time counts as the accelerator's."""
    begin, end = ends(executes)
    profiled = executes["accel_us"].notna().to_numpy()
    return {"rpc": (np.where(profiled, begin, end), end), "accelerator": (np.where(profiled, end, begin), end)}


def fallen_back(spans: Spans) -> np.ndarray:
    """Which operators the CPU computes between operators of the same layer and token that ran on an accelerator.

    Only if the engine splits one graph over backends: separate graphs of a layer were assigned to backends on purpose.
    """
    operators = spans.tables["operators"]
    graphs = spans.tables["graphs"].set_index("graph_id")[["backend", "layer", "kind"]]
    of_graph = graphs.reindex(operators["graph_id"])
    split = (of_graph["layer"] == NONE).to_numpy() & (operators["layer"] >= 0).to_numpy()
    if not split.any():
        return split
    accelerated = split & ~of_graph["backend"].isin(HOST).to_numpy()
    begun = pd.concat([operators.loc[accelerated, ["token_id", "layer", "begin_ns"]], queued(spans.tables)])
    ends = begun.groupby(["token_id", "layer"])["begin_ns"].agg(["min", "max"])
    of_layer = ends.reindex(pd.MultiIndex.from_frame(operators[["token_id", "layer"]]))
    begin = operators["begin_ns"].to_numpy()
    between = (of_layer["min"].to_numpy() < begin) & (begin < of_layer["max"].to_numpy())
    return split & (of_graph["backend"] == "cpu").to_numpy() & between


def queued(tables: Tables) -> pd.DataFrame:
    """Operators sent to the NPU through a queue: token_id, layer, and the time their batch was sent, begin_ns."""
    operators = tables["npu_operators"].query("layer >= 0")
    sent = tables["npu_batches"].set_index("batch_id")["begin_ns"].reindex(operators["batch_id"]).to_numpy()
    return operators[["token_id", "layer"]].assign(begin_ns=sent)


def copied(spans: Spans) -> np.ndarray:
    """Which operators are copies between backends."""
    graphs = spans.tables["graphs"]
    return spans.tables["operators"]["graph_id"].isin(graphs.loc[graphs["kind"] == "copy", "graph_id"]).to_numpy()


def candidates(tables: Tables) -> list[tuple[str, Intervals]]:
    """Every cause with its intervals, keyed by tokens' threads; the first one that covers a moment takes it."""
    spans = Spans(tables)
    fallback, submitted = fallen_back(spans), enqueued(tables) | copied(spans)
    (fell, fell_elsewhere), (computed, elsewhere) = spans.operators(fallback), spans.operators(~fallback & ~submitted)
    npu = executions(spans)
    return [
        ("expert_loads", spans.loads()),
        ("faults_and_reads", spans.stalls()),
        *npu.profiled,
        ("submission", spans.message("begin_ns", "sent_ns")),
        ("completion", spans.message("answered_ns", "end_ns")),
        ("completion", common(merged(spans.woken), spans.handed_over)),
        ("run_queue", spans.state("runnable")),
        *npu.rest,
        ("accelerator", spans.message("sent_ns", "answered_ns")),
        ("submission", spans.batches_sent()),
        ("completion", spans.waits(answered=True)),
        ("accelerator", spans.waits(answered=False)),
        ("copies", spans.beside("copy")),
        *handing_over(spans),
        ("cpu_fallback", fell),
        ("cpu_operators", computed),
        ("host_code", spans.state("running")),
        *npu.elsewhere,
        ("expert_loads", spans.owned(phases.load_spans(tables))),
        ("cpu_fallback", fell_elsewhere),
        ("cpu_operators", elsewhere),
        ("faults_and_reads", spans.state("waiting")),
        ("asleep", spans.state("sleeping")),
        ("stopped", spans.state("stopped")),
    ]


def handing_over(spans: Spans) -> list[tuple[str, Intervals]]:
    """The causes within an accelerator's graphs on tokens' threads: sleep until it is done, preparation, reading of results."""
    graphs = Intervals.of_table(spans.accelerated)
    inside = Intervals.of_table(spans.executes(waited=True))
    met = overlaps(graphs, merged(inside))
    behind = Intervals(graphs.key[met.left], met.end, graphs.end[met.left])
    asleep = common(merged(spans.state(*ASLEEP)), merged(graphs))
    return [("accelerator", asleep), ("completion", behind), ("submission", graphs)]


def ledger_pieces(tables: Tables) -> pd.DataFrame:
    """Tokens split by cause: token_id, begin_ns, end_ns, duration_ns, cause; the rest is the residual."""
    windows = Spans(tables).windows()
    pieces, cause = by_precedence(windows, candidates(tables), RESIDUAL)
    met = overlaps(windows, pieces)
    order = np.lexsort((met.begin, met.left))
    columns = {
        "token_id": tables["tokens"]["token_id"].to_numpy()[met.left[order]],
        "begin_ns": met.begin[order],
        "end_ns": met.end[order],
        "duration_ns": met.length[order],
        "cause": cause[met.right[order]],
    }
    return framed(columns)


def ledger(tables: Tables, pieces: pd.DataFrame | None = None) -> pd.DataFrame:
    """ns of each cause by token; they and `residual` add up to `total`."""
    tokens, pieces = tables["tokens"], ledger_pieces(tables) if pieces is None else pieces
    place = pd.Index(tokens["token_id"]).get_indexer(pieces["token_id"])
    spent, names = pieces["duration_ns"].to_numpy(), (*CAUSES, RESIDUAL)
    cell = place * len(names) + pd.Categorical(pieces["cause"], names).codes
    sums = np.bincount(cell, spent, len(tokens) * len(names)).reshape(-1, len(names))
    columns = dict(zip(names, sums.T, strict=True))
    known = {name: tokens[name] for name in ABOUT}
    return conform("ledger", {**known, **columns, "total": np.bincount(place, spent, len(tokens))})


def submissions(tables: Tables) -> pd.DataFrame:
    """Work submitted to an accelerator within tokens, and the time at which the host knew that it was done."""
    executes, graphs, batches = tables["qnn_executes"], given_away(tables), answered(tables)
    graphs = graphs[(graphs["backend"] != QUEUED).to_numpy() | (len(batches) == 0)]
    waited = first_waits(tables, graphs)[["wait_ns", "done_ns"]]
    late = executes["asynchronous"].to_numpy()
    done = {"submitted_ns": np.where(late, executes["returned_ns"], executes["begin_ns"]), "done_ns": executes["end_ns"]}
    done |= {
        "wait_ns": np.where(late, NONE, executes["begin_ns"]),
        "backend": "htp",
        "accelerator_ns": executes["accel_us"] * 1e3,
    }
    submitted = {"submitted_ns": graphs["end_ns"], "accelerator_ns": np.nan, **waited}
    rows = [frame.assign(**more) for frame, more in ((executes, done), (graphs, submitted))] + [batches]
    columns = [column.name for column in MADE["submissions"]]
    every = pd.concat([part[columns] for part in rows if len(part)] or [rows[0][columns]], ignore_index=True)
    return conform("submissions", every[every["token_id"] >= 0].sort_values("begin_ns", kind="stable", ignore_index=True))


def answered(tables: Tables) -> pd.DataFrame:
    """Batches of NPU queues as submissions."""
    batches = tables["npu_batches"]
    known = batches["wait_ns"].ge(0)
    return batches.assign(
        graph_id=NONE,
        backend=QUEUED,
        submitted_ns=batches["begin_ns"] + batches["submit_ns"].clip(lower=0),
        wait_ns=(batches["end_ns"] - batches["wait_ns"]).where(known, NONE),
        done_ns=batches["end_ns"].where(known, NONE),
        accelerator_ns=batches["npu_us"] * 1e3,
    )


def first_waits(tables: Tables, graphs: pd.DataFrame) -> pd.DataFrame:
    """For each graph, the first wait for its backend after its submission: graph_id, wait_ns, done_ns; -1: none."""
    every = tables["graphs"]
    waits = every[every["kind"] == "wait"].sort_values("begin_ns", kind="stable")
    awaited, given = shared_codes(*([frame[name].to_numpy() for name in ("backend", "pid")] for frame in (waits, graphs)))
    row = following(awaited, waits["begin_ns"].to_numpy(), given, graphs["end_ns"].to_numpy() - 1)
    names = {"graph_id": "graph_id", "wait_ns": "begin_ns", "done_ns": "end_ns"}
    return pd.DataFrame({name: np.append(waits[column], NONE)[row] for name, column in names.items()}, index=graphs.index)


def waits(tables: Tables, pieces: pd.DataFrame) -> Intervals:
    """The times in which steps waited for an accelerator, keyed by thread."""
    rows = pieces[pieces["cause"] == "accelerator"]
    owner = tables["tokens"].set_index("token_id")["tid"]
    return Intervals(owner.reindex(rows["token_id"]).to_numpy(), rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy())


def faster(tables: Tables, pieces: pd.DataFrame, share: float = FASTER) -> dict[str, Any]:
    """The saving of an accelerator that takes `share` less time, in ms over all tokens; {} if none was used.

    The saving of a submission is limited to the token's wait for it: time covered by CPU work saves nothing. If no profile
    gives the accelerator's working time, it is taken to work until the host knows that it is done. `spun_ms`: the part of
    the wait in which the waiting thread had a CPU.
    """
    given, waited = submissions(tables), waits(tables, pieces)
    if not len(given):
        return {}
    owner = tables["tokens"].set_index("token_id")["tid"]
    until = given[["submitted_ns", "done_ns"]].max(axis=1)
    busy = given["accelerator_ns"].fillna(until - given["begin_ns"])
    exposed = covered(
        waited, Intervals(owner.reindex(given["token_id"]).to_numpy(), given["begin_ns"].to_numpy(), until.to_numpy())
    )
    won, total = float(np.minimum(busy * share, exposed).sum()), float(pieces["duration_ns"].sum())
    return {
        "faster": share,
        "submissions": len(given),
        "unprofiled": int(given["accelerator_ns"].isna().sum()),
        "works_ms": float(busy.sum()) / 1e6,
        "waited_ms": float(waited.length.sum()) / 1e6,
        "spun_ms": float(common(waited, Spans(tables).state("running")).length.sum()) / 1e6,
        "won_ms": won / 1e6,
        "won_share": won / total if total else 0.0,
    }


def run_sum(rows: pd.DataFrame) -> dict[str, float]:
    """ms of all tokens by cause; `residual_share` is relative to the total."""
    spent = {name: float(rows[name].sum()) / 1e6 for name in (*CAUSES, RESIDUAL, "total")}
    return {**spent, "residual_share": spent[RESIDUAL] / spent["total"] if spent["total"] else 0.0}


def gain(answer: dict[str, Any]) -> str:
    """`faster` as text."""
    worked, waited, bound = answer["works_ms"], answer["waited_ms"], "at most " if answer["unprofiled"] else ""
    return (
        f"an accelerator that takes {answer['faster']:.0%} less time would save {answer['won_ms']:,.2f} ms "
        f"({answer['won_share']:.1%} of the steps): it works {bound}{worked:,.1f} ms, and steps wait for it for {waited:,.1f} ms"
    )


def summary(tables: Tables, share: float = FASTER) -> dict[str, Any]:
    """Ledger figures: `run_ms` by cause, `phases_ms`, `accelerator` from `faster`; {} without tokens."""
    pieces = ledger_pieces(tables)
    rows = ledger(tables, pieces)
    if not len(rows):
        return {}
    by_phase = phases.phase_shares(rows, CAUSES)
    return {"run_ms": run_sum(rows), "phases_ms": by_phase, "accelerator": faster(tables, pieces, share)}


def shares(answer: dict[str, Any], most: int = 3) -> str:
    """The largest causes of a run as text, from `summary`: `expert loads 49 %, accelerator 40 %; residual 0.00 %`."""
    spent = answer["run_ms"]
    ranked = sorted((name for name in CAUSES if spent[name] > 0), key=lambda name: -spent[name])[:most]
    parts = ", ".join(f"{name.replace('_', ' ')} {spent[name] / spent['total']:.0%}" for name in ranked)
    return f"{parts}; residual {spent['residual_share']:.2%}"
