"""Two groups of runs → one document of changes, their places and certainty. JSON-able; the views read nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare import clocks, environment, graph, statistics
from analyzer.compare import structure as structures
from analyzer.compare.closure import Waterfall, waterfall
from analyzer.compare.metrics import DIMS
from analyzer.compare.results import Result, matrices
from analyzer.compare.verdict_text import conclude, direction, in_turns, verdict_sentence
from analyzer.compare.verdicts import FASTER, SLOWER, Rules, judge_apart
from analyzer.jsonable import plain
from analyzer.questions import changepoints

PHASES = ("prefill", "decode")
FIGURES = ("base", "cand", "change", "at_pace", "ratio", "low", "high", "p", "threshold", "share")
VERDICT_FIELDS = ("unit", "better", "label", "verdict", "more_runs", "more_runs_known", "n_base", "n_cand", "paced")
SHOWN_METRICS = 600
VALUES_SHOWN = 200


@dataclass
class Comparison:
    """`judged`: a row per metric (see verdicts.judge); other fields as in their modules. `words`: the causes in sentences."""

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


def compare(
    base: list[Result], cand: list[Result], rules: Rules | None = None, step: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Compare two groups of runs; if their clocks differ, only the runs at clocks that both sides have, if there are enough.

    Whether they alternated is determined here, regardless of the rules.
    """
    base, cand, other_clocks, about_clocks = clocks.at_equal_clocks(base, cand)
    times = [np.array([run.began for run in side]) for side in (base, cand)]
    rules = replace(rules or Rules(), wander=statistics.wander(*times))
    dims, a, b, mean_a, mean_b = matrices(base, cand)
    step(f"{len(dims):,} metrics of {len(base)} + {len(cand)} runs")
    falls = [fall for phase in PHASES if (fall := waterfall(dims, mean_a, mean_b, phase)) is not None]
    judged, a, b = judge_apart(dims, a, b, rules)
    structure, drift = structures.changes(base, cand), structures.drift(base, cand)
    unlike = other_clocks + environment.differences([r.environment for r in base], [r.environment for r in cand])
    words = conclude(judged, falls, structure, drift, unlike, rules.practical) + about_clocks + in_turns(*times)
    return Comparison(base, cand, rules, judged, falls, structure, drift, unlike, (a, b), words)


def ranked(judged: pd.DataFrame) -> pd.DataFrame:
    """Metrics in report order: speed first, then changes by share of a step, then the rest."""
    changed = judged["verdict"].isin([SLOWER, FASTER])
    weight = (judged["estimate"].abs() * judged["share"].fillna(1.0)).replace(np.inf, 1e9).fillna(0.0)
    order = np.lexsort((-weight, ~changed, judged["family"] != "speed"))
    return judged.iloc[order]


def document(result: Comparison) -> dict[str, Any]:
    """The comparison, JSON-able (NaN as null); the views read nothing else."""
    rows = ranked(result.judged).head(SHOWN_METRICS)
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
        "sentence": verdict_sentence(ranked(result.judged)),
        "words": [{"level": level, "text": text} for level, text in result.words],
        "rules": result.rules,
        "runs": {side: [run.name for run in runs] for side, runs in sides(result)},
        "metrics": metrics,
        "metrics_total": len(result.judged),
        "verdicts": {str(name): int(n) for name, n in result.judged["verdict"].value_counts().items()},
        "waterfalls": [
            {
                "phase": fall.phase,
                "step": fall.step,
                "parts": [{**vars(part), "delta": part.delta} for part in fall.parts],
            }
            for fall in result.waterfalls
        ],
        "series": {side: series(runs) for side, runs in sides(result)},
        "graph": graph.merged(first_graph(result.base), first_graph(result.cand), result.judged),
        "structure": result.structure,
        "drift": result.drift,
        "environment": result.differences,
        "conditions": result.cand[0].environment,
    }
    return dict(plain(answer))


def sides(result: Comparison) -> tuple[tuple[str, list[Result]], tuple[str, list[Result]]]:
    """The two groups by name."""
    return ("base", result.base), ("cand", result.cand)


def first_graph(runs: list[Result]) -> graph.Skeleton:
    """The operators of a decode step of the first run with any."""
    return next((run.graph for run in runs if run.graph.nodes), graph.Skeleton())


def series(runs: list[Result]) -> dict[str, Any]:
    """ms of each decode step, the median over runs, with its change points and periodic disturbance."""
    step_times = [np.asarray(run.series, np.float64) for run in runs if len(run.series)]
    if not step_times:
        return {"ms": [], "shifts": [], "period": None}
    length = int(np.median([len(times) for times in step_times]))
    padded = np.full((len(step_times), length), np.nan)
    for row, times in zip(padded, step_times, strict=True):
        row[: min(length, len(times))] = times[:length]
    ms = np.nanmedian(padded, axis=0)
    return {"ms": np.round(ms, 4), "shifts": changepoints.shifts(ms), "period": changepoints.period(ms)}
