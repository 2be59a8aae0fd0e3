"""What findings are made from, and what a finding is."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analyzer.questions import accelerators, displacement, roofline, step_time
from analyzer.questions.ceilings import Ceilings
from analyzer.records.schema import Tables
from moescope.packaged import toml_beside

QUERIES: dict[str, str] = toml_beside(__file__, "findings.toml")["queries"]
KNOBS: dict[str, str] = toml_beside(__file__, "findings.toml")["knobs"]
WORTH_TURNING = 0.005
"""A knob that would save less of the time is not named."""


@dataclass(frozen=True)
class Finding:
    """One thing that costs time: `ms`, `share` of all steps' time, is that of a cause, else what the remedy would save."""

    rule: str
    """A cause, or a more specific reason."""
    text: str
    ms: float
    share: float
    saving_ms: float
    saving_share: float
    evidence: dict[str, Any]
    query: str


def rows_equal(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows whose columns have these values."""
    for column, value in values.items():
        frame = frame[frame[column] == value]
    return frame


class RuleInputs:
    """The inputs of the rules: tables, `steps` and `time` as step_time.counted_time gives them, with phases."""

    def __init__(self, tables: Tables, time: pd.DataFrame, ceilings: Ceilings | None):
        self.tables, self.ceilings = tables, ceilings
        self.steps, time = step_time.counted_time(tables, time)
        self.time = time.assign(phase=self.steps["phase"].reindex(time["token_id"]).to_numpy())
        self.total_ns = float(time["duration_ns"].sum())

    @cached_property
    def roofline(self) -> pd.DataFrame:
        """roofline.roofline_rows by type"""
        return roofline.roofline_rows(self.tables, self.ceilings, times=step_time.operator_times(self.tables, self.time))

    @cached_property
    def crowd(self) -> displacement.Oversubscription | None:
        """Threads that share CPUs within steps, if they do."""
        rows = displacement.displacements(self.tables)
        return displacement.oversubscription(self.tables, rows[rows["token_id"].isin(self.steps.index)])

    @cached_property
    def submissions(self) -> pd.DataFrame:
        """accelerators.submissions"""
        return step_time.of_counted(self.tables, accelerators.submissions(self.tables))

    @cached_property
    def submission_cost_ns(self) -> float:
        """Mean time of a submission to the accelerator beyond its work."""
        return self.ns(self.time["cause"].isin(accelerators.SUBMISSION_COSTS)) / max(len(self.submissions), 1)

    def ns(self, rows: pd.Series) -> float:
        """The time of the rows of `time` that a mask selects."""
        return float(self.time.loc[rows, "duration_ns"].sum())

    def with_knob(self, text: str, knob: str, most_ns: float, **figures: Any) -> str:
        """A finding's text with what to turn, and the share of the time that this saves at most, `most_ns`."""
        share = most_ns / self.total_ns if self.total_ns else 0.0
        return f"{text}; {KNOBS[knob].format_map(figures)}: at most {share:.0%}" if share >= WORTH_TURNING else text

    def finding(
        self, rule: str, text: str, saving_ns: float, evidence: dict[str, Any], query: str, named: dict[str, Any] | None = None
    ) -> Finding:
        """A finding with its estimated saving; `query` is a key of QUERIES, filled with the figures `named`."""
        ms, share = saving_ns / 1e6, saving_ns / self.total_ns if self.total_ns else 0.0
        spent = (evidence["ms"], evidence["share"]) if "cause" in evidence else (ms, share)
        return Finding(rule, text, spent[0], spent[1], ms, share, evidence, QUERIES[query].format_map(named or {}))
