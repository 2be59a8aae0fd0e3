"""Sets of time as sorted, disjoint [begin, end) rows: union, intersection, difference, length."""

import numpy as np

TimeSet = np.ndarray
"""int64 [n, 2], sorted, without overlap."""


def union(begin: np.ndarray, end: np.ndarray) -> TimeSet:
    """The time that any of the given intervals covers."""
    keep = end > begin
    begin, end = begin[keep], end[keep]
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order]) if len(order) else end
    starts = np.flatnonzero(np.append(True, begin[1:] > reach[:-1])[: len(begin)])
    ends = np.append(starts[1:], len(begin)) - 1
    return np.column_stack((begin[starts], reach[ends[: len(starts)]])).astype(np.int64)


def intersect(a: TimeSet, b: TimeSet) -> TimeSet:
    """The time that both cover."""
    edges = np.concatenate((a[:, 0], b[:, 0], a[:, 1], b[:, 1]))
    step = np.repeat((1, 1, -1, -1), (len(a), len(b), len(a), len(b)))
    order = np.lexsort((step, edges))
    depth, edges = np.cumsum(step[order]), edges[order]
    both = np.flatnonzero(depth[:-1] == 2)
    return union(edges[both], edges[both + 1])


def gaps(a: TimeSet, begin: int, end: int) -> TimeSet:
    """The time of [begin, end) that `a` does not cover."""
    edges = np.clip(np.concatenate(([begin], a.ravel(), [end])), begin, end)
    return union(edges[0::2], edges[1::2])


def subtract(a: TimeSet, b: TimeSet) -> TimeSet:
    """The time that `a` covers and `b` does not."""
    return intersect(a, gaps(b, int(a[0, 0]), int(a[-1, 1]))) if len(a) else a


def length(a: TimeSet) -> int:
    """Total time covered."""
    return int((a[:, 1] - a[:, 0]).sum())


def covered(a: TimeSet, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How much of each [begin, end) the intervals cover."""
    return _until(a, end) - _until(a, begin) if len(a) else np.zeros(len(begin), np.int64)


def covered_by_each(opened: np.ndarray, closed: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The same for intervals from `opened` to `closed` in any order, which may overlap: summed over the intervals."""
    opened, closed = np.sort(opened, kind="stable"), np.sort(closed, kind="stable")
    return _since(opened, end) - _since(closed, end) - _since(opened, begin) + _since(closed, begin)


def _since(moments: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Time that has passed since each of the moments (sorted) before ts, summed."""
    if len(moments) == 0:
        return np.zeros(len(ts), np.int64)
    at, first = np.searchsorted(moments, ts), int(moments[0])
    return at * (ts - first) - np.append(0, np.cumsum(moments - first))[at]


def _until(a: TimeSet, ts: np.ndarray) -> np.ndarray:
    """Time covered before each moment."""
    row = np.searchsorted(a[:, 0], ts, "right") - 1
    before = np.append(0, np.cumsum(a[:, 1] - a[:, 0]))
    return np.where(row >= 0, before[row] + np.minimum(ts, a[row, 1]) - a[row, 0], 0)
