"""Medians with intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
BOOTSTRAP, EXTREMES, QUARTILES = "95 % bootstrap", "min..max", "quartiles"


class Spread(NamedTuple):
    """A median with the bounds of an interval; n: number of values."""

    median: float
    low: float | None
    high: float | None
    interval: str
    n: int

    def scaled(self, factor: float) -> "Spread":
        """The spread multiplied by a factor, for another unit."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Spread(self.median * factor, low, high, self.interval, self.n)


def bootstrap(values: np.ndarray | Sequence[float]) -> Spread:
    """The median and its 95 % bootstrap interval. values: [n], or [n, k] with groups of k resampled together."""
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).choice(array, (DRAWS, len(array)))
    medians = np.median(drawn.reshape(DRAWS, -1), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Spread(float(np.median(array)), float(low), float(high), BOOTSTRAP, len(array))


def extremes(values: np.ndarray | Sequence[float]) -> Spread:
    """The median, minimum and maximum of all values."""
    array = np.asarray(values, float)
    return Spread(float(np.median(array)), float(array.min()), float(array.max()), EXTREMES, array.size)


def quartiles(values: np.ndarray | Sequence[float]) -> Spread:
    """The median and the quartiles."""
    low, middle, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75))
    return Spread(float(middle), float(low), float(high), QUARTILES, len(values))


def single(value: float, n: int = 1) -> Spread:
    """One value, of n observations, without an interval."""
    return Spread(float(value), None, None, "", n)
