"""`pareto.html`, one self-contained file: time by memory of `moescope simulate --json`, or energy by speed of recordings."""

from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.questions.pareto import on_front
from views.report.sections import Block, Section, axis, bytes_text, cards, chart, label, note, pairs, table, write_sections

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


def energy_chart(document: Document) -> Block | None:
    """Energy of a decoded token by TPOT, with the front of both; None without watts."""
    runs = [run for run in document["runs"] if run.get("j_per_token") is not None and run["tpot_ms"]]
    if not runs:
        return None
    flags = on_front([(run["tpot_ms"], run["j_per_token"]) for run in runs])
    best = sorted((run for run, flag in zip(runs, flags, strict=True) if flag), key=lambda run: run["tpot_ms"])
    line = {"line": {"shape": "hv", "dash": "dot"}, "hoverinfo": "skip", "name": "Pareto front", "slot": 7, "mode": "lines"}
    dots = {"mode": "markers", "name": "settings", "slot": 0, "text": [point_label(run) for run in runs]}
    hover = {"hovertemplate": "%{x:.2f} ms, %{y:.4g} J/token<br>%{text}<extra></extra>"}
    traces = [
        {"type": "scatter", **look, "x": [run["tpot_ms"] for run in some], "y": [run["j_per_token"] for run in some]}
        for look, some in ((line, best), (dots | hover, runs))
    ]
    time, joules = (axis(name, rangemode="tozero") for name in ("TPOT, ms", "J/token"))
    return chart("TPOT against energy", traces, f"Modelled: {document['energy']}", 420, xaxis=time, yaxis=joules)


def all_charts(document: Document) -> Section | None:
    """Charts of TPOT and TTFT by memory, and of energy."""
    fronts = [front_chart(document, "tpot_ms", "Memory against TPOT"), front_chart(document, "ttft_ms", "Memory against TTFT")]
    fronts.append(energy_chart(document))
    blocks = [block for block in fronts if block]
    return Section("front", "Memory against time", blocks) if blocks else None


def settings_table(document: Document) -> Section:
    """Every simulated run."""
    columns = (
        "text Pareto, text cache, text prefetch, number chunk, number cache MiB, number TTFT ms, number TPOT ms, "
        "number TPOT p90 ms, number hits %, number stall ms, number loaded MiB, number J/token"
    )
    rows = []
    for run in document["runs"]:
        named = ["yes" if run["pareto"] else "", "everything" if run["cache_bytes"] is None else bytes_text(run["cache_bytes"])]
        hits = None if run["hit_rate"] is None else 100 * run["hit_rate"]
        figures = [run["peak_cache_bytes"] / MIB, run["ttft_ms"], run["tpot_ms"], run["tpot_p90_ms"], hits, run["stall_ms"]]
        rows.append([*named, prefetch_text(run), run["chunk"], *figures, run["loaded_bytes"] / MIB, run.get("j_per_token")])
    return Section("settings", "Every setting", [table(columns, rows)])


def write_pareto(document: Document, path: Path) -> int:
    """Write the page; returns its size in bytes."""
    title = f"{len(document['runs'])} simulated settings"
    return write_sections(path, title, {"title": title}, [make(document) for make in (best_choices, all_charts, settings_table)])


def setting_cards(points: pd.DataFrame) -> Block:
    """The fastest setting, the one with the least energy, and the one with the least among the nearly fastest."""
    near = points[points["tokens_per_s"] >= points["tokens_per_s"].max() / NEAR]
    chosen = {
        "fastest": points.loc[points["tokens_per_s"].idxmax()],
        "least energy": points.loc[points["j_per_token"].idxmin()],
        f"within {NEAR - 1:.0%} of the fastest": near.loc[near["j_per_token"].idxmin()],
    }
    texts = {name: f"{p['tokens_per_s']:,.1f} tok/s · {p['j_per_token']:.3g} J" for name, p in chosen.items()}
    return cards([(name, text, label(chosen[name]["setting"], 24)) for name, text in texts.items()])


def setting_chart(points: pd.DataFrame) -> Block:
    """Energy by speed, one point for each setting, and the Pareto front."""
    best = points[points["pareto"]].sort_values("tokens_per_s")
    shape = {"line": {"shape": "vh", "dash": "dot"}, "hoverinfo": "skip"}
    line = {"x": best["tokens_per_s"].tolist(), "y": best["j_per_token"].tolist(), **shape}
    dots = {"x": points["tokens_per_s"].tolist(), "y": points["j_per_token"].tolist()}
    hover = {"text": points["setting"].tolist(), "hovertemplate": "%{x:.4g} tok/s, %{y:.4g} J/token<br>%{text}<extra></extra>"}
    traces = [
        {"type": "scatter", "mode": "lines", "name": "Pareto front", "slot": 7, **line},
        {"type": "scatter", "mode": "markers", "name": "settings", "slot": 0, **dots, **hover},
    ]
    fast, joules = (axis(name, rangemode="tozero") for name in ("tokens/s in decode", "J/token in decode"))
    return chart("Energy against speed", traces, "Medians over the runs of each setting.", 420, xaxis=fast, yaxis=joules)


def setting_section(name: str, points: pd.DataFrame) -> Section:
    """The settings measured on one device by one power rail."""
    columns = (
        "text Pareto, text setting, number tokens/s, number mJ/token, number mean mJ/token, number sd mJ/token, number runs, "
        "number tokens/J"
    )
    millijoules = points[["j_per_token", "j_mean", "j_sd"]] * 1e3
    rows = [
        ["yes" if p["pareto"] else "", p["setting"], p["tokens_per_s"], *mj, p["runs"], 1 / p["j_per_token"]]
        for p, mj in zip(points.to_dict("records"), millijoules.to_numpy().tolist(), strict=True)
    ]
    device, rail = points[["device", "rail"]].iloc[0]
    blocks = [setting_cards(points), setting_chart(points), table(columns, rows)]
    return Section(name, f"{rail} of {device}" if device else rail, blocks)


def write_settings(points: pd.DataFrame, path: Path) -> int:
    """Write the page of measured settings (analyzer/compare/settings.py); returns its size in bytes."""
    parts = [part for _, part in points.groupby(["device", "rail"], sort=False)]
    title = f"{points['setting'].nunique()} settings: energy against speed"
    return write_sections(path, title, {"title": title}, [setting_section(f"rail-{n}", part) for n, part in enumerate(parts)])
