"""A power rail's readings as its known energy between the sensor's own updates."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analyzer.questions.energy_running import NS
from analyzer.questions.sensor_clock import SensorClock, bounded_period, sensor_clock

MOST_ROWS = 1000
"""Readings that are fitted; of more, neighbours are summed."""
MOST_UPDATES, SEEN = 512, 0.9
"""Of a stretch over which a sensor's clock is taken to run evenly; share of all whose stretch must show one."""
FRESH_SHARE = 1.5
SURE = 5.0
"""Times between readings that a sensor shows a value, from which on its updates need no clock to be known well enough."""
REPEATED = 0.01
"""Share of readings that repeat a value, from which on the sensor may be slower than they are."""
COARSE, LONG_NS = 10, 100_000_000
"""Readings as one, whose ends are uncertain by the time between two; what is long enough if none repeats a value."""
OWN_CLOCK, EACH_CHANGE, SUMMED, AS_READ = "its own clock", "changes", "several readings as one", "readings"
"""What a rail's energy is joined by."""


@dataclass(frozen=True)
class RailReadings:
    """A rail's known energy between its own updates."""

    begin: np.ndarray
    end: np.ndarray
    joules: np.ndarray
    of_counter: bool
    joined_by: str = AS_READ

    @property
    def watts(self) -> np.ndarray:
        """The mean power of each."""
        return self.joules / ((self.end - self.begin) * NS)

    @property
    def period_s(self) -> float:
        """The usual time between updates."""
        return float(np.median(self.end - self.begin)) * NS


@dataclass(frozen=True)
class ReadRows:
    """The known rows of `power` of one rail; `new`: whether each shows another value than the one before."""

    begin: np.ndarray
    end: np.ndarray
    joules: np.ndarray
    watts: np.ndarray
    new: np.ndarray

    @classmethod
    def of(cls, power: pd.DataFrame, of_counter: bool) -> "ReadRows":
        """The rows in time order."""
        rows = power[power["joules"].notna()]
        begin, end, joules, watts = (rows[name].to_numpy() for name in ("begin_ns", "end_ns", "joules", "watts"))
        changed = np.append(True, ~np.isclose(watts[1:], watts[:-1], rtol=1e-9, atol=0))[: len(rows)]
        return cls(begin, end, joules, watts, joules != 0 if of_counter else changed)

    def part(self, chosen: slice) -> "ReadRows":
        """Some of them."""
        return ReadRows(*(each[chosen] for each in (self.begin, self.end, self.joules, self.watts, self.new)))


def rail_readings(power: pd.DataFrame, of_counter: bool) -> RailReadings:
    """The readings of one rail's rows of `power`; repeated values are one, since a sensor shows its last until it has another.

    When it had another is known to the time between two readings, unless it has a clock of its own. Where that is not short
    against its own period, several readings are one, lest the energy of one moment is taken for that of another.
    """
    rows = ReadRows.of(power, of_counter)
    if len(rows.end) < 2:
        return RailReadings(rows.begin, rows.end, rows.joules, of_counter)
    return clocked_readings(rows, of_counter) or changed_readings(rows, of_counter)


def clocked_readings(rows: ReadRows, of_counter: bool) -> RailReadings | None:
    """The readings between updates of the sensor's own clock; None if it has no regular one that they show."""
    parts, updates = [], 0
    for chosen in stretches(rows):
        some = rows.part(chosen)
        if clock := sensor_clock(some.begin, some.end, some.new):
            parts.append(between_updates(some, clock, of_counter))
            updates += int(some.new.sum())
    if not parts or updates < SEEN * rows.new.sum():
        return None
    begin, end, joules = (np.concatenate([part[i] for part in parts]) for i in range(3))
    begin[1:] = np.maximum(begin[1:], end[:-1])  # of two stretches that share an update
    return RailReadings(begin, end, joules, of_counter, OWN_CLOCK)


