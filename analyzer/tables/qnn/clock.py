"""Maps the NPU's clock to the host's: rate and offset from two snapshots, so that drift is included."""

from dataclasses import dataclass

import numpy as np

LEAST_SNAPSHOTS = 2


@dataclass(frozen=True)
class DeviceClock:
    """host ns = anchor_ns + (ticks - anchor) * ns_per_tick."""

    ns_per_tick: float
    anchor: int
    anchor_ns: float

    def to_host(self, ticks: np.ndarray) -> np.ndarray:
        """Host nanoseconds of the device's time stamps."""
        return (self.anchor_ns + (ticks.astype(np.int64) - self.anchor) * self.ns_per_tick).astype(np.int64)


def narrowest_window(begin: np.ndarray, end: np.ndarray, rows: np.ndarray) -> int:
    """The row with the shortest window around its time stamp."""
    return int(rows[np.argmin((end - begin)[rows])])


def align_clock(ticks: np.ndarray, begin: np.ndarray, end: np.ndarray) -> DeviceClock | None:
    """A clock from time stamps, each taken within a known window of host ns; None for fewer than two.

    The two snapshots are the shortest windows of the first and the last third; each has an error of half its window.
    """
    order = np.argsort(ticks, kind="stable")
    third = -(-len(order) // 3)
    if len(order) < LEAST_SNAPSHOTS or ticks[order[0]] == ticks[order[-1]]:
        return None
    first, last = narrowest_window(begin, end, order[:third]), narrowest_window(begin, end, order[-third:])
    if ticks[first] == ticks[last]:
        return None
    middle = (begin + end) / 2
    rate = float((middle[last] - middle[first]) / (float(ticks[last]) - float(ticks[first])))
    return DeviceClock(rate, int(ticks[first]), float(middle[first])) if rate > 0 else None
