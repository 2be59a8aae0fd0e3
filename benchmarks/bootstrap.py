"""Intervals of medians."""

import numpy as np

DRAWS = 10_000


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95 % bootstrap interval. values: [n], or [n, k] where k come and go together."""
    drawn = np.random.default_rng(0).choice(values, (DRAWS, len(values)))
    medians = np.median(drawn.reshape(DRAWS, -1), axis=1)
    return float(np.median(values)), float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))
