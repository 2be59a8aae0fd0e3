"""Learns a decode step's time online: recursive least squares over context length and experts missed.

A step's time grows nearly linearly with the context, and by about the same for every expert that has to be loaded; the
machine's state (clock, heat) changes slowly. Hence a linear model that discounts older steps. The guard of decode speed learns
it while recording, the analyzer afterwards.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

FORGET = 0.98
"""Discount of the past per step: its weight halves every 34 steps."""

WIDE, SLOPE = 1e6, 100.0
"""Initial variance of the constant (unknown) and of the slopes, relative to the noise's: slopes of ten times it are likely."""

REMEMBERED = 10_000
"""Number of latest steps whose errors are kept."""

CONTEXT_SCALE = 1000.0
"""Context is scaled to thousands of tokens, so that all coefficients are of similar size."""


@dataclass
class StepLatency:
    """Predicts a decode step from (context tokens, experts missed); `coefficients`: s, s per 1000 tokens, s per miss."""

    forget: float = FORGET
    coefficients: np.ndarray = field(default_factory=lambda: np.zeros(3))
    steps: int = 0
    _covariance: np.ndarray = field(default_factory=lambda: np.diag([WIDE, SLOPE, SLOPE]))
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def predict(self, context: int, missed: int) -> float:
        """Predicted seconds of a step; 0 before the first one."""
        return max(float(_feature_row(context, missed) @ self.coefficients), 0.0)

    def update(self, context: int, missed: int, seconds: float) -> float:
        """Learn from a step that took `seconds`; returns its prediction from before."""
        row, expected = _feature_row(context, missed), self.predict(context, missed)
        if self.steps >= len(row):
            self._errors.append(expected / seconds - 1)
        spread = self._covariance @ row
        gain = spread / (self.forget + row @ spread)
        self.coefficients = self.coefficients + gain * (seconds - row @ self.coefficients)
        covariance = (self._covariance - np.outer(gain, spread)) / self.forget
        self._covariance = (covariance + covariance.T) / 2 * min(1.0, 3 * WIDE / np.trace(covariance))
        self.steps += 1
        return expected

    def error(self) -> dict[str, float]:
        """Relative error of the latest predictions: median and 90th percentile of the absolute value, and mean (bias)."""
        if not self._errors:
            return {"steps": 0.0, "median": float("nan"), "p90": float("nan"), "bias": float("nan")}
        errors = np.array(self._errors)
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return {"steps": float(len(errors)), "median": float(median), "p90": float(p90), "bias": float(errors.mean())}


def _feature_row(context: int, missed: int) -> np.ndarray:
    return np.array([1.0, context / CONTEXT_SCALE, missed])
