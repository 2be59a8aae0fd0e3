"""The report's section on stacks: where threads compute or wait in the largest cause of time, as a small flame graph."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.stacks import function_shares, joined, rooted_stacks, short_function
from analyzer.questions.step_time import step_time
from views.report.sections import Block, Run, Section, table

ROWS, LEAST, PASSES = 12, 0.004, 0.99
"""Rows of the flame graph, the smallest share drawn, and the share at which a frame only passes on what its callee does."""
FUNCTIONS = 12
Tree = dict[str, Any]


def tree_of(stacks: list[list[str]], weights: np.ndarray) -> Tree:
    """Call paths with the weight of each stack: {weight, calls: {name: tree}}."""
    root: Tree = {"weight": float(weights.sum()), "calls": {}}
    for stack in np.flatnonzero(weights).tolist():
        at = root
        for name in stacks[stack]:
            at = at["calls"].setdefault(name, {"weight": 0.0, "calls": {}})
            at["weight"] += float(weights[stack])
    return root


def past_common_callers(tree: Tree) -> Tree:
    """The first frame that calls several others, where the picture begins."""
    while len(tree["calls"]) and (most := max(tree["calls"].values(), key=lambda call: call["weight"]))["calls"]:
        if most["weight"] < PASSES * tree["weight"]:
            break
        tree = most
    return tree


def drawn_frames(tree: Tree, whole: float, at: float = 0.0, level: int = 0) -> Iterator[list[Any]]:
    """[level, begin %, width %, short name, name with ms and share] of the frames below `tree`, the largest first."""
    for name, call in sorted(tree["calls"].items(), key=lambda item: -item[1]["weight"]):
        share = call["weight"] / whole
        if share >= LEAST and level < ROWS:
            about = f"{name}: {call['weight']:,.1f} ms, {share:.1%}"
            yield [level, round(100 * at, 3), round(100 * share, 3), short_function(name), about]
            yield from drawn_frames(call, whole, at, level + 1)
        at += share


def largest_cause(run: Run) -> tuple[str, str, pd.DataFrame]:
    """(cause, `samples` or `waits`, its rows there with ms) of the cause that takes most of the time of steps and has stacks."""
    hz = int((run.manifest.get("stacks") or {}).get("hz") or 0)
    samples, waits = joined(run.tables, "samples"), joined(run.tables, "waits")
    kinds = {"samples": samples.assign(ms=1e3 / max(hz, 1)), "waits": waits.assign(ms=waits["duration_ns"] / 1e6)}
    spent = step_time(run.tables).groupby("cause")["duration_ns"].sum().sort_values(ascending=False)
    for cause in spent.index:
        found = {name: rows[rows["decides"] & (rows["cause"] == cause)] for name, rows in kinds.items()}
        kind = max(found, key=lambda name: float(found[name]["ms"].sum()))
        if len(found[kind]):
            return str(cause), kind, found[kind]
    return "", "samples", kinds["samples"]


def flame_block(run: Run) -> Block:
    """The block `flame`."""
    cause, kind, rows = largest_cause(run)
    numbers, stacks = rooted_stacks(run.tables, rows)
    tree = past_common_callers(tree_of(stacks, np.bincount(numbers, rows["ms"], len(stacks))))
    frames = list(drawn_frames(tree, max(tree["weight"], 1e-9)))
    what = f"{cause}, the largest cause of steps' time" if cause else "all threads, as no step was recorded"
    remark = f"{rows['ms'].sum():,.1f} ms in {len(rows):,} {kind} of the threads that decide. " if cause else ""
    title = f"Where threads {'compute' if kind == 'samples' else 'wait'}: {what}"
    return {"kind": "flame", "title": title, "note": f"{remark}Callers that all have in common are left out.", "frames": frames}


def stack_section(run: Run) -> Section | None:
    """The section on stacks."""
    if not len(run.tables["samples"]) and not len(run.tables["waits"]):
        return None
    samples = joined(run.tables, "samples")
    functions = function_shares(run.tables, samples, np.full(len(samples), 100 / max(len(samples), 1))).head(FUNCTIONS)
    functions["function"] = functions["function"].map(short_function)
    columns = "text function, bar itself %, number with callees %"
    blocks = [flame_block(run), table(columns, functions, "Functions by samples, of all threads", command="time stacks RUN")]
    return Section("stacks", "Stacks", blocks)
