"""`pareto.html`: time by memory, one self-contained file. The document: `moescope simulate --json`."""

from pathlib import Path
from typing import Any

from views.report.sections import Block, Section, axis, bytes_text, cards, chart, note, pairs, table, write_sections

Document = dict[str, Any]
MIB = 1 << 20
NEAR = 1.05
"""Times the fastest time: settings within this factor count as nearly as fast."""


def prefetch_text(run: dict[str, Any]) -> str:
    """A run's way of prefetching, as text."""
    kind = run["prefetch"]
    return "no prefetch" if kind is None else f"prefetch {kind}" if isinstance(kind, str) else f"prefetch from {kind:g}"


def point_label(run: dict[str, Any]) -> str:
    """A run's settings and figures, as the label of a point in a chart."""
    hits = "" if run["hit_rate"] is None else f", hits {run['hit_rate']:.1%}"
    size = "everything" if run["cache_bytes"] is None else bytes_text(run["cache_bytes"])
    return f"cache {size}, chunk {run['chunk']}, {prefetch_text(run)}{hits}, stall {run['stall_ms']:.1f} ms"


def best_choices(document: Document) -> Section:
    """The fastest settings, those with the least memory, and those with the least memory among the nearly fastest."""
    runs = [run for run in document["runs"] if run["tpot_ms"]]
    blocks: list[Block] = []
    if runs:
        fastest = min(runs, key=lambda run: run["tpot_ms"])
        leanest = min(runs, key=lambda run: (run["peak_cache_bytes"], run["tpot_ms"]))
        near = [run for run in runs if run["tpot_ms"] <= NEAR * fastest["tpot_ms"]]
        frugal = min(near, key=lambda run: run["peak_cache_bytes"])
        named = (("fastest", fastest), ("least memory", leanest), (f"within {NEAR - 1:.0%} of the fastest", frugal))
        figures = [
            (name, f"{run['tpot_ms']:.2f} ms · {bytes_text(run['peak_cache_bytes'])}", point_label(run)) for name, run in named
        ]
        blocks.append(cards(figures))
    blocks.append(note("Simulated, not measured. Memory is the largest size of the expert cache; TPOT the mean decode step."))
    blocks += [note(f"Warning: {text}") for text in document["warnings"]]
    blocks.append(pairs([("costs", document["costs"]), ("steps replayed", document["steps"])]))
    return Section("choice", "Memory and speed", blocks)


def front_chart(document: Document, figure: str, title: str) -> Block | None:
    """Memory and a time, one colour for each way of prefetching; for TPOT also the Pareto front."""
    runs = [run for run in document["runs"] if run[figure]]
    if not runs:
        return None
    traces: list[dict[str, Any]] = []
    if figure == "tpot_ms":
        best = sorted((run for run in runs if run["pareto"]), key=lambda run: run["peak_cache_bytes"])
        line = {"x": [run["peak_cache_bytes"] / MIB for run in best], "y": [run[figure] for run in best]}
        shape = {"line": {"shape": "hv", "dash": "dot"}, "hoverinfo": "skip"}
        traces.append({"type": "scatter", "mode": "lines", "name": "Pareto front", "slot": 7, **line, **shape})
    for slot, kind in enumerate(dict.fromkeys(map(prefetch_text, runs))):
        alike = [run for run in runs if prefetch_text(run) == kind]
        points = {"x": [run["peak_cache_bytes"] / MIB for run in alike], "y": [run[figure] for run in alike]}
        hover = {
            "text": [point_label(run) for run in alike],
            "hovertemplate": "%{x:.2f} MiB, %{y:.2f} ms<br>%{text}<extra></extra>",
        }
        traces.append({"type": "scatter", "mode": "markers", "name": kind, "slot": slot, **points, **hover})
    memory, time = (axis(name, rangemode="tozero") for name in ("MiB used by the expert cache", "ms"))
    return chart(title, traces, "", 420, xaxis=memory, yaxis=time)


def all_charts(document: Document) -> Section | None:
    """Charts of TPOT and TTFT by memory."""
    fronts = [front_chart(document, "tpot_ms", "Memory against TPOT"), front_chart(document, "ttft_ms", "Memory against TTFT")]
    blocks = [block for block in fronts if block]
    return Section("front", "Memory against time", blocks) if blocks else None


def settings_table(document: Document) -> Section:
    """Every simulated run."""
    columns = (
        "text Pareto, text cache, text prefetch, number chunk, number cache MiB, number TTFT ms, number TPOT ms, "
        "number TPOT p90 ms, number hits %, number stall ms, number loaded MiB"
    )
    rows = []
    for run in document["runs"]:
        named = ["yes" if run["pareto"] else "", "everything" if run["cache_bytes"] is None else bytes_text(run["cache_bytes"])]
        hits = None if run["hit_rate"] is None else 100 * run["hit_rate"]
        figures = [run["peak_cache_bytes"] / MIB, run["ttft_ms"], run["tpot_ms"], run["tpot_p90_ms"], hits, run["stall_ms"]]
        rows.append([*named, prefetch_text(run), run["chunk"], *figures, run["loaded_bytes"] / MIB])
    return Section("settings", "Every setting", [table(columns, rows)])


def write_pareto(document: Document, path: Path) -> int:
    """Write the page; returns its size in bytes."""
    title = f"{len(document['runs'])} simulated settings"
    return write_sections(path, title, {"title": title}, [make(document) for make in (best_choices, all_charts, settings_table)])
