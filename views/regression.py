"""`regression.html`: two groups of runs compared, one self-contained file. Its document: analyzer/compare/document.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.compare.verdict_text import ENERGY, spoken_name
from moescope.terminal import counted
from views.colours import CAUSES
from views.profdag.change_graph import change_graph
from views.report.energy import UNCONFIRMED
from views.report.sections import Block, Section, axis, cards, chart, labels, note, pairs, table, write_sections

Document = dict[str, Any]
FOREST, MOST_RUNS = 24, 12
OF_A_RUN = "decode step of a run, from 1"
LEAST_SPREAD = 0.02
"""A waterfall shows at least this share of the step, or one without a change would show nothing."""
FARTHEST = 1000.0
"""Ratios beyond it and its inverse are drawn there."""
TICKS = {1.0: "0", 2.0: "2x", 0.5: "1/2", 10.0: "10x", 0.1: "1/10", 1.1: "+10 %", 0.9: "-10 %", 1.02: "+2 %", 0.98: "-2 %"}
TICKS |= {100.0: "100x", 0.01: "1/100", 1e3: "1000x", 1e-3: "1/1000", 1.25: "+25 %", 0.75: "-25 %", 5.0: "5x", 0.2: "1/5"}
"""Ratio → its text on an axis, the more important ones first: the page leaves out those without room."""
FOREST_REMARK = (
    "Median of the candidate's runs against that of the base's, with 95 % bootstrap intervals over runs. The axis is that of the "
    "ratio: half and twice are equally far from no change, and small changes have more room."
)
SLOT = {"slower": 3, "faster": 1, "same": 0, "inconclusive": 7, "other clocks": 7, "minor": 7, "vanished": 4, "appeared": 4}


def name_of(metric: dict[str, Any]) -> str:
    """A metric's name, with its place and the engine's names."""
    where = [metric["metric"]] if metric["family"] != "operator" else []
    where += [metric[key] for key in ("type", "shape", "graph", "backend", "phase") if metric[key]]
    where += [f"{key} {metric[key]}" for key in ("layer", "expert") if metric[key] >= 0]
    return " · ".join(map(str, where))


def percent(ratio: float | None) -> float | None:
    """A ratio as a change in percent."""
    return None if ratio is None else 100 * (ratio - 1)


def signed(value: float) -> str:
    """A signed difference with four digits."""
    return f"{value:+,.1f}" if abs(value) >= 100 else f"{value:+.4g}"


def verdict_blocks(document: Document) -> Section:
    """The verdict as text, and the figures of speed."""
    runs = document["runs"]
    blocks: list[Block] = [{"kind": "findings", "items": document["words"]}]
    speed = [m for m in document["metrics"] if m["family"] == "speed" and m["change"] is not None]
    speed += [m for m in document["metrics"] if m["metric"] == ENERGY and m["change"] is not None]
    blocks.append(cards([(spoken_card(m), f"{percent(m['change']):+,.1f} %", m["direction"]) for m in speed]))
    if document.get("failures"):
        blocks.append(
            {"kind": "findings", "items": [{"level": "bad", "text": f"Limit broken: {t}"} for t in document["failures"]]}
        )
    counts = ", ".join(f"{n:,} {name}" for name, n in document["verdicts"].items())
    rules = document["rules"]
    items = [("base", list_runs(runs["base"])), ("candidate", list_runs(runs["cand"])), ("verdicts", counts)]
    blocks.append(pairs(items))
    blocks.append(
        note(
            "The unit is the run. A difference counts as a change if one as large occurs in any metric of its family in at most "
            f"{100 * rules['alpha']:g} % of all assignments of the runs to the sides, the bootstrap interval of the median ratio "
            f"excludes 0, and the change exceeds {100 * rules['practical']:g} % and this machine's noise between unchanged runs."
            f" A metric is the same if its interval lies within ±{100 * rules['practical']:g} %; otherwise it is inconclusive."
            " The pace, common to all operators of a run, is divided out of each of them if it is the same on both"
            " sides: interval and p then refer to the candidate's median at the base's pace, which has its own columns."
        )
    )
    if any(metric["metric"] == ENERGY for metric in document["metrics"]):
        blocks.append(note(UNCONFIRMED))
    return Section("verdict", "Verdict", blocks)


def spoken_card(metric: dict[str, Any]) -> str:
    """The metric, with phase and power rail of an energy."""
    return " · ".join(filter(None, (metric["metric"], metric["phase"], metric["type"])))


def list_runs(names: list[str]) -> str:
    """The number of runs, and the first few names."""
    shown = ", ".join(names[:MOST_RUNS])
    return f"{counted(len(names), 'run')}: {shown}" + (" …" if len(names) > MOST_RUNS else "")


def waterfall_charts(document: Document) -> Section | None:
    """The parts of each phase's difference; the bars add up."""
    blocks = [*by_cause(document), *(waterfall_chart(fall) for fall in document["waterfalls"])]
    return Section("waterfall", "Where it comes from", blocks) if blocks else None


