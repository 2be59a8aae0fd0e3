"""The report's section on threads: states, balance of work, and displacement by other threads."""

import pandas as pd

from views.report.sections import Block, Run, Section, axis, chart, label, note, table, table_of

STATES = {
    "running": "computing",
    "runnable": "run queue",
    "waiting": "disk and faults",
    "sleeping": "asleep",
    "stopped": "stopped",
}
"""State → the cause whose colour it has."""
MOST, LEAST = 24, 0.01
"""Maximum number of threads drawn, and their minimum observed time relative to the longest: others are too short."""
STATES_QUERY = (
    "select s.tid, coalesce(any_value(t.name), '') as name, "
    + ", ".join(f"coalesce(sum(s.duration_ns) filter (s.state = '{state}'), 0)/1e6 as {state}_ms" for state in STATES)
    + ", count(*) filter (s.state = 'running') as times from thread_states s left join threads t using (tid) "
    "group by s.tid order by running_ms desc, s.tid"
)
DISPLACED = (
    "Threads that took a CPU from threads of steps",
    "select name, by_tid::varchar as tid, if(own, 'the program''s own', 'another program''s') as whose, times, ms, cost_ms "
    "from displaced_by order by cost_ms desc, by_tid",
    "text displaced by, text tid, text whose, number times, number ms without a cpu, bar cost to steps ms",
)
BALANCE = (
    "Work in operators",
    "select tid::varchar as tid, name, operators, busy_ms, wait_ms, 100 * last_share as last_percent "
    "from thread_balance order by busy_ms desc, tid",
    "text tid, text thread, number operators, bar busy ms, number waiting for others ms, number done last %",
)
LEGEND = (
    "Waiting: uninterruptible sleep (disk, page faults). Runnable: ready, without a CPU. "
    "Stopped: by a signal, also while the tracer places probes."
)


def state_chart(run: Run) -> list[Block]:
    """Time of every thread of the program in each state."""
    rows = run.ask(STATES_QUERY)
    if not len(rows):
        return []
    ms = rows[[f"{state}_ms" for state in STATES]].set_axis(list(STATES), axis=1)
    observed = ms.sum(axis=1)
    longest = ms[observed >= LEAST * observed.max()].head(MOST).iloc[::-1]
    share = longest.div(longest.sum(axis=1).clip(lower=1e-9), axis=0) * 100
    y = [f"{label(name, 20)} {tid}" for name, tid in rows.loc[longest.index, ["name", "tid"]].itertuples(index=False)]
    bar = {"type": "bar", "orientation": "h", "y": y}
    traces = [{**bar, "name": state, "x": share[state].round(3), "cause": cause} for state, cause in STATES.items()]
    columns = (
        "text thread, text tid, bar running ms, number runnable ms, number waiting ms, number sleeping ms, "
        "number stopped ms, number times on cpu"
    )
    body = pd.concat([rows["name"], rows["tid"].astype(str), ms, rows["times"]], axis=1)
    axes = {"barmode": "stack", "xaxis": axis("%"), "yaxis": {"automargin": True}}
    states_chart = chart("Share of each thread's time", traces, LEGEND, 110 + 26 * len(longest), STATES_QUERY, **axes)
    return [states_chart, table(columns, body, "Threads and their states", STATES_QUERY)]


def thread_section(run: Run) -> Section | None:
    """The section on threads."""
    scheduled = len(run.tables["thread_states"]) > 0
    blocks = [*state_chart(run), *table_of(run, *BALANCE)]
    if scheduled and len(run.tables["op_threads"]):
        blocks += table_of(run, *DISPLACED)
    if blocks and not scheduled:
        blocks.append(note("Scheduling was not recorded (level sched): states are unknown."))
    return Section("threads", "Threads", blocks) if blocks else None
