"""Intervals of time that belong to keys (threads, tokens): which of them meet, and what they leave uncovered."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [begin, end), each of one key; parallel arrays."""

    key: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def where(self, keep: np.ndarray) -> "Intervals":
        """Some of the intervals."""
        return Intervals(self.key[keep], self.begin[keep], self.end[keep])

    @property
    def length(self) -> np.ndarray:
        """end - begin."""
        return self.end - self.begin


@dataclass(frozen=True)
class Overlaps:
    """Pairs of rows that meet, and the piece of time they share."""

    left: np.ndarray
    right: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def length(self) -> np.ndarray:
        """end - begin, always > 0."""
        return self.end - self.begin


def overlaps(left: Intervals, right: Intervals) -> Overlaps:
    """Every pair of the same key that shares time. The right side's intervals must not overlap within a key."""
    rows, others = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for key in np.intersect1d(left.key, right.key):
        mine, theirs = np.flatnonzero(left.key == key), np.flatnonzero(right.key == key)
        theirs = theirs[np.argsort(right.begin[theirs], kind="stable")]
        low = np.searchsorted(right.end[theirs], left.begin[mine], "right")
        count = np.maximum(np.searchsorted(right.begin[theirs], left.end[mine], "left") - low, 0)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        rows.append(np.repeat(mine, count))
        others.append(theirs[np.repeat(low, count) + offset])
    a, b = np.concatenate(rows), np.concatenate(others)
    begin, end = np.maximum(left.begin[a], right.begin[b]), np.minimum(left.end[a], right.end[b])
    real = end > begin
    return Overlaps(a[real], b[real], begin[real], end[real])


def uncovered(windows: Intervals, spans: Intervals) -> Intervals:
    """What `spans` leave of the windows, in order of window and time. A window's key is its own; spans may overlap."""
    order = np.argsort(windows.key, kind="stable")
    keys = windows.key[order]
    opened, closed = windows.begin[order], windows.end[order]
    at = np.searchsorted(keys, spans.key)
    known = at < len(keys)
    known[known] = keys[at[known]] == spans.key[known]
    at = at[known]
    begin, end = (np.clip(side[known], opened[at], closed[at]) for side in (spans.begin, spans.end))
    every = np.arange(len(keys))
    place = np.concatenate((every, at, every))
    begin, end = np.concatenate((opened, begin, closed)), np.concatenate((opened, end, closed))
    rows = np.lexsort((end, begin, place))
    place, begin, end = place[rows], begin[rows], end[rows]
    width = int((closed - opened).max(initial=0)) + 1
    reach = np.maximum.accumulate(place * width + end - opened[place]) - place * width + opened[place]
    gap = np.flatnonzero((place[1:] == place[:-1]) & (begin[1:] > reach[:-1]))
    return Intervals(keys[place[gap]], reach[gap], begin[gap + 1])
