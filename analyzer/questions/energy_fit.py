"""A fit of energy between readings to what ran between them: power is a sum of constants times activities, seen with some delay.

The noise of readings has three parts: power of other origin that wanders with some time constant; errors, which in a counter's
intervals cancel from one to the next; and, of a power sensor that is read more rarely than it measures, what its samples missed,
whose variance is in proportion to how much the power changes between two readings. The time constant and the parts' shares are
unknown: the answer is the mean over a grid of them, weighted by restricted likelihood (Patterson and Thompson, Biometrika 58,
1971; Berger, Liseo and Wolpert, Statistical Science 14, 1999), so that its interval has what is not known of the noise. What the
constants depend on is unknown too: the mean is also over explanations, weighted by Schwarz's criterion (docs/energy.md).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.linalg import cholesky_banded, solve_banded
from scipy.optimize import brentq, minimize_scalar, nnls
from scipy.stats import t as student

from analyzer.questions.energy_running import Explanation

CONFIDENCE = 0.95
ERROR_SHARES = (1.0, 0.9998, 0.998, 0.98, 0.9, 0.7, 0.4, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0)
"""Of the noise's variance, what errors of readings have. Fine at both ends: a wander hardly changes from one reading to the next
of a fast sensor, so that errors of a thousandth of its variance decide what differences of readings are worth."""
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
BELIEVABLE = 12.0
"""Difference of Schwarz's criterion to the best, from which on an explanation counts for nothing."""
UNRESOLVED = 0.05
"""Weight of explanations that cannot tell an energy, from which on it is not known."""
SPAN = 60
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
    """Constants in watts under one explanation and noise, their covariance, the restricted deviance, and Schwarz's criterion."""

    explanation: Explanation
    noise: Noise
    watts: np.ndarray
    covariance: np.ndarray
    deviance: float
    criterion: float
    degrees: int


@dataclass(frozen=True)
class EnergyFit:
    """The fit: candidates with their weights, what ran between the readings, and the delay in s."""

    candidates: list[Candidate]
    weights: np.ndarray
    design: np.ndarray
    delay_s: float
    residual: float
    """Root mean square of what the fit leaves of a reading, as a share of the mean reading."""

    @property
    def watts(self) -> np.ndarray:
        """The mean constants by activity."""
        return self.weights @ np.array([each.watts for each in self.candidates])

    def share(self, asked: Callable[[Explanation], bool]) -> float:
        """The weight of the explanations of which something holds."""
        return float(sum(w for w, each in zip(self.weights, self.candidates, strict=True) if asked(each.explanation)))

    @property
    def exponent(self) -> float:
        """The mean exponent of the explanations in which power grows with the clock; 0 without any."""
        grows = self.share(lambda one: one.exponent > 0)
        powers = np.array([each.explanation.exponent for each in self.candidates])
        return float(self.weights @ powers) / grows if grows else 0.0

    def total(self, amounts: np.ndarray) -> tuple[float, float, float]:
        """(joules of these amounts of each activity, and the ends of the interval); NaN if the readings do not resolve them."""
        told = {id(each.explanation): resolves(self.design, each.explanation, amounts) for each in self.candidates}
        kept = [(w, each) for w, each in zip(self.weights, self.candidates, strict=True) if told[id(each.explanation)]]
        weights = np.array([w for w, _ in kept])
        if weights.sum() <= 1 - UNRESOLVED:
            return np.nan, np.nan, np.nan
        weights /= weights.sum()
        means = np.array([amounts @ each.watts for _, each in kept])
        spreads = np.sqrt([max(amounts @ each.covariance @ amounts, TINY) for _, each in kept])
        degrees = np.array([each.degrees for _, each in kept])
        joules, reach = float(weights @ means), SPAN * float(spreads.max()) + float(np.ptp(means))

        def below(value: float, share: float) -> float:
            return float(weights @ student.cdf((value - means) / spreads, degrees)) - share

        low = brentq(below, joules - reach, joules + reach, ((1 - CONFIDENCE) / 2,))
        return joules, low, brentq(below, joules - reach, joules + reach, ((1 + CONFIDENCE) / 2,))


def resolves(design: np.ndarray, explanation: Explanation, amounts: np.ndarray) -> bool:
    """Whether the readings resolve the energy of these amounts, if the explanation holds."""
    columns, wanted = design @ explanation.matrix, amounts @ explanation.matrix
    resolved = wanted @ np.linalg.pinv(columns) @ columns
    return float(np.linalg.norm(wanted - resolved)) <= ESTIMABLE * max(float(np.linalg.norm(wanted)), TINY)


