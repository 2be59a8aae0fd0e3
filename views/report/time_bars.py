"""The report's first picture: a mean step of each phase as a bar, by cause with parts inside."""

from typing import Any

import pandas as pd

from views.colours import CAUSES
from views.report.sections import Block, Run

QUERY = "select phase, steps, cause, part, ms from mean_steps"
FIRST = ("prefill", "decode")


def causes_of(rows: pd.DataFrame) -> list[list[Any]]:
    """[cause, [[part, ms], …]] in the order of the colours, parts largest first."""
    drawn = rows[rows["ms"] > 0].sort_values(["ms", "part"], ascending=[False, True])
    parts = {cause: part[["part", "ms"]].to_numpy(object).tolist() for cause, part in drawn.groupby("cause")}
    return [[cause, parts[cause]] for cause in CAUSES if cause in parts]


def step_bars(run: Run) -> list[Block]:
    """The block `time` of a recording with complete steps; its phases in the order of a request, others last."""
    found = run.ask(QUERY)
    bars = []
    for phase in sorted(set(found["phase"]), key=lambda phase: (phase not in FIRST, phase == "decode", phase)):
        rows = found[found["phase"] == phase]
        named = {"title": f"{(phase or 'unknown').capitalize()} step", "steps": int(rows["steps"].iloc[0])}
        bars.append({**named, "ms": float(rows["ms"].sum()), "causes": causes_of(rows)})
    return [{"kind": "time", "title": "Where a step's time goes", "query": QUERY, "bars": bars}] if bars else []
