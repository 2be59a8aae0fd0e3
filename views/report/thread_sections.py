"""The report's section on threads: their states, how evenly they shared the work, and who took a CPU from them."""

import pandas as pd

from analyzer.questions import threads as facts
from views.report.sections import MS, Block, Run, Section, axis, chart, heads, label, note, table

STATES = (("running", 0), ("runnable", 2), ("waiting", 3), ("sleeping", 7), ("stopped", 4))
MOST, LEAST = 24, 0.01
"""Threads drawn, and how long one must have been seen: of a thread that lived for a moment, shares say nothing."""
STATES_QUERY = "select tid, state, count(*) times, sum(duration_ns)/1e6 ms from thread_states group by all order by ms desc"
DISPLACED_QUERY = (
    "select by_tid, count(*) times, sum(end_ns - begin_ns)/1e6 ms, sum(cost_ns)/1e6 cost_ms "
    "from displacements where by_tid <> tid group by all order by cost_ms desc"
)
BALANCE_QUERY = (
    "select tid, count(*) operators, sum(wait_ns - begin_ns)/1e6 busy_ms, sum(end_ns - wait_ns)/1e6 wait_ms "
    "from op_threads group by tid order by busy_ms desc"
)
LEGEND = (
    "Waiting is uninterruptible sleep: disk, page faults. Runnable is waiting for a cpu. "
    "Stopped is held by a signal, as the tracer does while it places probes."
)


def states(run: Run) -> list[Block]:
    """Time of every thread of the program in each state."""
    frame = run.tables["thread_states"]
    if not len(frame):
        return []
    names = dict(zip(run.tables["threads"]["tid"], run.tables["threads"]["name"], strict=True))
    ms = frame.pivot_table(index="tid", columns="state", values="duration_ns", aggfunc="sum", fill_value=0) / MS
    ms = ms.reindex(columns=[state for state, _ in STATES], fill_value=0).sort_values("running", ascending=False)
    switches = frame[frame["state"] == "running"].groupby("tid").size()
    known = ms.sum(axis=1)
    shown = ms[known >= LEAST * known.max()].head(MOST).iloc[::-1]
    share = shown.div(shown.sum(axis=1).clip(lower=1e-9), axis=0) * 100
    y = [f"{label(names.get(tid, ''), 20)} {tid}" for tid in shown.index]
    bar = {"type": "bar", "orientation": "h", "y": y}
    traces = [{**bar, "name": state, "x": share[state].round(3), "slot": slot} for state, slot in STATES]
    rows = [[names.get(tid, ""), str(tid), *ms.loc[tid].tolist(), int(switches.get(tid, 0))] for tid in ms.index]
    columns = heads(
        "text thread, text tid, bar running ms, number runnable ms, number waiting ms, number sleeping ms, "
        "number stopped ms, number times on cpu"
    )
    axes = {"barmode": "stack", "xaxis": axis("%"), "yaxis": {"automargin": True}}
    drawn = chart("Share of each thread's time", traces, LEGEND, 110 + 26 * len(shown), STATES_QUERY, **axes)
    return [drawn, table(columns, rows, "Threads and their states", STATES_QUERY)]


def balance(run: Run) -> list[Block]:
    """How evenly threads shared their operators."""
    rows = facts.balance(run.tables)
    if not len(rows):
        return []
    rows = rows.assign(tid=rows["tid"].astype(str), last_share=100 * rows["last_share"])
    columns = heads("text tid, text thread, number operators, bar busy ms, number waiting for others ms, number done last %")
    return [table(columns, rows, "Work in operators", BALANCE_QUERY)]


def displaced(run: Run) -> list[Block]:
    """Who took a CPU from threads within operators."""
    if not len(run.tables["thread_states"]) or not len(run.tables["op_threads"]):
        return []
    rows = facts.displaced_by(run.tables)
    if not len(rows):
        return []
    own = pd.Series(rows["own"]).map({True: "the program's own", False: "another program's"})
    shown = rows.assign(by_tid=rows["by_tid"].astype(str), own=own)[["name", "by_tid", "own", "times", "ms", "cost_ms"]]
    columns = heads("text displaced by, text tid, text whose, number times, number ms without a cpu, bar cost to steps ms")
    return [table(columns, shown, "Who took a CPU from threads within operators", DISPLACED_QUERY)]


def threads(run: Run) -> Section | None:
    """What every thread of the program did with its time."""
    blocks = [*states(run), *balance(run), *displaced(run)]
    if blocks and not len(run.tables["thread_states"]):
        blocks.append(note("Scheduling was not recorded (level sched): states are not known."))
    return Section("threads", "Threads", blocks) if blocks else None
