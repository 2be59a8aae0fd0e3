"""What was recorded of stacks, how much of it is whole, and why the rest is not."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.stacks import WHOLE, base_name, stack_lists
from analyzer.records.schema import Tables

INTERPRETER, FIRST_WITH_MAPS = r"python(\d+\.\d+)[^/]*$", (3, 12)
"""CPython's version, in the name of its program or library, and the first one that can write what its functions are."""
INTERPRETS, PYTHON_CODE = "_PyEval_EvalFrameDefault", r"\.py$|^<"
"""CPython's function that runs Python code without a frame of its own on the stack, and the files of such code that has one."""
STOPS, REMARKED = 8, 3
"""The most places where stacks stop that are listed, and that a remark has."""
REASONS = {
    "cut": "the copied part of the stack ends there",
    "unknown": "no call frame information leads on from there",
    "too deep": "512 frames are read at most",
}
"""How a stack ended that is not whole → why."""
NEARLY_ALL = 0.99


def counts_of(values: Iterable[Any]) -> dict[str, int]:
    """Value → how often it occurs, the most frequent first."""
    return {str(name): int(count) for name, count in pd.Series(list(values), dtype=object).value_counts().items()}


def stopping_places(tables: Tables, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Where the stacks of `samples` stop that are not whole: end, file and function of the last frame, share of all rows."""
    outermost = np.array([stack[0] for stack in stack_lists(tables)], np.int64)
    broken = rows[rows["end"] != WHOLE]
    last = tables["frames"][["file", "function"]].iloc[outermost[broken["stack_id"]]]
    shares = last.assign(end=broken["end"].to_numpy()).value_counts() / max(len(rows), 1)
    return shares.rename("share").reset_index().head(STOPS).to_dict("records")


def python_without_frames(tables: Tables, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """By version of CPython, the share of `samples` in Python functions that have no frame, unless most have one."""
    files, stacks = tables["frames"]["file"], stack_lists(tables)
    interprets = tables["frames"]["function"].str.startswith(INTERPRETS).to_numpy(bool)
    has_own = files.str.contains(PYTHON_CODE).to_numpy(bool)
    version = files.str.extract(INTERPRETER, expand=False).fillna("").to_numpy()
    versions = np.array([next(iter(version[stack[interprets[stack]]]), None) for stack in stacks], object)
    named = np.array([has_own[stack].any() for stack in stacks], bool)
    within = pd.DataFrame({"version": versions[rows["stack_id"]], "named": named[rows["stack_id"]]}).dropna()
    found = within.groupby("version")["named"].agg(["mean", "size"]).query("mean < 0.5")
    shares = found["size"] * (1 - found["mean"]) / max(len(rows), 1)
    return [{"version": str(version), "share": float(share)} for version, share in shares.items()]


def stack_remarks(summary: dict[str, Any]) -> list[str]:
    """Why stacks of a `stack_summary` are not whole, and functions of Python lack frames; with what helps."""
    remarks = [python_remark(**row) for row in summary["python"]]
    if summary["stops"] and summary["whole"] < NEARLY_ALL:
        places = "; ".join(stop_text(**row) for row in summary["stops"][:REMARKED])
        remarks.append(f"{1 - summary['whole']:.1%} of the samples have no whole stack: {places}")
    return remarks


def stop_text(end: str, file: str, function: str, share: float) -> str:
    """One of `stopping_places`, and why stacks stop there."""
    place = f"{function or 'an unnamed function'} of {base_name(file) or 'memory without a file'}"
    return f"{share:.1%} stop in {place}, as {REASONS[end]}"


def python_remark(version: str, share: float) -> str:
    """That functions of a CPython have no frames, and what gives them some."""
    with_maps = version and tuple(map(int, version.split("."))) >= FIRST_WITH_MAPS
    helps = "start it with -X perf or PYTHONPERFSUPPORT=1" if with_maps else "use CPython 3.12 or newer, with -X perf"
    return f"{share:.1%} of the samples are in functions of {f'CPython {version}'.strip()}, which have no frames: {helps}"


def stack_summary(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """What was recorded of stacks, and how much of it is whole."""
    recorded, samples, waits = manifest.get("stacks") or {}, tables["samples"], tables["waits"]
    return {
        "hz": recorded.get("hz", 0),
        "long_wait_us": recorded.get("long_wait_us", 0),
        "lost": recorded.get("lost", 0),
        "samples": len(samples),
        "waits": len(waits),
        "waits_ms": float(waits["duration_ns"].sum() * 1e-6),
        "whole": float((samples["end"] == WHOLE).mean()) if len(samples) else None,
        "ends": counts_of(samples["end"]),
        "stops": stopping_places(tables, samples),
        "python": python_without_frames(tables, samples),
    }
