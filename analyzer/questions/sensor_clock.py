"""When a sensor took its values: the updates of its own regular clock, found from which of its readings were new.

A sensor shows a value until it has the next one. A reading that differs from the one before was updated between both; one that
does not, most likely was not. The period of a regular clock is the one at which the moments of the rarer of these two kinds are
most coherent: Rayleigh's statistic of event times (Mardia and Jupp, Directional Statistics, 2000, section 6.3.1; for an unknown
period Leahy, Elsner and Weisskopf, Astrophysical Journal 272, 1983). There is none if readings are new without an update.
"""

from dataclasses import dataclass, replace

import numpy as np

FEWEST = 24
"""Updates from which on a clock can be told."""
FASTEST = 32
"""Updates in a row, of which the fastest bound the period."""
OVERSAMPLED = 8
"""Periods that are tried for each one that the readings tell apart."""
SLOWEST = 1.02
"""Least period, in times between readings, that repeated values can show."""
CONTRADICTED = 0.35
"""Share of what chance would give, of readings that are new without an update, from which on there is no regular clock."""
EARLIEST, UNEVEN = 0.02, 0.02
"""Share of the updates that may seem to be seen before they came; by which the fastest updates may be faster than all."""


@dataclass(frozen=True)
class SensorClock:
    """Updates at `phase` + k * `period`, in ns."""

    period: float
    phase: float

    def last_before(self, ts: np.ndarray) -> np.ndarray:
        """The number of the last update at or before each moment."""
        return np.floor((ts - self.phase) / self.period).astype(np.int64)

    def nearest(self, ts: np.ndarray) -> np.ndarray:
        """The number of the update nearest to each moment."""
        return np.round((ts - self.phase) / self.period).astype(np.int64)

    def moments(self, number: np.ndarray) -> np.ndarray:
        """When these updates were, ns."""
        return np.round(self.phase + number * self.period).astype(np.int64)


def bounded_period(begin: np.ndarray, end: np.ndarray, new: np.ndarray) -> tuple[float, float]:
    """(least, most) that the period can be, by the fastest updates in a row; (0, inf) if there are too few."""
    changes = np.flatnonzero(new)
    in_row = min(FASTEST, len(changes) // 2)
    if in_row < 2:
        return 0.0, np.inf
    most = float((end[changes[in_row - 1 :]] - begin[changes[: len(changes) - in_row + 1]]).min()) / (in_row - 1)
    return most - 2 * float(np.median(end - begin)) / (in_row - 1), (1 + UNEVEN) * most


def sensor_clock(begin: np.ndarray, end: np.ndarray, new: np.ndarray) -> SensorClock | None:
    """The clock of a sensor whose readings at `end` were `new` since those at `begin`, without gaps; None: no regular one."""
    wait = float(np.median(end - begin)) if len(end) else 0.0
    least, most = bounded_period(begin, end, new)
    least = max(least, SLOWEST * wait)
    if new.sum() < FEWEST or new.all() or most <= least:
        return None
    origin, middle, is_rare = float(begin[0]), (begin + end) / 2, new.mean() < 0.5
    periods = np.arange(least, most, least**2 / (OVERSAMPLED * (end[-1] - begin[0])))
    events = middle[new == is_rare] - origin
    sums = np.exp(2j * np.pi * events / periods[:, None]).sum(axis=1)
    best = int(np.argmax(np.abs(sums)))
    turn = float(np.angle(sums[best])) / (2 * np.pi) + (0 if is_rare else 0.5)
    clock = SensorClock(float(periods[best]), origin + turn * float(periods[best]))
    still = clock.last_before(end) == clock.last_before(begin)
    if (new & still).mean() > CONTRADICTED * new.mean() * still.mean():
        return None
    seen = end[new] - clock.moments(clock.nearest(middle[new]))  # how long after an update
    return replace(clock, phase=clock.phase + max(float(np.quantile(seen, EARLIEST)), 0.0))
