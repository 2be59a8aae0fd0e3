"""A fit of energy between readings to what ran between them: power is a sum of constants times activities, seen with some delay.

The noise of readings has three parts: power of other origin that wanders with some time constant; errors, which in a counter's
intervals cancel from one to the next; and, of a power sensor that is read more rarely than it measures, what its samples missed,
whose variance is in proportion to how much the power changes between two readings. The time constant and the parts' shares are
unknown: the answer is the mean over a grid of them, weighted by restricted likelihood, so that its interval has
what is not known of the noise (docs/energy.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cholesky_banded, solve_banded
from scipy.optimize import brentq, minimize_scalar, nnls
from scipy.stats import t as student

CONFIDENCE = 0.95
ERROR_SHARES = (1.0, 0.9998, 0.998, 0.98, 0.9, 0.7, 0.4, 0.1, 0.0)
"""Of the noise's variance, what errors of readings have."""
SAMPLED_SHARES, SAMPLED_ERROR_SHARES = (0.3, 0.6, 0.85, 0.97, 0.998), (1.0, 0.7, 0.3)
"""Of the noise's variance what sampling has, and of the rest what errors have."""
WANDERS = 12
LONGEST_WANDER_S = 10.0
DELAYS = 26
LIKELIER = 4.0
"""Difference of twice the log-likelihood from which on a delay is believed."""
ROUNDS = 2
"""The delay is found with the noise in mind, and the noise at that delay."""
DELAY_STEP_S = 0.005
FEWEST_READINGS = 2
"""Readings for each unknown."""
ESTIMABLE = 1e-6
TINY = 1e-300
SPAN = 60
SAMPLES = 8
"""Parts of the time between readings in which a sensor may have measured."""
Activities = Callable[[float], np.ndarray]
"""Delay in s → what ran between the readings, shape [readings, activities], e.g. in CPU seconds a second."""


@dataclass(frozen=True)
class Noise:
    """Noise of variance 1: `lasting` is what a wander keeps from one reading to the next; `of_counter`: errors cancel.

    `sampling`: the variance by sampling of each reading, of mean 1, shape [n]; `sampled_share`: what it has of all.
    """

    lasting: float
    error_share: float
    of_counter: bool
    sampled_share: float = 0.0
    sampling: np.ndarray | None = None

    def whitened(self, columns: np.ndarray) -> tuple[np.ndarray, float]:
        """(columns [n, k] as innovations, the log-determinant of the noise's covariance)."""
        driven = columns.copy()
        driven[1:] -= self.lasting * columns[:-1]
        factor = cholesky_banded(self._bands(len(columns)), lower=True, overwrite_ab=True, check_finite=False)
        answer = solve_banded((len(factor) - 1, 0), factor, driven, check_finite=False)
        return answer, 2 * float(np.log(factor[0]).sum())

    def _bands(self, count: int) -> np.ndarray:
        """The covariance of the noise without what lasts of the reading before: its diagonal and two below, shape [3, count]."""
        phi, share = self.lasting, self.error_share
        bands = np.zeros((3, count))
        if self.of_counter:  # the difference of two errors, each of half the variance
            bands[0], bands[1], bands[2] = (1 + (1 + phi) ** 2 + phi**2) / 2, -((1 + phi) ** 2) / 2, phi / 2
            bands[0, 0], bands[1, 0] = 1, -(1 + 2 * phi) / 2
        else:
            bands[0], bands[1] = 1 + phi**2, -phi
            bands[0, 0] = 1
        bands *= share
        bands[0] += (1 - share) * (1 - phi**2)
        bands[0, 0] += (1 - share) * phi**2
        if self.sampling is not None:  # whitening subtracts a part of the reading before, with its sample
            bands *= 1 - self.sampled_share
            bands[0] += self.sampled_share * (self.sampling + phi**2 * np.append(0, self.sampling[:-1]))
            bands[1, :-1] -= self.sampled_share * phi * self.sampling[:-1]
        return bands + np.array([[1e-9], [0], [0]])


@dataclass(frozen=True)
class Candidate:
    """Constants in watts under one noise, their covariance, and the noise's restricted deviance."""

    noise: Noise
    watts: np.ndarray
    covariance: np.ndarray
    deviance: float


@dataclass(frozen=True)
class EnergyFit:
    """The fit: candidates with their weights, what ran between the readings, and the delay in s."""

    candidates: list[Candidate]
    weights: np.ndarray
    design: np.ndarray
    degrees: int
    delay_s: float
    residual: float
    """Root mean square of what the fit leaves of a reading, as a share of the mean reading."""

    @property
    def watts(self) -> np.ndarray:
        """The mean constants by activity."""
        return self.weights @ np.array([each.watts for each in self.candidates])

    def total(self, amounts: np.ndarray) -> tuple[float, float, float]:
        """(joules of these amounts of each activity, and the ends of the interval); NaN if the readings do not resolve them."""
        basis = np.linalg.pinv(self.design) @ self.design
        if np.linalg.norm(amounts - basis.T @ amounts) > ESTIMABLE * max(float(np.linalg.norm(amounts)), TINY):
            return np.nan, np.nan, np.nan
        means = np.array([amounts @ each.watts for each in self.candidates])
        spreads = np.sqrt([max(amounts @ each.covariance @ amounts, TINY) for each in self.candidates])
        joules, reach = float(self.weights @ means), SPAN * float(spreads.max()) + float(np.ptp(means))

        def below(value: float, share: float) -> float:
            return float(self.weights @ student.cdf((value - means) / spreads, self.degrees)) - share

        low = brentq(below, joules - reach, joules, ((1 - CONFIDENCE) / 2,))
        return joules, low, brentq(below, joules, joules + reach, ((1 + CONFIDENCE) / 2,))


