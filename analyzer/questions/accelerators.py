"""Accelerators: the work that steps submit to them, operators that fall back to the CPU, and the saving of a faster one."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.parts import HOST, NPU, given_away
from analyzer.records.intervals import Intervals, common_time, covered_ns
from analyzer.records.schema import MADE, Tables, conform
from analyzer.records.spans import NONE, following, shared_codes
from analyzer.tables.qnn.busy import accepted

QUEUED = "hexagon"
"""The backend whose graphs go to the NPU through a queue, batch by batch, in `npu_batches`."""
SUBMISSION_COSTS = ("submission", "queue", "transport", "completion")
"""Causes that occur with every submission to an accelerator, regardless of its work."""
FASTER = 0.08
"""Default share by which `accelerator_saving` speeds the accelerator up."""


def fallen_back(tables: Tables) -> np.ndarray:
    """Which operators the CPU computes between operators of the same layer and step that ran on an accelerator.

    Only if the engine splits one graph over backends: separate graphs of a layer were assigned to backends on purpose.
    """
    operators = tables["operators"]
    graphs = tables["graphs"].set_index("graph_id")[["backend", "layer", "kind"]]
    of_graph = graphs.reindex(operators["graph_id"])
    split = (of_graph["layer"] == NONE).to_numpy() & (operators["layer"] >= 0).to_numpy()
    if not split.any():
        return split
    accelerated = split & ~of_graph["backend"].isin(HOST).to_numpy()
    begun = pd.concat([operators.loc[accelerated, ["token_id", "layer", "begin_ns"]], queued_operators(tables)])
    ends = begun.groupby(["token_id", "layer"])["begin_ns"].agg(["min", "max"])
    of_layer = ends.reindex(pd.MultiIndex.from_frame(operators[["token_id", "layer"]]))
    begin = operators["begin_ns"].to_numpy()
    between = (of_layer["min"].to_numpy() < begin) & (begin < of_layer["max"].to_numpy())
    return split & (of_graph["backend"] == "cpu").to_numpy() & between


def queued_operators(tables: Tables) -> pd.DataFrame:
    """Operators sent to the NPU through a queue: token_id, layer, and the time their batch was sent, begin_ns."""
    operators = tables["npu_operators"].query("layer >= 0")
    sent = tables["npu_batches"].set_index("batch_id")["begin_ns"].reindex(operators["batch_id"]).to_numpy()
    return operators[["token_id", "layer"]].assign(begin_ns=sent)


def submissions(tables: Tables) -> pd.DataFrame:
    """Work submitted to an accelerator within steps, and the time at which the host knew that it was done."""
    executed, graphs = executions(tables), given_away(tables)
    graphs = graphs[(graphs["backend"] != QUEUED).to_numpy() | (len(tables["npu_batches"]) == 0)]
    waited = first_waits(tables, graphs)[["wait_ns", "done_ns"]]
    given = graphs.assign(submitted_ns=graphs["end_ns"], accelerator_ns=np.nan, **waited)
    columns = [column.name for column in MADE["submissions"]]
    every = pd.concat([executed[columns], given[columns]], ignore_index=True)
    return conform("submissions", every[every["token_id"] >= 0].sort_values("begin_ns", kind="stable", ignore_index=True))


def executions(tables: Tables) -> pd.DataFrame:
    """QNN's executions and the batches of NPU queues, in the columns of `submissions`, with `queue_ns` and `worked_ns`.

    `queue_ns`: time in the NPU's queue by the profile; `worked_ns`: the earliest possible begin on the NPU.
    """
    rows, batches = accepted(tables), batch_executions(tables)
    late = rows["asynchronous"].to_numpy()
    rows = rows.assign(
        backend=NPU,
        submitted_ns=np.where(late, rows["returned_ns"], rows["begin_ns"]),
        wait_ns=np.where(late, NONE, rows["begin_ns"]),
        done_ns=rows["end_ns"],
        accelerator_ns=rows["accel_us"] * 1e3,
        queue_ns=rows["queue_us"] * 1e3,
        worked_ns=rows["begin_ns"],
    )
    columns = [*(column.name for column in MADE["submissions"]), "queue_ns", "worked_ns"]
    return pd.concat([rows[columns], batches[columns]], ignore_index=True)


def batch_executions(tables: Tables) -> pd.DataFrame:
    """Batches of NPU queues as executions; each is worked on when it was sent and the ones before it in its queue are done."""
    batches = tables["npu_batches"]
    known, sent = batches["wait_ns"].ge(0), batches["begin_ns"] + batches["submit_ns"].clip(lower=0)
    took = (batches["npu_us"].fillna(0) * 1e3).astype(np.int64)
    before = took.groupby([batches["pid"], batches["queue"]]).cumsum() - took
    return batches.assign(
        graph_id=NONE,
        backend=QUEUED,
        submitted_ns=sent,
        wait_ns=(batches["end_ns"] - batches["wait_ns"]).where(known, NONE),
        done_ns=batches["end_ns"].where(known, NONE),
        accelerator_ns=batches["npu_us"] * 1e3,
        queue_ns=np.nan,
        worked_ns=before + (sent - before).groupby([batches["pid"], batches["queue"]]).cummax(),
    )


def first_waits(tables: Tables, graphs: pd.DataFrame) -> pd.DataFrame:
    """For each graph, the first wait for its backend after its submission: graph_id, wait_ns, done_ns; -1: none."""
    every = tables["graphs"]
    waits = every[every["kind"] == "wait"].sort_values("begin_ns", kind="stable")
    awaited, given = shared_codes(*([frame[name].to_numpy() for name in ("backend", "pid")] for frame in (waits, graphs)))
    row = following(awaited, waits["begin_ns"].to_numpy(), given, graphs["end_ns"].to_numpy() - 1)
    names = {"graph_id": "graph_id", "wait_ns": "begin_ns", "done_ns": "end_ns"}
    return pd.DataFrame({name: np.append(waits[column], NONE)[row] for name, column in names.items()}, index=graphs.index)


def accelerator_waits(tables: Tables, pieces: pd.DataFrame) -> Intervals:
    """The times in which steps waited for an accelerator, keyed by thread."""
    rows = pieces[pieces["cause"] == "accelerator"]
    owner = tables["tokens"].set_index("token_id")["tid"]
    return Intervals(owner.reindex(rows["token_id"]).to_numpy(), rows["begin_ns"].to_numpy(), rows["end_ns"].to_numpy())


def accelerator_saving(tables: Tables, pieces: pd.DataFrame, share: float = FASTER) -> dict[str, Any]:
    """The saving of an accelerator that takes `share` less time, in ms over all steps; {} if none was used.

    The saving of a submission is limited to the step's wait for it: time covered by CPU work saves nothing. If no profile
    gives the accelerator's working time, it is taken to work until the host knows that it is done. `spun_ms`: the part of
    the wait in which the waiting thread had a CPU.
    """
    given, waited = submissions(tables), accelerator_waits(tables, pieces)
    if not len(given):
        return {}
    owner = tables["tokens"].set_index("token_id")["tid"]
    until = given[["submitted_ns", "done_ns"]].max(axis=1)
    busy = given["accelerator_ns"].fillna(until - given["begin_ns"])
    exposed = covered_ns(
        waited, Intervals(owner.reindex(given["token_id"]).to_numpy(), given["begin_ns"].to_numpy(), until.to_numpy())
    )
    states = tables["thread_states"]
    running = Intervals.of_table(states).where((states["state"] == "running").to_numpy())
    won, total = float(np.minimum(busy * share, exposed).sum()), float(pieces["duration_ns"].sum())
    return {
        "faster": share,
        "submissions": len(given),
        "unprofiled": int(given["accelerator_ns"].isna().sum()),
        "works_ms": float(busy.sum()) / 1e6,
        "waited_ms": float(waited.length.sum()) / 1e6,
        "spun_ms": float(common_time(waited, running).length.sum()) / 1e6,
        "won_ms": won / 1e6,
        "won_share": won / total if total else 0.0,
    }


def saving_text(answer: dict[str, Any]) -> str:
    """`accelerator_saving` as text."""
    worked, waited, unknown = answer["works_ms"], answer["waited_ms"], answer["unprofiled"]
    bound = "at most " if unknown else ""
    own = f"; the accelerator's own time is unknown for {unknown:,} of {answer['submissions']:,} submissions" if unknown else ""
    return (
        f"{answer['faster']:.0%} less time on the accelerator would save {bound}{answer['won_ms']:,.2f} ms "
        f"({answer['won_share']:.1%} of step time): it works for {bound}{worked:,.1f} ms, steps wait for it for "
        f"{waited:,.1f} ms{own}"
    )
