"""Intervals of time that belong to keys (threads, tokens): merged, met, covered, and what they leave uncovered."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [begin, end), each of one key; parallel arrays."""

    key: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, begin: np.ndarray, end: np.ndarray) -> "Intervals":
        """Intervals that all have the key 0."""
        return cls(np.zeros(len(begin), np.int64), begin, end)

    @classmethod
    def joined(cls, *parts: "Intervals") -> "Intervals":
        """The intervals of all parts, in the order given."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("key", "begin", "end")))

    def __len__(self) -> int:
        return len(self.key)

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


def common(left: Intervals, right: Intervals) -> Intervals:
    """The time that both cover. Neither side's intervals may overlap within a key."""
    met = overlaps(left, right)
    return Intervals(left.key[met.left], met.begin, met.end)


def merged(spans: Intervals) -> Intervals:
    """The time that each key's intervals cover: sorted by key and time, apart from each other, none empty."""
    spans = spans.where(spans.end > spans.begin)
    if len(spans) == 0:
        return spans
    spans = spans.where(np.lexsort((spans.begin, spans.key)))
    number = np.cumsum(np.append(False, spans.key[1:] != spans.key[:-1]))
    low = int(spans.begin.min())
    shift = number * (int(spans.end.max()) - low + 2) - low  # each key's times behind those of the key before
    reach = np.maximum.accumulate(spans.end + shift)
    starts = np.flatnonzero(np.append(True, (spans.begin + shift)[1:] > reach[:-1]))
    last = np.append(starts[1:], len(spans)) - 1
    return Intervals(spans.key[starts], spans.begin[starts], reach[last] - shift[last])


def uncovered(windows: Intervals, spans: Intervals) -> Intervals:
    """What the intervals of its key leave of each window, by key, window and time. All may overlap."""
    order = np.argsort(windows.key, kind="stable")
    keys, opened, closed = windows.key[order], windows.begin[order], windows.end[order]
    place = np.searchsorted(keys, spans.key)
    if np.any(keys[1:] == keys[:-1]):
        met = overlaps(windows.where(order), merged(spans))
        rest = uncovered(Intervals(np.arange(len(keys)), opened, closed), Intervals(met.left, met.begin, met.end))
        return Intervals(keys[rest.key], rest.begin, rest.end)
    known = place < len(keys)
    known[known] = keys[place[known]] == spans.key[known]
    place = place[known]
    begin, end = (np.clip(side[known], opened[place], closed[place]) for side in (spans.begin, spans.end))
    every = np.arange(len(keys))
    place = np.concatenate((every, place, every))
    begin, end = np.concatenate((opened, begin, closed)), np.concatenate((opened, end, closed))
    rows = np.lexsort((end, begin, place))
    place, begin, end = place[rows], begin[rows], end[rows]
    width = int((closed - opened).max(initial=0)) + 1
    reach = np.maximum.accumulate(place * width + end - opened[place]) - place * width + opened[place]
    gap = np.flatnonzero((place[1:] == place[:-1]) & (begin[1:] > reach[:-1]))
    return Intervals(keys[place[gap]], reach[gap], begin[gap + 1])


def covered(spans: Intervals, windows: Intervals) -> np.ndarray:
    """How much of each window the intervals of its key cover, summed over the intervals. All may overlap."""
    answer = np.zeros(len(windows), np.int64)
    for key in np.intersect1d(spans.key, windows.key):
        mine, theirs = windows.key == key, spans.key == key
        begin, end = windows.begin[mine], windows.end[mine]
        opened, closed = np.sort(spans.begin[theirs], kind="stable"), np.sort(spans.end[theirs], kind="stable")
        answer[mine] = passed(opened, end) - passed(closed, end) - passed(opened, begin) + passed(closed, begin)
    return answer


def passed(moments: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Time that has passed since each of the moments (sorted) before ts, summed."""
    if len(moments) == 0:
        return np.zeros(len(ts), np.int64)
    row, first = np.searchsorted(moments, ts), int(moments[0])
    return row * (ts - first) - np.append(0, np.cumsum(moments - first))[row]
