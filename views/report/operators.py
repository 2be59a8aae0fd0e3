"""The report's section on operators: time, achieved share of the machine's ceilings, and bound."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import roofline
from analyzer.questions.ceilings import Ceilings
from views.report.sections import Block, Run, Section, analyzer_command, axis, chart, label, labels, note, table, table_of

MOST_POINTS, MOST_TYPES = 120, 16
BY_NAME = (
    "Operators by name",
    "select o.type, o.name, o.shape, coalesce(g.backend, '') as backend, count(*) runs, sum(o.duration_ns)/1e6 ms, "
    "100 * sum(o.duration_ns)/greatest(sum(sum(o.duration_ns)) over (), 1) as share, avg(o.duration_ns)/1e3 mean_us, "
    "max(o.duration_ns)/1e3 max_us, "
    "if(sum(o.busy_ns) >= 0, 100 * sum(o.wait_ns)/nullif(sum(o.busy_ns + o.wait_ns), 0), null) waiting, "
    "greatest(sum(o.maj_flt), 0) major_faults, arg_max(o.begin_ns, o.duration_ns) begin_ns, "
    "max(o.duration_ns) duration_ns from operators o left join graphs g using (graph_id) where o.complete "
    "group by all order by ms desc, o.type, o.name, o.shape, backend",
    "text type, text name, text shape, text backend, number runs, bar total ms, number share %, number mean µs, "
    "number max µs, number waiting %, number major faults, moment the slowest in the timeline",
)
BACKENDS = (
    "The CPU against accelerators: equal operators",
    "select * from backends",
    "text type, text name, text shape, text backend, number runs, number median µs, number runs on the CPU, "
    "number its median µs, number times the CPU",
)
NO_CEILINGS = "Measure this machine's ceilings once, and the report shows what bounds each operator: moescope predict ceilings"
NO_WORK = "The engine does not describe these operators' tensors: their work is unknown, so no roofline can be drawn."


def by_type(rows: pd.DataFrame, lost: str) -> Block:
    """Time by operator type, for the costliest types of the roofline's rows; `lost` names what was taken out."""
    ms = rows.groupby("type")["ms"].sum().sort_values(ascending=False).head(MOST_TYPES).iloc[::-1]
    bars = {"type": "bar", "orientation": "h", "x": ms, "y": labels(ms.index), "slot": 0}
    bars["hovertemplate"] = "%{y}: %{x:.3f} ms<extra></extra>"
    axes: dict[str, Any] = {"xaxis": axis("ms, all steps that count"), "yaxis": {"automargin": True}, "showlegend": False}
    remark = f"Computing time: without {lost}." if lost else ""
    drawn = chart("Time by operator type", [bars], remark, 90 + 24 * len(ms), **axes)
    return drawn | {"command": analyzer_command("roofline RUN")}


def achieved_table(rows: pd.DataFrame) -> Block:
    """Achieved performance by type and backend."""
    shares = ["share_of_roof", "wait_share", "disk_share"]
    fields = ["type", "backend", "bound", "count", "ms", "mean_us", "roof_us", "share_of_roof", "above_ms"]
    fields += ["gflops", "gbytes_per_s", "intensity", "wait_share", "disk_share"]
    cells = rows[fields].assign(**{name: 100 * rows[name] for name in shares})
    columns = (
        "text type, text backend, text bound by, number runs, bar total ms, number mean µs, number attainable µs, "
        "number achieved %, number above it ms, number GFLOP/s, number GB/s, number flop/byte, number waiting %, number disk %"
    )
    return table(columns, cells, "Achieved performance by type", command="roofline RUN")


def roof_lines(ceilings: Ceilings, low: float, high: float) -> list[dict]:
    """The machine's roofs, for one thread and for all CPUs."""
    traces = []
    for slot, threads in ((7, 1), (1, ceilings.cpus)):
        bandwidth, flops = ceilings.of(threads)
        x = np.geomspace(low, high, 60)
        name = f"{threads} thread{'s' if threads > 1 else ''}: {bandwidth / 1e9:,.1f} GB/s, {flops / 1e9:,.0f} GFLOP/s"
        y = np.minimum(x * bandwidth, flops) / 1e9
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "slot": slot, "hoverinfo": "name"})
    return traces[: 1 + (ceilings.cpus > 1)]


def roofline_chart(run: Run) -> Block | None:
    """Operators by shape under the machine's roofs; larger points took more time. None without roofs or without known work."""
    if run.ceilings is None:
        return None
    rows = roofline.roofline_rows(run.tables, run.ceilings, "shape")
    rows = rows[(rows["flops"] > 0) & (rows["bytes"] > 0) & (rows["backend"] == "cpu")].head(MOST_POINTS)
    if not len(rows):
        return None
    bandwidth, flops = run.ceilings.of(run.ceilings.cpus)
    low, high = float(rows["intensity"].min()) / 3, 3 * max(float(rows["intensity"].max()), flops / bandwidth)
    traces = roof_lines(run.ceilings, low, high)
    for slot, kind in enumerate(rows.groupby("type")["ms"].sum().sort_values(ascending=False).index[:6]):
        part = rows[rows["type"] == kind]
        texts = [
            label(f"{s} {w}: {ms:,.1f} ms, {b}")
            for s, w, ms, b in part[["shape", "weights", "ms", "bound"]].itertuples(index=False)
        ]
        size = np.clip(8 + 34 * np.sqrt(part["ms"] / rows["ms"].sum()), 8, 34).round(1)
        hover = "%{text}<br>%{x:.2f} flop/byte, %{y:.2f} GFLOP/s<extra>%{fullData.name}</extra>"
        points = {"type": "scatter", "mode": "markers", "x": part["intensity"], "y": part["gflops"], "sizes": size, "text": texts}
        traces.append({**points, "name": label(kind), "slot": slot, "hovertemplate": hover})
    axes: dict[str, Any] = {"xaxis": axis("flop/byte", type="log"), "yaxis": axis("GFLOP/s", type="log")}
    remark = "Each point is one shape of operator on the CPU; its area is its share of time. Below the roof, time is lost."
    drawn = chart("Roofline", traces, remark, 460, **axes)
    return drawn | {"command": analyzer_command("roofline RUN --by shape")}


def operator_section(run: Run) -> Section | None:
    """Operators by type, under the roofline, and by name."""
    if not run.tables["operators"]["complete"].any():
        return None
    rows = roofline.roofline_rows(run.tables, run.ceilings)
    blocks = [by_type(rows, run.summary["operators"]["not_computing"]), achieved_table(rows)]
    blocks.append(roofline_chart(run) or note(NO_WORK if run.ceilings else NO_CEILINGS))
    return Section("operators", "Operators", [*blocks, *table_of(run, *BACKENDS), *table_of(run, *BY_NAME)])
