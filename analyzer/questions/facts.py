"""What findings are made from, and what a finding is."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analyzer.questions import displacement, roofline, step_time
from analyzer.questions.ceilings import Ceilings
from analyzer.records.schema import Tables
from moescope.packaged import toml_beside

QUERIES: dict[str, str] = toml_beside(__file__, "findings.toml")["queries"]


@dataclass(frozen=True)
class Finding:
    """One thing that costs time. `saving_share` is of all steps' time, `saving_ms` of the whole recording."""

    rule: str
    """A cause, or a more specific reason."""
    text: str
    saving_ms: float
    saving_share: float
    evidence: dict[str, Any]
    query: str


@dataclass(frozen=True)
class Facts:
    """The inputs of the rules: tables and `time` of the steps that count."""

    tables: Tables
    steps: pd.DataFrame
    """step_time.counted"""
    time: pd.DataFrame
    ceilings: Ceilings | None

    @cached_property
    def phase(self) -> pd.Series:
        """Phase of each counted step."""
        return self.steps["phase"]

    @cached_property
    def phase_ns(self) -> pd.Series:
        """Time of each phase's steps."""
        return self.time["duration_ns"].groupby(self.phase.reindex(self.time["token_id"]).to_numpy()).sum()

    @cached_property
    def roofline(self) -> pd.DataFrame:
        """roofline.roofline by type"""
        times = step_time.operator_times(self.tables, self.time)
        return roofline.roofline(self.tables, self.ceilings, "type", times=times)

    @cached_property
    def displaced(self) -> pd.DataFrame:
        """displacement.displacements within steps"""
        rows = displacement.displacements(self.tables)
        return rows[rows["token_id"] >= 0]

    @cached_property
    def crowd(self) -> displacement.Crowd | None:
        """Threads that share CPUs, if they do."""
        return displacement.crowded(self.tables, self.displaced)

    @cached_property
    def total_ns(self) -> float:
        """All counted steps' time."""
        return float(self.time["duration_ns"].sum())

    def spent(self, **values: str) -> pd.DataFrame:
        """The rows of `time` whose columns have these values."""
        rows = self.time
        for name, value in values.items():
            rows = rows[rows[name] == value]
        return rows

    def finding(
        self, rule: str, text: str, saving_ns: float, evidence: dict[str, Any], query: str, named: dict[str, Any] | None = None
    ) -> Finding:
        """A finding with its estimated saving; `query` is a key of QUERIES, filled with the figures `named`."""
        share = saving_ns / self.total_ns if self.total_ns else 0.0
        return Finding(rule, text, saving_ns / 1e6, share, evidence, QUERIES[query].format_map(named or {}))