def waterfall_chart(fall: dict[str, Any]) -> Block:
    """Bars from the base's mean step to the candidate's, on a scale that begins near both."""
    names = ["base", *labels((part["name"] for part in fall["parts"]), 24), "candidate"]
    delta = np.array([0.0, *(part["delta"] for part in fall["parts"]), 0.0])
    after = fall["step"]["base"] + np.cumsum(delta)
    ends = np.array([fall["step"]["base"], fall["step"]["cand"]])
    low = min(float(after.min()), float(ends.min()))
    spread = max(float(after.max()), float(ends.max())) - low
    floor = max(0.0, low - 2 * max(spread, LEAST_SPREAD * low))
    groups = ((0, [True, *[False] * len(fall["parts"]), True], "mean step"), (3, delta > 0, "slower"), (1, delta < 0, "faster"))
    traces = []
    for slot, chosen, name in groups:
        bar = np.flatnonzero(chosen)
        start = np.where((bar == 0) | (bar == len(delta) - 1), floor, after[bar] - delta[bar])
        top = np.where(bar == 0, ends[0], np.where(bar == len(delta) - 1, ends[1], after[bar]))
        text = [f"{names[i]}: {(delta[i] if slot else top[k]):+.4f} ms" for k, i in enumerate(bar)]
        bars = {"type": "bar", "name": name, "x": [names[i] for i in bar], "base": start, "y": top - start, "slot": slot}
        traces.append({**bars, "hovertext": text, "hoverinfo": "text"})
    total = sum(part["delta"] for part in fall["parts"])
    remark = (
        f"ms per step, means over runs. Parts add up to {signed(total)} ms; the step differs by {signed(ends[1] - ends[0])} ms."
    )
    axes: dict[str, Any] = {"xaxis": {"type": "category", "categoryorder": "array", "categoryarray": names}, "yaxis": axis("ms")}
    axes["yaxis"]["range"] = [floor, float(max(after.max(), ends.max())) * 1.002]
    return chart(f"{fall['phase'].capitalize()} step, from base to candidate", traces, remark, 380, barmode="overlay", **axes)


def change_graph_block(document: Document) -> Section | None:
    """The ProfDAG of both sides, coloured by change."""
    merged = document["graph"]
    return Section("graph", "ProfDAG, coloured by change", [change_graph(merged)]) if merged else None


def by_cause(document: Document) -> list[Block]:
    """Per phase, a step's time by cause on both sides."""
    found = [m for m in document["metrics"] if m["family"] == "phase" and m["metric"] == "time by cause"]
    blocks = []
    for phase in dict.fromkeys(m["phase"] for m in found):
        ms = {m["type"]: [m["cand"] or 0.0, m["base"] or 0.0] for m in found if m["phase"] == phase}
        bar = {"type": "bar", "orientation": "h", "y": ["candidate", "base"]}
        hover = {"hovertemplate": "%{y}, %{fullData.name}: %{x:.4g} ms<extra></extra>"}
        traces = [{**bar, **hover, "name": cause, "cause": cause, "x": ms[cause]} for cause in CAUSES if cause in ms]
        axes: dict[str, Any] = {"xaxis": axis("ms"), "yaxis": {"automargin": True}, "barmode": "stack"}
        blocks.append(
            chart(f"{phase.capitalize()} step by cause", traces, "Mean step; the median over runs of each cause.", 230, **axes)
        )
    return blocks


def axis_position(ratio: float, near: float) -> float:
    """The position of a ratio of times: even for changes below `near`, beyond that logarithmic in the change."""
    return float(np.arcsinh(np.log(min(max(ratio, 1 / FARTHEST), FARTHEST)) / np.log1p(near)))


