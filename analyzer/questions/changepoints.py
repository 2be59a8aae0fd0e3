"""Where a series of steps changes its level, and what disturbs it periodically: with drift, autocorrelation and spikes in it.

The model: level + drift + shifts + noise with a lag-one correlation rho (AR(1)) + spikes. Spikes are set aside
first; then one shift after another is found by generalised least squares on whitened series, for all places at once.
"""

from dataclasses import dataclass

import numpy as np

SPIKE_SIGMAS = 5.0
SHIFT_SIGMAS = 4.2
"""Calibrated on series without shifts: under 5 % false alarms for 100 to 1,000 steps."""
MIN_STEPS = 8
LEAST_SERIES = 3 * MIN_STEPS
MEDIAN_WIDTH = 11
GAUSS = 1.4826
MIN_SPIKES = 4
REGULAR = 0.1


@dataclass(frozen=True)
class Shift:
    """The level changes at step `at` (the first of the new level) by `change`, in units of the series."""

    at: int
    change: float


@dataclass(frozen=True)
class Period:
    """A spike of typically `height` every `steps` steps, seen `count` times, first at `first`."""

    steps: float
    height: float
    count: int
    first: int


def running_median(values: np.ndarray, width: int = MEDIAN_WIDTH) -> np.ndarray:
    """The median around each step."""
    half = min(width, len(values)) // 2
    padded = np.pad(values, half, mode="reflect") if half else values
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def spikes(values: np.ndarray) -> np.ndarray:
    """Steps that stick out of their neighbourhood, upwards."""
    if len(values) < MIN_STEPS:
        return np.empty(0, np.int64)
    over = values - running_median(values)
    spread = GAUSS * np.median(np.abs(over - np.median(over)))
    return np.flatnonzero(over > SPIKE_SIGMAS * max(spread, 1e-12))


def period(values: np.ndarray) -> Period | None:
    """The periodic disturbance of a series, if there is one: spikes at regular distances, a few missed ones allowed."""
    at = spikes(values)
    at = at[np.append(True, np.diff(at) > 1)] if len(at) else at
    if len(at) < MIN_SPIKES:
        return None
    gap = np.diff(at)
    steps = float(np.median(gap))
    turns = np.maximum(np.round(gap / steps), 1)
    steps = float((at[-1] - at[0]) / turns.sum())
    off = np.abs(gap - turns * steps)
    if np.median(off) > max(1.0, REGULAR * steps) or turns.sum() > 2 * len(gap):
        return None
    height = float(np.median((values - running_median(values))[at]))
    return Period(steps, height, len(at), int(at[0]))


def correlation(values: np.ndarray) -> float:
    """Lag-one correlation of the noise: differences over two steps vary 1 + rho times as much as over one; level and drift
    drop out, and clipping takes out shifts. A standard error is added: too small a correlation sees shifts in noise.
    """
    one, two = (_clipped_variance(d) for d in (np.diff(values), values[2:] - values[:-2]))
    return float(np.clip(two / one - 1 + 1 / np.sqrt(len(values)), 0.0, 0.9)) if one > 0 else 0.0


def _clipped_variance(values: np.ndarray) -> float:
    """Variance with what lies beyond four (robust) sigmas brought to there."""
    middle = np.median(values)
    reach = 4 * GAUSS * np.median(np.abs(values - middle))
    return float(np.var(np.clip(values, middle - reach, middle + reach)))


def shifts(values: np.ndarray) -> list[Shift]:
    """Every significant change of level, in order. Spikes do not count; a steady drift is no shift."""
    y = np.asarray(values, np.float64).copy()
    if len(y) < LEAST_SERIES:
        return []
    at = spikes(y)
    y[at] = running_median(y)[at]
    rho = correlation(y)
    found: list[int] = []
    while len(found) < len(y) // MIN_STEPS:
        place, score = _strongest(y, found, rho)
        if score < SHIFT_SIGMAS:
            break
        found = _settled(y, sorted([*found, place]), rho)
        if place not in found and all(abs(place - other) > 2 for other in found):
            break
    sizes, scores = _fit(y, found, rho)
    return [Shift(k, float(s)) for k, s, t in zip(found, sizes, scores, strict=True) if abs(t) >= SHIFT_SIGMAS]


def _whitened(columns: np.ndarray, rho: float) -> np.ndarray:
    """x[t] - rho x[t-1] for each column; the first row scaled as the stationary start is."""
    out = columns.copy()
    out[1:] -= rho * columns[:-1]
    out[0] *= np.sqrt(1 - rho**2)
    return out


def _basis(n: int, at: list[int], rho: float) -> np.ndarray:
    """Whitened columns [n, 2 + shifts]: level, drift, and a step at each place."""
    t = np.arange(n)
    return _whitened(np.column_stack([np.ones(n), t / n, *(t >= k for k in at)]).astype(np.float64), rho)


def _strongest(y: np.ndarray, at: list[int], rho: float) -> tuple[int, float]:
    """The place whose additional step explains most, and its |t|: all places by cumulative sums."""
    n = len(y)
    q = np.linalg.qr(_basis(n, at, rho))[0]
    z = _whitened(y[:, None], rho)[:, 0]
    residual = z - q @ (q.T @ z)
    vectors = np.column_stack([residual, q])
    after = np.vstack([np.cumsum(vectors[::-1], axis=0)[::-1][1:], np.zeros(vectors.shape[1])])
    product = vectors + (1 - rho) * after  # of the whitened step at k with every vector
    own = 1 + (1 - rho) ** 2 * (n - 1 - np.arange(n)) - (product[:, 1:] ** 2).sum(axis=1)
    gain = np.where(own > 1e-3, product[:, 0] ** 2 / np.maximum(own, 1e-3), 0.0)
    blocked = np.zeros(n, bool)
    for k in [0, n, *at]:
        blocked[max(0, k - MIN_STEPS // 2) : k + MIN_STEPS // 2] = True
    gain[blocked] = 0.0
    best = int(np.argmax(gain))
    noise = max(float((residual**2).sum() - gain[best]) / max(n - q.shape[1] - 1, 1), 1e-24)
    return best, float(np.sqrt(gain[best] / noise))


def _settled(y: np.ndarray, at: list[int], rho: float) -> list[int]:
    """Each place moved to where it explains most given the others; places that then explain too little are dropped."""
    for i, _ in enumerate(at):
        at[i] = _strongest(y, at[:i] + at[i + 1 :], rho)[0]
    at = sorted(set(at))
    scores = _fit(y, at, rho)[1]
    return [k for k, t in zip(at, scores, strict=True) if abs(t) >= SHIFT_SIGMAS]


def _fit(y: np.ndarray, at: list[int], rho: float) -> tuple[np.ndarray, np.ndarray]:
    """(size, t) of the step at each place, all fitted together."""
    if not at:
        return np.empty(0), np.empty(0)
    basis, z = _basis(len(y), at, rho), _whitened(y[:, None], rho)[:, 0]
    inverse = np.linalg.pinv(basis.T @ basis)
    beta = inverse @ basis.T @ z
    noise = max(float(((z - basis @ beta) ** 2).sum()) / max(len(y) - basis.shape[1], 1), 1e-24)
    return beta[2:], beta[2:] / np.sqrt(np.maximum(np.diag(inverse)[2:] * noise, 1e-24))
