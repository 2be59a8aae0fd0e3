"""The longest span of a finding, for its position in the timeline."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pandas as pd

from analyzer.questions import accelerators, step_time
from analyzer.questions.causes import CAUSES
from analyzer.questions.facts import rows_equal
from analyzer.records.schema import Tables

LONG = "duration_ns"


class RuleSpans:
    """The spans that each rule of questions/findings.py is based on, with the column that ranks them."""

    def __init__(self, tables: Tables):
        self.tables = tables

    @cached_property
    def time(self) -> pd.DataFrame:
        """The time of steps."""
        return step_time.step_time(self.tables)

    def of_causes(self, *causes: str) -> pd.DataFrame:
        """Times of steps with one of these causes."""
        return self.time[self.time["cause"].isin(causes)]

    def of(self, rule: str, evidence: dict[str, Any]) -> tuple[pd.DataFrame, str]:
        """(spans, column that ranks them); no spans if the rule has none."""
        kind, _, subject = rule.partition(": ")
        if rule in CAUSES:
            return self.of_causes(rule), LONG
        make = MAKERS.get(kind)
        return make(self, subject, evidence) if make else (self.tables["tokens"].iloc[:0], LONG)


def rows_with(frame: pd.DataFrame, column: str = "token_id") -> pd.DataFrame:
    """The rows with an id >= 0 in this column: those that belong to a row of another table."""
    return frame[frame[column] >= 0]


Maker = Callable[[RuleSpans, str, dict[str, Any]], tuple[pd.DataFrame, str]]
MAKERS: dict[str, Maker] = {
    "expert loads": lambda s, _, e: (rows_with(rows_equal(s.tables["loads"], action="load", reason="demand")), LONG),
    "disk": lambda s, _, e: (rows_with(rows_equal(s.tables["faults"], kind="major"), "op_id"), LONG),
    "waits": lambda s, cause, e: (s.of_causes(cause), LONG),
    "imbalance": lambda s, _, e: (rows_with(s.tables["operators"]), "wait_ns"),
    "roofline": lambda s, kind, e: (rows_equal(s.tables["operators"], type=kind, complete=True), LONG),
    "backend": lambda s, kind, e: (rows_equal(s.tables["graphs"], kind=kind, backend=e["backend"], complete=True), LONG),
    "first step": lambda s, _, e: (rows_equal(s.tables["tokens"], token_id=e["token_id"]), LONG),
    "change point": lambda s, _, e: (rows_equal(s.tables["tokens"], token_id=e["token_id"]), LONG),
    "periodic": lambda s, _, e: (rows_equal(s.tables["tokens"], phase="decode", complete=True), LONG),
    "fallback": lambda s, _, e: (s.tables["operators"][accelerators.fallen_back(s.tables)], LONG),
    "submissions": lambda s, _, e: (s.of_causes(*accelerators.SUBMISSION_COSTS), LONG),
    "starved": lambda s, _, e: (rows_equal(s.of_causes("computing"), part="host code"), LONG),
    "spinning": lambda s, _, e: (s.of_causes("accelerator"), LONG),
    "growth": lambda s, _, e: (rows_equal(s.tables["operators"], type=e["type"], complete=True), LONG),
}


def longest_span(spans: RuleSpans, rule: str, evidence: dict[str, Any]) -> pd.DataFrame:
    """The longest span of a finding: one row with begin_ns and duration_ns, or no row."""
    rows, rank = spans.of(rule, evidence)
    rows = rows.sort_values(rank, ascending=False).head(1)
    if LONG not in rows:
        rows = rows.assign(duration_ns=rows["end_ns"] - rows["begin_ns"])
    return rows[["begin_ns", LONG]]