def noises(period_s: float, of_counter: bool, sampling: np.ndarray | None = None) -> Iterator[Noise]:
    """The grid of noises."""
    shares = [(0.0, error, None) for error in ERROR_SHARES]
    if sampling is not None:
        shares += [(sampled, error, sampling) for sampled in SAMPLED_SHARES for error in SAMPLED_ERROR_SHARES]
    for sampled, error, variances in shares:
        for tau in np.geomspace(period_s / 3, max(LONGEST_WANDER_S, period_s), WANDERS) if error < 1 else (0.0,):
            lasting = float(np.exp(-period_s / tau)) if tau else 0.0
            yield Noise(lasting, error, of_counter, sampled, variances)


def sampling_variance(parts: np.ndarray, watts: np.ndarray) -> np.ndarray | None:
    """The variance of power between readings, of mean 1; None if it never changes. `parts`: shape [SAMPLES, n, activities]."""
    variance = (parts @ watts).var(axis=0)
    mean = float(variance.mean())
    return variance / mean if mean > TINY else None


def squares_left(noise: Noise, readings: np.ndarray, design: np.ndarray) -> float:
    """The weighted sum of squares that constants which are not negative leave."""
    both = noise.whitened(np.column_stack([readings, design]))[0]
    return float(nnls(both[:, 1:], both[:, 0])[1] ** 2)


def constants_by(noise: Noise, readings: np.ndarray, design: np.ndarray) -> np.ndarray:
    """The constants that are not negative and fit best under a noise."""
    both = noise.whitened(np.column_stack([readings, design]))[0]
    return nnls(both[:, 1:], both[:, 0])[0]


def fitted_delay(readings: np.ndarray, activities: Activities, longest_s: float, noise: Noise) -> float:
    """The delay that explains the readings best, in s; 0 unless another is clearly likelier."""

    def left(delay: float) -> float:
        return squares_left(noise, readings, activities(delay))

    delays = np.linspace(0, longest_s, DELAYS)
    rough = np.array([left(delay) for delay in delays])
    best, width = int(np.argmin(rough)), delays[1]
    around = (max(delays[best] - width, 0.0), delays[best] + width)
    found = minimize_scalar(left, bounds=around, method="bounded", options={"xatol": width / 50})
    gain = len(readings) * np.log(max(rough[0], TINY) / max(float(found.fun), TINY))
    return float(found.x) if gain > LIKELIER else 0.0


def fit_energy(
    readings: np.ndarray,
    activities: Activities,
    period_s: float,
    longest_s: float,
    of_counter: bool,
    parts: Activities | None = None,
) -> EnergyFit | None:
    """The fit of n readings, usually `period_s` apart; None if they are too few. `longest_s`: the longest delay.

    `parts`: activities in SAMPLES parts of the time between readings, shape [SAMPLES, n, activities], of a sensor that samples.

    Readings and activities are means over their time, in which a wander is the same whatever their length.
    """
    if len(readings) < FEWEST_READINGS * (activities(0.0).shape[1] + 3) or not readings.any():
        return None
    noise, delay = Noise(0.0, 1.0, False), 0.0
    for _ in range(ROUNDS):
        delay = fitted_delay(readings, activities, longest_s, noise)
        design = activities(delay)
        rough = constants_by(noise, readings, design)
        used, slope = np.flatnonzero(rough > 0), effect_of_delay(activities, delay, rough)
        sampling = sampling_variance(parts(delay), rough) if parts else None
        grid = noises(period_s, of_counter, sampling)
        found = [fitted_constants(each, readings, design, used, slope) for each in grid]
        noise = min(found, key=lambda each: each.deviance).noise
    weights = np.exp(-(np.array([each.deviance for each in found]) - min(each.deviance for each in found)) / 2)
    fit = EnergyFit(found, weights / weights.sum(), design, len(readings) - len(used) - slope.shape[1], delay, np.nan)
    left = np.sqrt(np.mean((readings - design @ fit.watts) ** 2)) / np.mean(readings)
    return replace(fit, residual=float(left))


def fitted_constants(noise: Noise, readings: np.ndarray, design: np.ndarray, used: np.ndarray, slope: np.ndarray) -> Candidate:
    """The constants of the activities `used` under one noise; `slope`: how the readings change with the delay."""
    both, determinant = noise.whitened(np.column_stack([readings, design[:, used], slope]))
    y, x = both[:, 0], both[:, 1:]
    solution, _, rank, singular = np.linalg.lstsq(x, y, rcond=None)
    degrees, rest = len(y) - int(rank), float(((y - x @ solution) ** 2).sum())
    watts, covariance = np.zeros(design.shape[1]), np.zeros((design.shape[1], design.shape[1]))
    watts[used] = solution[: len(used)]
    covariance[np.ix_(used, used)] = (rest / degrees * np.linalg.pinv(x.T @ x))[: len(used), : len(used)]
    deviance = degrees * np.log(max(rest, TINY) / degrees) + determinant + 2 * float(np.log(singular[: int(rank)]).sum())
    return Candidate(noise, watts, covariance, deviance)


def effect_of_delay(activities: Activities, delay_s: float, watts: np.ndarray) -> np.ndarray:
    """How the readings change with the delay, shape [n, 1]; [n, 0] if none is believed, so that it adds nothing unknown."""
    step = min(DELAY_STEP_S, delay_s)
    if not step:
        return np.empty((len(activities(0.0)), 0))
    return ((activities(delay_s + step) - activities(delay_s - step)) @ watts / (2 * step))[:, None]
