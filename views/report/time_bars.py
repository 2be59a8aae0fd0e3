"""The report's first picture: a mean step of each phase as a bar, by cause with parts inside."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from views.colours import CAUSES
from views.report.sections import Block, Run

QUERY = "select phase, steps, cause, part, ms from mean_steps"
FIRST = ("prefill", "decode")


def in_order(phases: set[str]) -> list[str]:
    """Phases in the order of a request, unknown ones last."""
    return sorted(phases, key=lambda phase: (FIRST.index(phase) if phase in FIRST else len(FIRST), phase))


def causes_of(rows: pd.DataFrame) -> list[list[Any]]:
    """[cause, [[part, ms], …]] in the order of the colours, parts largest first."""
    known = [*CAUSES, *sorted(set(rows["cause"]) - set(CAUSES))]
    drawn = rows[rows["ms"] > 0].sort_values(["ms", "part"], ascending=[False, True])
    parts = {cause: part[["part", "ms"]].to_numpy(object).tolist() for cause, part in drawn.groupby("cause")}
    return [[cause, parts[cause]] for cause in known if cause in parts]


def time_bars(frame: pd.DataFrame, steps: Mapping[str, int], query: str = "") -> Block:
    """The block `time` from rows of phase, cause, part and ms (of a mean step); `steps` are the steps behind each mean."""
    bars = [
        {
            "title": f"{(phase or 'unknown').capitalize()} step",
            "steps": int(steps[phase]),
            "ms": float(rows["ms"].sum()),
            "causes": causes_of(rows),
        }
        for phase, rows in ((phase, frame[frame["phase"] == phase]) for phase in in_order(set(frame["phase"])))
    ]
    return {"kind": "time", "title": "Where a step's time goes", "query": query, "bars": bars}


def step_bars(run: Run) -> list[Block]:
    """The picture of a recording with complete steps."""
    rows = run.ask(QUERY)
    return [time_bars(rows, dict(zip(rows["phase"], rows["steps"], strict=True)), QUERY)] if len(rows) else []
