"""A decode step's time, learnt while running: recursive least squares over context length and experts missed.

A step's time grows nearly linearly with the context, and by about the same for every expert that has to be loaded; the machine's
state (clock, heat) changes slowly. Hence a line whose past weighs less with every step. The guard of decode speed learns it while
recording, the analyzer afterwards.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

FORGET = 0.98
"""Weight of the past per step: half of it is gone after 34 steps."""

WIDE, SLOPE = 1e6, 100.0
"""First variance of the constant (nothing is known) and of the slopes, over the noise's: slopes of ten times it are likely."""

REMEMBERED = 10_000
"""Steps whose errors count."""

CONTEXT_SCALE = 1000.0
"""Context counts in thousands of tokens, so that all coefficients are of a size."""


@dataclass
class StepLatency:
    """Predicts a decode step from (context tokens, experts missed); `coefficients`: s, s per 1000 tokens, s per miss.

    `typical`: mean of what the steps so far had (1, context in thousands, misses), the past weighing less.
    """

    forget: float = FORGET
    coefficients: np.ndarray = field(default_factory=lambda: np.zeros(3))
    steps: int = 0
    typical: np.ndarray = field(default_factory=lambda: np.zeros(3))
    _covariance: np.ndarray = field(default_factory=lambda: np.diag([WIDE, SLOPE, SLOPE]))
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def predict(self, context: int, missed: int) -> float:
        """Seconds expected of a step; 0 before any was seen."""
        return max(float(_row(context, missed) @ self.coefficients), 0.0)

    def update(self, context: int, missed: int, seconds: float) -> float:
        """Learn from a step that took `seconds`; returns what was predicted for it beforehand."""
        row, expected = _row(context, missed), self.predict(context, missed)
        if self.steps >= len(row):
            self._errors.append(expected / seconds - 1)
        spread = self._covariance @ row
        gain = spread / (self.forget + row @ spread)
        self.coefficients = self.coefficients + gain * (seconds - row @ self.coefficients)
        covariance = (self._covariance - np.outer(gain, spread)) / self.forget
        self._covariance = (covariance + covariance.T) / 2 * min(1.0, 3 * WIDE / np.trace(covariance))
        self.steps += 1
        self.typical = self.typical + (row - self.typical) * max(1 / self.steps, 1 - self.forget)
        return expected

    def beyond_typical(self, context: int, missed: int) -> float:
        """Seconds that a step takes longer than a typical one because of its context and its misses; 0 before enough was seen."""
        more = (_row(context, missed) - self.typical) @ self.coefficients
        return float(more) if self.steps > len(self.coefficients) else 0.0

    def error(self) -> dict[str, float]:
        """Relative error of the latest predictions: median and 90th percentile of its size, and its mean (bias)."""
        if not self._errors:
            return {"steps": 0.0, "median": float("nan"), "p90": float("nan"), "bias": float("nan")}
        errors = np.array(self._errors)
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return {"steps": float(len(errors)), "median": float(median), "p90": float(p90), "bias": float(errors.mean())}


def _row(context: int, missed: int) -> np.ndarray:
    return np.array([1.0, context / CONTEXT_SCALE, missed])
