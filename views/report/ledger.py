"""The report's ledger: one cause for every moment of a step."""

import numpy as np

from analyzer.questions import ledger
from views.report.sections import MS, Block, Run, Section, axis, binned, chart, finished, label, note, per_bin
from views.report.timing import SMALLER, stacked_shares

MEANS_QUERY = (
    "select phase, avg(columns(* exclude (token_id, phase, position, complete)))/1e6 "
    "from ledger where complete group by phase order by phase"
)
STEPS_QUERY = "select * exclude (complete, total) from ledger where complete{} order by token_id"
DECODE = " and phase = 'decode'"
REMARK = (
    "Shares of a mean step, seen from its own thread: its own work, time without a CPU, then waiting. "
    "Causes and residual add up to the step."
)
RPC = (
    "rpc: transport to the accelerator and back, waiting in its queue where no profile reports it, and late answers. "
    "These cannot be distinguished from outside."
)
GREY = 7


def over_steps(run: Run, name: str, query: str) -> Block:
    """Every step in the result of `query`, with causes stacked in the order and colours of the mean steps."""
    rows = run.ask(query)
    bins = binned(len(rows))
    largest = run.ask(MEANS_QUERY)[list(ledger.CAUSES)].max().sort_values(ascending=False, kind="stable").index
    parts = {cause: rows[cause] for cause in largest[:GREY]}
    parts |= {SMALLER: rows[largest[GREY:]].sum(axis=1), ledger.RESIDUAL: rows[ledger.RESIDUAL]}
    slots = {cause: slot for slot, cause in enumerate(largest[:GREY])} | {SMALLER: GREY + 1, ledger.RESIDUAL: GREY}
    traces = [
        {
            **{"type": "bar", "marker": {"line": {"width": 0}}, "name": label(cause.replace("_", " ")), "slot": slots[cause]},
            "y": np.round(np.bincount(bins, ns / MS) / np.bincount(bins), 4),
        }
        for cause, ns in parts.items()
        if ns.any()
    ]
    axes = {"xaxis": axis(name), "yaxis": axis("ms"), "barmode": "stack", "bargap": 0}
    return chart(f"The ledger of every {name}", traces, per_bin(len(rows)), 320, query, **axes)


def ledger_section(run: Run) -> Section | None:
    """Means by phase, every step, and the saving of a faster accelerator."""
    tokens = finished(run.tables["tokens"])
    if not len(tokens):
        return None
    shown = ("decode step", STEPS_QUERY.format(DECODE)) if "decode" in set(tokens["phase"]) else ("step", STEPS_QUERY.format(""))
    blocks = [stacked_shares(run, "Time of a step by cause", REMARK, MEANS_QUERY), over_steps(run, *shown)]
    facts = run.summary.get("ledger") or {}
    if (facts.get("run_ms") or {}).get("rpc"):
        blocks.append(note(RPC))
    if gained := facts.get("accelerator"):
        blocks.append(note(ledger.gain(gained).capitalize() + "."))
    return Section("ledger", "Ledger", blocks)