def stretches(rows: ReadRows) -> Iterator[slice]:
    """Rows without a gap, of at most about MOST_UPDATES updates; the last update of each is the first of the next."""
    starts = np.flatnonzero(np.append(True, rows.begin[1:] != rows.end[:-1]))
    for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(rows.end)], strict=True):
        changes = first + np.flatnonzero(rows.new[first:stop])
        pieces = -(-len(changes) // MOST_UPDATES)
        inner = changes[np.arange(1, pieces) * len(changes) // pieces].tolist() if pieces else []
        for low, high in zip([first, *inner], [*inner, stop - 1], strict=True):
            yield slice(low, high + 1)


def between_updates(rows: ReadRows, clock: SensorClock, of_counter: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, end, joules) between updates that showed a new value; those that did not had the one before."""
    at = np.flatnonzero(rows.new)
    number = clock.nearest((rows.begin[at] + rows.end[at]) / 2)
    later = np.append(True, np.diff(np.maximum.accumulate(number)) > 0)
    at, number = at[later], number[later]
    updates, moments, total, watts = np.diff(number), clock.moments(number), np.cumsum(rows.joules), rows.watts[at]
    of_power = ((updates - 1) * watts[:-1] + watts[1:]) * clock.period * NS
    return moments[:-1], moments[1:], np.diff(total[at]) if of_counter else of_power


def changed_readings(rows: ReadRows, of_counter: bool) -> RailReadings:
    """The readings between changes of the value, or between updates that left it if those are about as regular."""
    own = np.quantile(np.diff(rows.end[rows.new]), 0.25) if rows.new.sum() > 2 else 0
    last, fresh = -np.inf, []
    for at, is_new in zip(rows.end.tolist(), rows.new.tolist(), strict=True):
        is_new = is_new or (not of_counter and at - last > FRESH_SHARE * own)
        last = at if is_new else last
        fresh.append(is_new)
    grouped = grouped_readings(rows, np.array(fresh), of_counter)
    wait, (period, _) = float(np.median(rows.end - rows.begin)), bounded_period(rows.begin, rows.end, rows.new)
    if period > SURE * wait:
        return replace(grouped, joined_by=EACH_CHANGE)
    if (of_counter and rows.new.mean() > 1 - REPEATED) or not len(grouped.end):
        return grouped
    longest = LONG_NS if rows.new.mean() > 1 - REPEATED else np.inf
    each = int(-(-min(COARSE * wait, longest) // float(np.median(grouped.end - grouped.begin))))
    return replace(summed(grouped, each), joined_by=SUMMED) if each > 1 else grouped


def grouped_readings(rows: ReadRows, fresh: np.ndarray, of_counter: bool) -> RailReadings:
    """Rows up to each fresh one as one: a counter's are summed, a power's value is that of all the time since the last."""
    begin, end = rows.begin, rows.end
    broken = np.append(True, begin[1:] != end[:-1])
    first = np.flatnonzero(broken | np.append(True, fresh[:-1])[: len(fresh)])
    first = first if len(first) and first[0] == 0 else np.append(0, first)
    last = np.append(first[1:], len(begin)) - 1
    total = np.add.reduceat(rows.joules, first) if of_counter else rows.watts[last] * (end[last] - begin[first]) * NS
    whole = fresh[last]
    return RailReadings(begin[first][whole], end[last][whole], total[whole], of_counter)


def thinned(readings: RailReadings, most: int = MOST_ROWS) -> RailReadings:
    """At most about `most` readings, neighbours summed."""
    return summed(readings, -(-len(readings.end) // most))


def summed(readings: RailReadings, each: int) -> RailReadings:
    """As many neighbours as one, but over no gap."""
    if each < 2:
        return readings
    broken = np.append(True, readings.begin[1:] != readings.end[:-1])
    run = np.cumsum(broken)
    place = np.arange(len(run)) - np.flatnonzero(broken)[run - 1]
    first = np.flatnonzero(broken | (place % each == 0))
    last = np.append(first[1:], len(run)) - 1
    joules = np.add.reduceat(readings.joules, first)
    return replace(readings, begin=readings.begin[first], end=readings.end[last], joules=joules)
