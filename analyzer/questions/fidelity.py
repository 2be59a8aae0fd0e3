"""Accuracy of measured times: lm-Meter's two figures, and reference times to compare with.

accuracy alpha = 100 (1 - |measured - truth| / truth) in %, scaled error ε* = |measured - truth| / truth in µs per ms. A
kernel's truth comes from duplication: with n extra runs right after it, its time is the phase's increase divided by n.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.errors import AnalysisError
from analyzer.records.schema import Tables

COLUMNS = ["name", "measured_ms", "truth_ms", "accuracy_percent", "scaled_error"]


def accuracy_percent(measured: float, truth: float) -> float:
    """alpha in %: 100 (1 - |measured - truth| / truth)."""
    return 100.0 * (1.0 - abs(measured - truth) / truth)


def scaled_error(measured: float, truth: float) -> float:
    """ε*: µs of error per ms of true time."""
    return 1000.0 * abs(measured - truth) / truth


def kernel_by_repetition(base: float, duplicated: float, extra: int) -> float:
    """A kernel's true time within a phase: (phase with `extra` more runs of it - phase) / `extra`."""
    return (duplicated - base) / extra


def compare_times(measured: dict[str, float], truth: dict[str, float]) -> pd.DataFrame:
    """One row for each name that both have: both times, accuracy_percent and scaled_error."""
    rows = [
        (name, measured[name], true, accuracy_percent(measured[name], true), scaled_error(measured[name], true))
        for name, true in truth.items()
        if name in measured and true > 0
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def measured_phases(tables: Tables) -> dict[str, float]:
    """Mean ms of a step, by phase."""
    tokens = tables["tokens"][tables["tokens"]["complete"]]
    return {str(phase): float(ns) / 1e6 for phase, ns in tokens.groupby("phase")["duration_ns"].mean().items()}


def measured_kernels(tables: Tables) -> dict[str, float]:
    """Mean total ms per decode step of each kind of subgraph and type of operator; subgraphs take precedence for equal names."""
    tokens = tables["tokens"].query("complete and phase == 'decode'")
    answer: dict[str, float] = {}
    for table, column in (("operators", "type"), ("graphs", "kind")):
        rows = tables[table][tables[table]["token_id"].isin(tokens["token_id"])]
        for name, ns in rows.groupby(column)["duration_ns"].sum().items():
            answer[str(name)] = float(ns) / max(len(tokens), 1) / 1e6
    return answer


def log_truth(path: Path) -> dict[str, float]:
    """Mean ms of a step by phase, from the runtime's own log (its own timers, between the probes)."""
    try:
        steps = pd.DataFrame(json.loads(path.read_text())["steps"])
        return {str(phase): float(ns) / 1e6 for phase, ns in steps.groupby("phase")["duration_ns"].mean().items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AnalysisError(
            f"{path} is not a log of the runtime ({error!r}); write one with: moescope generate --log FILE"
        ) from None


def read_truth(path: Path) -> dict[str, dict[str, float]]:
    """{"phases": {name: ms per step}, "kernels": {...}} from a file, as benchmarks/fidelity.py writes it."""
    try:
        truth = json.loads(path.read_text())
        return {part: {str(k): float(v) for k, v in (truth.get(part) or {}).items()} for part in ("phases", "kernels")}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise AnalysisError(
            f'{path} holds no reference times ({error}); it should be {{"phases": {{name: ms}}, "kernels": {{…}}}}'
        ) from None


def fidelity_report(tables: Tables, truth: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Tables `phases` and `kernels` with mean and median accuracy of each; absent if `truth` lacks them."""
    measured = {"phases": measured_phases(tables), "kernels": measured_kernels(tables)}
    answer: dict[str, Any] = {}
    for part, truths in truth.items():
        rows = compare_times(measured[part], truths)
        if len(rows):
            middle = {"mean": float(rows["accuracy_percent"].mean()), "median": float(rows["accuracy_percent"].median())}
            answer[part] = {"rows": rows, "accuracy_percent": middle}
    return answer
