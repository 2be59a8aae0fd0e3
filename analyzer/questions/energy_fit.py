"""A fit of energy between readings to what ran between them: power is a sum of constants times activities, seen with some delay.

The readings' noise is ARMA(1, 1): errors of a counter's readings cancel from one interval to the next, fluctuations of power last.
Its two numbers are chosen by restricted likelihood; intervals follow from the least squares that they weigh (docs/energy.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, minimize_scalar, nnls
from scipy.signal import lfilter
from scipy.stats import t as student

CONFIDENCE = 0.95
STEADY_ROWS = 200
"""Rows after which the noise's recursion has settled."""
DELAYS = 26
LIKELIER = 4.0
"""Difference of twice the log-likelihood from which on a delay is believed."""
STEEPEST = 0.98
FEWEST_READINGS = 2
"""Readings for each unknown."""
NOISE_NUMBERS = 2
DELAY_STEP_S = 0.005
ESTIMABLE = 1e-6
Activities = Callable[[float], np.ndarray]
"""Delay in s → what ran between the readings, shape [readings, activities], e.g. in CPU seconds."""


@dataclass(frozen=True)
class EnergyFit:
    """Constants in watts by activity, with their covariance; the delay in s, and the share of the energy left over."""

    watts: np.ndarray
    covariance: np.ndarray
    design: np.ndarray
    degrees: int
    delay_s: float
    residual: float
    """Root mean square of what the fit leaves of a reading, as a share of the mean reading."""

    def total(self, amounts: np.ndarray) -> tuple[float, float, float]:
        """(joules of these amounts of each activity, and the ends of the interval); NaN if the readings cannot tell."""
        basis = np.linalg.pinv(self.design) @ self.design
        if np.linalg.norm(amounts - basis.T @ amounts) > ESTIMABLE * max(np.linalg.norm(amounts), 1e-12):
            return np.nan, np.nan, np.nan
        joules = float(amounts @ self.watts)
        half = float(student.ppf((1 + CONFIDENCE) / 2, self.degrees) * np.sqrt(max(amounts @ self.covariance @ amounts, 0.0)))
        return joules, joules - half, joules + half


def whitened(columns: np.ndarray, phi: float, theta: float) -> tuple[np.ndarray, float]:
    """(columns [n, k] as their innovations under ARMA(1, 1) noise of variance 1, the noise's log-determinant)."""
    count = len(columns)
    steady = min(count, STEADY_ROWS)
    scale = np.ones(count)
    scale[0] = (1 + 2 * phi * theta + theta**2) / (1 - phi**2)
    for row in range(1, steady):
        scale[row] = 1 + theta**2 - theta**2 / scale[row - 1]
    answer = np.empty_like(columns)
    answer[0] = columns[0]
    driven = columns[1:] - phi * columns[:-1]
    for row in range(1, steady):
        answer[row] = driven[row - 1] - theta / scale[row - 1] * answer[row - 1]
    if count > steady:
        scale[steady:] = scale[steady - 1]
        slope = theta / scale[-1]
        answer[steady:] = lfilter([1.0], [1.0, slope], driven[steady - 1 :], axis=0, zi=-slope * answer[None, steady - 1])[0]
    return answer / np.sqrt(scale)[:, None], float(np.log(scale).sum())


def restricted_deviance(noise: np.ndarray, joules: np.ndarray, design: np.ndarray) -> float:
    """Minus twice the restricted log-likelihood of the noise's (phi, theta), besides a constant."""
    if np.abs(noise).max() > STEEPEST:
        return float("inf")
    both, determinant = whitened(np.column_stack([joules, design]), *noise)
    y, x = both[:, 0], both[:, 1:]
    solution, _, rank, singular = np.linalg.lstsq(x, y, rcond=None)
    rest = float(((y - x @ solution) ** 2).sum())
    degrees = len(y) - int(rank)
    return degrees * np.log(max(rest, 1e-300) / degrees) + determinant + 2 * float(np.log(singular[: int(rank)]).sum())


def squares_left(joules: np.ndarray, design: np.ndarray) -> float:
    """The sum of squares that constants which are not negative leave."""
    return float(nnls(design, joules)[1] ** 2)


def fitted_delay(joules: np.ndarray, activities: Activities, longest_s: float) -> float:
    """The delay that explains the readings best, in s; 0 unless it is clearly likelier."""
    delays = np.linspace(0, longest_s, DELAYS)
    left = [squares_left(joules, activities(delay)) for delay in delays]
    best = int(np.argmin(left))
    width = delays[1]
    found = minimize_scalar(
        lambda delay: squares_left(joules, activities(delay)),
        bounds=(max(delays[best] - width, 0.0), delays[best] + width),
        method="bounded",
        options={"xatol": width / 50},
    )
    gain = len(joules) * np.log(max(left[0], 1e-300) / max(float(found.fun), 1e-300))
    return float(found.x) if gain > LIKELIER else 0.0


def fit_energy(joules: np.ndarray, activities: Activities, longest_s: float) -> EnergyFit | None:
    """The fit of n readings' `joules`; None if they are too few. `longest_s`: the longest delay."""
    delay = fitted_delay(joules, activities, longest_s)
    design = activities(delay)
    used = np.flatnonzero(nnls(design, joules)[0] > 0)
    if len(joules) < FEWEST_READINGS * (len(used) + 3) or not len(used):
        return None
    options = {"xatol": 0.01, "fatol": 0.02}
    noise = minimize(restricted_deviance, (0.1, 0.1), (joules, design[:, used]), method="Nelder-Mead", options=options).x
    y, x = (column for column in np.split(whitened(np.column_stack([joules, design]), *noise)[0], [1], axis=1))
    watts = np.zeros(design.shape[1])
    watts[used] = nnls(x[:, used], y[:, 0])[0]
    kept, shift = np.flatnonzero(watts > 0), effect_of_delay(activities, delay, watts)
    columns = np.column_stack([x[:, kept], whitened(shift, *noise)[0]])
    degrees = max(len(y) - columns.shape[1] - NOISE_NUMBERS, 1)
    variance = float(((y[:, 0] - x @ watts) ** 2).sum()) / degrees
    covariance = np.zeros((len(watts), len(watts)))
    covariance[np.ix_(kept, kept)] = variance * np.linalg.pinv(columns.T @ columns)[: len(kept), : len(kept)]
    residual = float(np.sqrt(np.mean((joules - design @ watts) ** 2)) / np.mean(joules))
    return EnergyFit(watts, covariance, design, degrees, delay, residual)


def effect_of_delay(activities: Activities, delay_s: float, watts: np.ndarray) -> np.ndarray:
    """How the readings change with the delay, shape [n, 1]; [n, 0] if none is believed, so that it adds nothing unknown."""
    step = min(DELAY_STEP_S, delay_s)
    if not step:
        return np.empty((len(activities(0.0)), 0))
    return ((activities(delay_s + step) - activities(delay_s - step)) @ watts / (2 * step))[:, None]