def ratio_axis(places: list[float], near: float) -> dict[str, Any]:
    """An axis of ratios that covers `places`."""
    low, high = min([*places, -1.0]), max([*places, 1.0])
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    ticks = {at: text for ratio, text in TICKS.items() if low <= (at := axis_position(ratio, near)) <= high}
    return axis("change", range=[low, high], tickmode="array", tickvals=[*ticks], ticktext=[*ticks.values()], zeroline=True)


def forest_chart(document: Document) -> Section | None:
    """Changes with their intervals: speed, and the largest changes."""
    comparable = [m for m in document["metrics"] if None not in (m["ratio"], m["low"], m["high"]) and m["verdict"] != "minor"]
    metrics = comparable[:FOREST][::-1]
    if not metrics:
        return None
    traces, near = [], document["rules"]["practical"]
    y = labels((name_of(m) for m in metrics), 52)
    low, middle, high = (np.array([axis_position(m[end], near) for m in metrics]) for end in ("low", "ratio", "high"))
    for word in dict.fromkeys(m["verdict"] for m in metrics):
        rows = [i for i, m in enumerate(metrics) if m["verdict"] == word]
        texts = [" to ".join(f"{percent(metrics[i][end]):+.4g} %" for end in ("low", "high")) for i in rows]
        spread = {"type": "data", "symmetric": False, "thickness": 1.5, "width": 4}
        error = {**spread, "array": (high - middle)[rows], "arrayminus": (middle - low)[rows]}
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": word,
            "x": middle[rows],
            "y": [y[i] for i in rows],
            "error_x": error,
        }
        about = [f"{percent(metrics[i]['ratio']):+.4g} % ({text})" for i, text in zip(rows, texts, strict=True)]
        hover = {"text": about, "hovertemplate": "%{y}: %{text}<extra></extra>", "showlegend": True}
        traces.append({**trace, **hover, "error_x": error, "slot": SLOT.get(word, 7), "sizes": 8})
    layout: dict[str, Any] = {
        "xaxis": ratio_axis([*low, *high], near),
        "yaxis": {"automargin": True, "categoryorder": "array", "categoryarray": y},
    }
    changes = chart("Changes", traces, FOREST_REMARK, 130 + 22 * len(metrics), **layout)
    return Section("forest", "Changes with their intervals", [changes])


