"""Two groups of runs → one document of changes, their places and certainty. JSON-able; the views read nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare import clocks, environment, equal_heat, graph, statistics
from analyzer.compare import structure as structures
from analyzer.compare.functions import FRAME, changed_frames
from analyzer.compare.metrics import DIMS
from analyzer.compare.results import Result, value_matrices
from analyzer.compare.verdict_text import ENERGY, HEADLINES, causal_rank, conclusions, direction, in_turns, verdict_sentence
from analyzer.compare.verdicts import FASTER, SLOWER, Rules, judge_apart
from analyzer.compare.waterfall import Waterfall, phase_waterfall
from analyzer.questions import changepoints
from moescope.answers import json_value

PHASES = ("prefill", "decode")
FIGURES = ("base", "cand", "change", "at_pace", "ratio", "low", "high", "least", "most", "p", "threshold", "share")
VERDICT_FIELDS = ("unit", "better", "label", "verdict", "more_runs", "more_runs_known", "n_base", "n_cand", "paced")
SHOWN_METRICS = 600
VALUES_SHOWN = 200


@dataclass(frozen=True)
class LeftOut:
    """A run that was given but not compared, and why."""

    side: str
    run: str
    why: str


@dataclass
class Comparison:
    """`judged`: a row per metric (see verdicts.judge_metrics); other fields as in their modules. `words`: its causes."""

    base: list[Result]
    cand: list[Result]
    rules: Rules
    judged: pd.DataFrame
    waterfalls: list[Waterfall]
    structure: list[structures.Change]
    drift: list[structures.Drift]
    differences: list[environment.Difference]
    values: tuple[np.ndarray, np.ndarray]
    words: list[tuple[str, str]]
    left_out: list[LeftOut]


def compare_runs(
    base: list[Result], cand: list[Result], rules: Rules | None = None, step: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Compare two groups of runs; if their clocks differ, only the runs at clocks that both sides have, if there are enough;
    otherwise what the clocks explain gets the verdict "other clocks".

    Whether they alternated is determined here, regardless of the rules.
    """
    given = {"base": base, "cand": cand}
    base, cand = ([run for run in side if len(run.metrics)] for side in (base, cand))
    left_out = runs_left_out(given, base, cand, "it has no metric: no step of a known engine was recorded")
    recorded = {"base": base, "cand": cand}
    base, cand, other_clocks, about_clocks = clocks.at_equal_clocks(base, cand)
    left_out += runs_left_out(recorded, base, cand, "no run of the other side has equal clocks")
    times = [np.array([run.began for run in side]) for side in (base, cand)]
    rules = replace(rules or Rules(), drift=statistics.drift_factor(*times))
    dims, a, b, mean_a, mean_b = value_matrices(base, cand)
    step(f"{len(dims):,} metrics of {len(base)} + {len(cand)} runs")
    falls = [fall for phase in PHASES if (fall := phase_waterfall(dims, mean_a, mean_b, phase)) is not None]
    judged, a, b = judge_apart(dims, a, b, rules)
    judged, of_clocks = equal_heat.judge_at_clocks(judged, a, b)
    about_clocks += [("warn", text) for text in of_clocks]
    structure, drift = structures.feature_changes(base, cand), structures.routing_drifts(base, cand)
    unlike = other_clocks + environment.environment_differences([r.environment for r in base], [r.environment for r in cand])
    words = (
        conclusions(in_report_order(judged), falls, structure, drift, unlike, rules.practical) + about_clocks + in_turns(*times)
    )
    return Comparison(base, cand, rules, judged, falls, structure, drift, unlike, (a, b), words, left_out)


def runs_left_out(given: dict[str, list[Result]], base: list[Result], cand: list[Result], why: str) -> list[LeftOut]:
    """The given runs that are in neither side."""
    kept = {id(run) for run in (*base, *cand)}
    return [LeftOut(side, run.name, why) for side, runs in given.items() for run in runs if id(run) not in kept]


def in_report_order(judged: pd.DataFrame) -> pd.DataFrame:
    """Metrics in report order: speed and energy in the order of HEADLINES, then changes, causes before effects, then the rest."""
    changed = judged["verdict"].isin([SLOWER, FASTER])
    weight = (judged["estimate"].abs() * judged["share"].fillna(1.0)).replace(np.inf, 1e9).fillna(0.0)
    rank = judged["metric"].map({name: i for i, name in enumerate(HEADLINES)}).fillna(len(HEADLINES))
    later = (judged["family"] != "speed") & (judged["metric"] != ENERGY)
    order = np.lexsort((-weight, causal_rank(judged), ~changed, rank, later))
    return judged.iloc[order]


def as_document(result: Comparison) -> dict[str, Any]:
    """The comparison, JSON-able (NaN as null); the views read nothing else."""
    listed = result.judged[result.judged["family"] != FRAME]
    rows = in_report_order(listed).head(SHOWN_METRICS)
    where = result.judged.index.get_indexer(rows.index)
    metrics = [
        {
            **{name: row[name] for name in (*DIMS, *VERDICT_FIELDS, *FIGURES)},
            "direction": direction(row),
            "runs": [side[:VALUES_SHOWN, i] for side in result.values],
        }
        for row, i in zip(rows.to_dict("records"), where.tolist(), strict=True)
    ]
    answer = {
        "sentence": verdict_sentence(in_report_order(result.judged)),
        "words": [{"level": level, "text": text} for level, text in result.words],
        "rules": result.rules,
        "left_out": result.left_out,
        "runs": {side: [run.name for run in runs] for side, runs in named_sides(result)},
        "metrics": metrics,
        "metrics_total": len(listed),
        "verdicts": {str(name): int(n) for name, n in listed["verdict"].value_counts().items()},
        "frames": changed_frames(result.judged),
        "waterfalls": [
            {
                "phase": fall.phase,
                "step": fall.step,
                "parts": [{**vars(part), "delta": part.delta} for part in fall.parts],
            }
            for fall in result.waterfalls
        ],
        "series": {side: step_series(runs) for side, runs in named_sides(result)},
        "graph": graph.merge_skeletons(first_graph(result.base), first_graph(result.cand), result.judged),
        "structure": result.structure,
        "drift": result.drift,
        "environment": result.differences,
        "conditions": result.cand[0].environment,
    }
    return dict(json_value(answer))


def named_sides(result: Comparison) -> tuple[tuple[str, list[Result]], tuple[str, list[Result]]]:
    """The two groups by name."""
    return ("base", result.base), ("cand", result.cand)


def first_graph(runs: list[Result]) -> graph.Skeleton:
    """The operators of a decode step of the first run with any."""
    return next((run.graph for run in runs if run.graph.nodes), graph.Skeleton())


def step_series(runs: list[Result]) -> dict[str, Any]:
    """ms of each decode step, the median over runs, with its change points and periodic disturbance."""
    step_times = [np.asarray(run.series, np.float64) for run in runs if len(run.series)]
    if not step_times:
        return {"ms": [], "shifts": [], "period": None}
    length = int(np.median([len(times) for times in step_times]))
    padded = np.full((len(step_times), length), np.nan)
    for row, times in zip(padded, step_times, strict=True):
        row[: min(length, len(times))] = times[:length]
    ms = np.nanmedian(padded, axis=0)
    return {"ms": np.round(ms, 4), "shifts": changepoints.level_shifts(ms), "period": changepoints.periodic_spikes(ms)}