def noises(period_s: float, of_counter: bool, sampling: np.ndarray | None = None) -> Iterator[Noise]:
    """The grid of noises."""
    shares: list[tuple[float, float, np.ndarray | None]] = [(0.0, error, None) for error in ERROR_SHARES]
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
    explanations: Sequence[Explanation],
    period_s: float,
    longest_s: float,
    of_counter: bool,
    parts: Activities | None = None,
) -> EnergyFit | None:
    """The fit of n readings, usually `period_s` apart; None if they are too few. `longest_s`: the longest delay.

    Readings and activities are means over their time, in which a wander is the same whatever their length. `explanations`: the
    simplest first; those for which the readings are too few are not tried. `parts`: activities in SAMPLES parts of the time
    between readings, shape [SAMPLES, n, activities], of a sensor that may have seen samples.
    """
    tried = [each for each in explanations if len(readings) >= FEWEST_READINGS * (each.matrix.shape[1] + 3)]
    if not tried or not readings.any():
        return None
    noise, best = Noise(0.0, 1.0, False), tried[0]
    for _ in range(ROUNDS):
        delay = fitted_delay(readings, partial(explained_activities, activities, best), longest_s, noise)
        design = activities(delay)
        rough = best.matrix @ constants_by(noise, readings, design @ best.matrix)
        sampling = sampling_variance(parts(delay), rough) if parts else None
        slope, grid = effect_of_delay(activities, delay, rough), list(noises(period_s, of_counter, sampling))
        kept = believable_explanations(tried, noise, readings, design, slope)
        used = {id(one): used_columns(one, noise, readings, design) for one in kept}
        found = [fitted_constants(one, each, readings, design, slope, used[id(one)]) for one in kept for each in grid]
        weights = candidate_weights(found)
        best, noise = found[int(np.argmax(weights))].explanation, found[int(np.argmax(weights))].noise
    fit = EnergyFit(found, weights, design, delay, np.nan)
    left = np.sqrt(np.mean((readings - design @ fit.watts) ** 2)) / np.mean(readings)
    return replace(fit, residual=float(left))


def explained_activities(activities: Activities, explanation: Explanation, delay_s: float) -> np.ndarray:
    """What ran, summed as the explanation has it: shape [readings, constants]."""
    return activities(delay_s) @ explanation.matrix


def believable_explanations(
    tried: Sequence[Explanation], noise: Noise, readings: np.ndarray, design: np.ndarray, slope: np.ndarray
) -> list[Explanation]:
    """Those that are near the best under one noise; of several that say the same of these readings, the simplest."""
    different: list[Explanation] = []
    for one in tried:
        if not any(same_columns(design @ one.matrix, design @ other.matrix) for other in different):
            different.append(one)
    if len(different) == 1:
        return different
    used = [used_columns(one, noise, readings, design) for one in different]
    fits = [fitted_constants(one, noise, readings, design, slope, own) for one, own in zip(different, used, strict=True)]
    criteria = [fit.criterion for fit in fits]
    return [one for one, each in zip(different, criteria, strict=True) if each <= min(criteria) + BELIEVABLE]


def same_columns(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two sets of columns span the same space."""
    ranks = [np.linalg.matrix_rank(columns) for columns in (one, other, np.column_stack([one, other]))]
    return len(set(ranks)) == 1


def candidate_weights(found: list[Candidate]) -> np.ndarray:
    """Of an explanation's noises by restricted likelihood, and of the explanations by their least criterion."""
    owner, best = np.array([id(each.explanation) for each in found]), min(each.criterion for each in found)
    weights = np.zeros(len(found))
    for one in dict.fromkeys(owner.tolist()):
        mine = np.flatnonzero(owner == one)
        deviance = np.array([found[i].deviance for i in mine])
        likely = np.exp(-(deviance - deviance.min()) / 2)
        weights[mine] = likely / likely.sum() * np.exp(-(min(found[i].criterion for i in mine) - best) / 2)
    return weights / weights.sum()


def used_columns(explanation: Explanation, noise: Noise, readings: np.ndarray, design: np.ndarray) -> np.ndarray:
    """The constants of an explanation that are more than 0 under a noise."""
    return np.flatnonzero(constants_by(noise, readings, design @ explanation.matrix) > 0)


def fitted_constants(
    explanation: Explanation, noise: Noise, readings: np.ndarray, design: np.ndarray, slope: np.ndarray, used: np.ndarray
) -> Candidate:
    """The constants `used` under one explanation and noise; `slope`: how the readings change with the delay."""
    columns = design @ explanation.matrix
    both, determinant = noise.whitened(np.column_stack([readings, columns[:, used], slope]))
    y, x = both[:, 0], both[:, 1:]
    solution, _, rank, singular = np.linalg.lstsq(x, y, rcond=None)
    count, rest = len(y), max(float(((y - x @ solution) ** 2).sum()), TINY)
    degrees = count - int(rank)
    to_all = explanation.matrix[:, used]
    covariance = to_all @ (rest / degrees * np.linalg.pinv(x.T @ x))[: len(used), : len(used)] @ to_all.T
    deviance = degrees * np.log(rest / degrees) + determinant + 2 * float(np.log(singular[: int(rank)]).sum())
    known = int(rank) + (explanation.exponent > 0)
    criterion = count * np.log(rest / count) + determinant + known * np.log(count)
    return Candidate(explanation, noise, to_all @ solution[: len(used)], covariance, deviance, criterion, degrees)


def effect_of_delay(activities: Activities, delay_s: float, watts: np.ndarray) -> np.ndarray:
    """How the readings change with the delay, shape [n, 1]; [n, 0] if none is believed, so that it adds nothing unknown."""
    step = min(DELAY_STEP_S, delay_s)
    if not step:
        return np.empty((len(activities(0.0)), 0))
    return ((activities(delay_s + step) - activities(delay_s - step)) @ watts / (2 * step))[:, None]