def run_chart(document: Document) -> Section | None:
    """The speed of every run, including outliers."""
    speed = [m for m in document["metrics"] if m["family"] == "speed"]
    if not speed:
        return None
    blocks = []
    for metric in speed:
        traces = [
            {"type": "scatter", "mode": "markers", "name": side, "x": list(range(1, len(values) + 1)), "y": values, "slot": slot}
            for slot, (side, values) in enumerate(zip(("base", "candidate"), metric["runs"], strict=True))
        ]
        number = axis("run", tick0=0, dtick=max(1, max(map(len, metric["runs"])) // 10))
        blocks.append(
            chart(f"Every run's {spoken_name(metric['metric'])}", traces, "", 240, xaxis=number, yaxis=axis(metric["unit"]))
        )
    return Section("runs", "Every run", blocks)


def step_chart(document: Document) -> Section | None:
    """Decode steps of both sides in order, with changes of level."""
    traces: list[dict[str, Any]] = []
    remarks = []
    for slot, (side, name) in enumerate((("base", "base"), ("cand", "candidate"))):
        series = document["series"][side]
        if not series["ms"]:
            continue
        ms = np.asarray(series["ms"], float)
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": 1 + np.arange(len(ms)), "y": ms, "slot": slot})
        jumps = [shift["at"] for shift in series["shifts"]]
        if jumps:
            marks = {
                "mode": "markers",
                "name": f"{name}: level changes",
                "x": [at + 1 for at in jumps],
                "y": ms[jumps],
                "slot": slot + 3,
            }
            traces.append({"type": "scatter", **marks, "slot": slot + 3})
        remarks += [
            f"{name}: the level changes at step {s['at'] + 1} by {s['after'] - s['before']:+.3f} ms." for s in series["shifts"]
        ]
        if series["period"]:
            period = series["period"]
            remarks.append(
                f"{name}: every {period['steps']:.1f} steps one takes {period['height']:.3f} ms longer ({period['count']} times)."
            )
    if not traces:
        return None
    blocks = [chart("Decode steps", traces, "Median over runs of each step.", 320, xaxis=axis(OF_A_RUN), yaxis=axis("ms"))]
    return Section("steps", "Steps over time", [*blocks, *map(note, remarks)])


def metric_table(document: Document) -> Section:
    """Every metric with its verdict."""
    columns = (
        "text family, text metric, text names, text verdict, number base, number candidate, text unit, number change %, "
        "number candidate at the base's pace, number change at the base's pace %, number low %, number high %, "
        "number p adjusted, number threshold %, number share of step %, number base runs, number candidate runs, number more runs"
    )
    rows = []
    for m in document["metrics"]:
        figures = [m["base"], m["cand"], m["unit"], percent(m["change"]), m["at_pace"]]
        figures += [percent(m["ratio"]) if m["paced"] else None, percent(m["low"]), percent(m["high"]), m["p"]]
        share = None if m["share"] is None else 100 * m["share"]
        counts = [100 * (m["threshold"] or 0), share, m["n_base"], m["n_cand"], m["more_runs"]]
        rows.append([m["family"], name_of(m), m["label"], m["direction"], *figures, *counts])
    omitted = document["metrics_total"] - len(rows)
    blocks = [table(columns, rows)]
    if omitted > 0:
        blocks.append(note(f"{omitted:,} less significant metrics are omitted; --json and stored results include them."))
    return Section("metrics", "All metrics", blocks)


def structure_tables(document: Document) -> Section | None:
    """Features of one side only, and differences in the structure of a step."""
    if not document["structure"]:
        return None
    rows = [[c["phase"], c["aspect"], c["what"], "appeared" if c["appeared"] else "vanished"] for c in document["structure"]]
    return Section("structure", "Structure", [table("text phase, text aspect, text what, text change", rows)])


def routing_chart(document: Document) -> Section | None:
    """Changes of expert routing, by layer."""
    drift = document["drift"]
    if not drift:
        return None
    if not any(row["distance"] or row["usual"] for row in drift):
        text = f"Every expert was chosen equally often on both sides, in all {len(drift)} layers."
        return Section("routing", "Expert routing", [note(text)])
    layers = [row["layer"] for row in drift]
    moved = {"type": "bar", "name": "base to candidate", "x": layers, "y": [row["distance"] for row in drift], "slot": 1}
    usual = {"type": "bar", "name": "largest between base runs", "x": layers, "y": [row["usual"] for row in drift], "slot": 0}
    remark = "Jensen-Shannon distance of how often each expert was chosen: 0: identical, 1: disjoint."
    layout: dict[str, Any] = {"xaxis": axis("layer"), "yaxis": axis("distance", rangemode="tozero")}
    return Section(
        "routing", "Expert routing", [chart("Drift of routing", [moved, usual], remark, 280, barmode="group", **layout)]
    )


def environment_tables(document: Document) -> Section:
    """The environment of the runs, and its differences."""
    rows = [
        [row["what"], row["base"], row["cand"], "conditions differ" if row["unfair"] else ""] for row in document["environment"]
    ]
    blocks: list[Block] = []
    if any(row["unfair"] for row in document["environment"]):
        text = "The sides were measured under different conditions, which may explain differences of speed."
        blocks.append({"kind": "findings", "items": [{"level": "warn", "text": text}]})
    if rows:
        blocks.append(table("text what, text base, text candidate, text remark", rows, "What differs"))
    emulated = "HTP emulator" in str(document["conditions"].get("NPU", ""))
    if emulated:
        blocks.append(note("The NPU is Qualcomm's HTP emulator: results are exact, its times and cycles are those of the host."))
    blocks.append(pairs(list(document["conditions"].items())))
    return Section("environment", "Environment", blocks)


SECTIONS: tuple[Callable[[Document], Section | None], ...] = (
    verdict_blocks,
    waterfall_charts,
    forest_chart,
    change_graph_block,
    step_chart,
    run_chart,
    structure_tables,
    routing_chart,
    metric_table,
    environment_tables,
)


def write_regression(document: Document, path: Path) -> int:
    """Write the page; returns its size in bytes."""
    title = f"{len(document['runs']['base'])} + {len(document['runs']['cand'])} runs compared"
    content = {"title": title, "lead": document["sentence"]}
    return write_sections(path, title, content, [make(document) for make in SECTIONS])
