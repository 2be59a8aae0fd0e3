"""The report's section on the NPU without QNN: batches in its queues, their operators, and the driver's calls."""

from analyzer.questions import driver_calls, npu_queues
from views.report.sections import Block, Run, Section, axis, chart, note, pairs, table_of

UNCONFIRMED = "No device has confirmed these figures: they were checked with a stand-in for the processor (docs/hexagon.md)."
BATCHES = (
    "Batches by size (medians)",
    "select n_ops, count(*) batches, sum(bytes) filter (bytes >= 0)/1024 kib, "
    "median(submit_ns) filter (submit_ns >= 0)/1e3 send_us, "
    "median(wait_ns) filter (wait_ns >= 0)/1e3 wait_us, median(npu_us) filter (not isnan(npu_us)) npu_us, "
    "max(in_flight) filter (in_flight >= 0) deepest from npu_batches group by n_ops order by batches desc, n_ops",
    "number operators, number batches, bar KiB, number sending µs, number waiting µs, number NPU µs, number deepest queue",
)
OPERATORS = (
    "Their operators",
    "select type, count(*) runs, sum(us) filter (us >= 0)/1e3 ms, median(us) filter (us >= 0) median_us, "
    "median(cycles) filter (cycles >= 0) median_cycles from npu_operators group by type "
    "order by ms desc nulls last, runs desc, type",
    "text type, number runs, bar NPU ms, number median µs, number median cycles",
)
DEPTH_QUERY = "select batch_id, in_flight from npu_batches order by begin_ns"


def queue_blocks(run: Run) -> list[Block]:
    """Batches by size, depth of the queue, operators by type."""
    facts = npu_queues.queue_summary(run.tables)
    if not facts:
        return []
    from_host = facts["in_flight"] >= 0  # else the NPU's own profile, without the host's activity
    steps = f" in {facts['steps']:,} steps" if facts["steps"] else ""
    items = [("batches", f"{facts['batches']:,}{steps}"), ("operators", f"{facts['operators']:,}")]
    if from_host:
        items += [("sending", f"{facts['submit_ms']:,.2f} ms"), ("waiting for answers", f"{facts['wait_ms']:,.2f} ms")]
    if facts["npu_ms"] is not None:
        items.append(("time by the NPU's own profile", f"{facts['npu_ms']:,.2f} ms"))
    charts = [depth_chart(run)] if from_host else []
    return [pairs(items), *charts, *table_of(run, *BATCHES), *table_of(run, *OPERATORS)]


def depth_chart(run: Run) -> Block:
    """The depth of the queues over time."""
    depth = run.ask(DEPTH_QUERY)
    trace = {"type": "bar", "x": depth["batch_id"], "y": depth["in_flight"], "slot": 0, "marker": {"line": {"width": 0}}}
    axes = {"xaxis": axis("batch"), "yaxis": axis("batches in flight"), "showlegend": False, "bargap": 0}
    return chart("Batches in flight at each submission", [trace], "", 220, DEPTH_QUERY, **axes)


def driver_blocks(run: Run) -> list[Block]:
    """The driver's calls."""
    facts = driver_calls.rpc_summary(run.tables)
    if not facts:
        return []
    items = [("calls of the driver", f"{facts['calls']:,} ({facts['driver']}), {facts['answered']:,} seen to their end")]
    parts = {"before it is sent": "before_us", "until its answer": "answer_us", "behind its answer": "behind_us"}
    items += [(f"median {name}", f"{facts[key]:,.1f} µs") for name, key in parts.items() if key in facts]
    return [pairs(items)]


def queue_section(run: Run) -> Section | None:
    """The section on the NPU without QNN."""
    blocks = [*queue_blocks(run), *driver_blocks(run)]
    return Section("npu-queues", "NPU: queues and driver", [note(UNCONFIRMED), *blocks]) if blocks else None
