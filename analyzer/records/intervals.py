"""Time intervals by key (thread, step): union, overlap, coverage, and uncovered time."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.spans import EVER, NONE, distinct_sorted

AXIS = 1 << 62
"""The longest axis on which the times of several keys are laid one behind the other."""


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [begin, end), each with a key; parallel arrays."""

    key: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, begin: np.ndarray, end: np.ndarray) -> "Intervals":
        """Intervals that all have the key 0."""
        return cls(np.zeros(len(begin), np.int64), begin, end)

    @classmethod
    def of_table(cls, table: pd.DataFrame, key: str = "tid", begin: str = "begin_ns", end: str = "end_ns") -> "Intervals":
        """The rows of a table as intervals, with one of its columns as key."""
        return cls(*(table[name].to_numpy(np.int64) for name in (key, begin, end)))

    @classmethod
    def joined(cls, *parts: "Intervals") -> "Intervals":
        """The intervals of all parts, in the order given."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("key", "begin", "end")))

    def __len__(self) -> int:
        return len(self.key)

    def where(self, keep: np.ndarray) -> "Intervals":
        """The intervals selected by a mask or by row numbers."""
        return Intervals(self.key[keep], self.begin[keep], self.end[keep])

    @property
    def length(self) -> np.ndarray:
        """end - begin."""
        return self.end - self.begin


@dataclass(frozen=True)
class Overlaps:
    """Pairs of overlapping rows, and the time that each pair shares."""

    left: np.ndarray
    right: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @property
    def length(self) -> np.ndarray:
        """end - begin, always > 0."""
        return self.end - self.begin


def keys_of(spans: Intervals) -> np.ndarray:
    """Every key at least once: one for each run of equal keys, since tables usually hold long runs."""
    return spans.key[np.append(True, spans.key[1:] != spans.key[:-1])[: len(spans)]]


def overlaps(left: Intervals, right: Intervals) -> Overlaps:
    """Every pair of intervals of the same key that overlap. The right side's intervals must not overlap within a key."""
    keys = np.intersect1d(keys_of(left), keys_of(right))
    left_rows, right_rows = (np.flatnonzero(np.isin(side.key, keys)) for side in (left, right))
    one, other = left.where(left_rows), right.where(right_rows)
    low = max(int(side.begin.min(initial=EVER)) for side in (one, other))
    high = max(low, min(int(side.end.max(initial=0)) for side in (one, other)))
    line = TimeAxis(keys, low, high)
    if len(keys) > 1 and len(keys) * line.width > AXIS:
        parts = [(rows, overlaps(left.where(rows), right)) for rows in split_by_key(left, keys)]
        columns = zip(*((rows[p.left], p.right, p.begin, p.end) for rows, p in parts), strict=True)
        return Overlaps(*(np.concatenate(column) for column in columns))
    one, other = line.clipped(one), line.clipped(other)
    order = np.argsort(other.begin, kind="stable")
    first = np.searchsorted(other.end[order], one.begin, "right")
    count = np.maximum(np.searchsorted(other.begin[order], one.end, "left") - first, 0)
    offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    left_row, right_row = left_rows[np.repeat(np.arange(len(one)), count)], right_rows[order[np.repeat(first, count) + offset]]
    begin, end = np.maximum(left.begin[left_row], right.begin[right_row]), np.minimum(left.end[left_row], right.end[right_row])
    real = end > begin
    return Overlaps(left_row[real], right_row[real], begin[real], end[real])


def split_by_key(spans: Intervals, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows with one of the first half of the sorted keys, and the others."""
    first = np.isin(spans.key, keys[: len(keys) // 2])
    return np.flatnonzero(first), np.flatnonzero(~first)


def split_intervals(left: Intervals, right: Intervals) -> Overlaps:
    """The left intervals, cut where right ones of their key begin and end; `right` is -1 where there is none.

    The right side's intervals must not overlap within a key.
    """
    met = overlaps(left, right)
    rest = uncovered_parts(Intervals(np.arange(len(left)), left.begin, left.end), Intervals(met.left, met.begin, met.end))
    none = np.full(len(rest), NONE)
    columns = ((met.left, rest.key), (met.right, none), (met.begin, rest.begin), (met.end, rest.end))
    return Overlaps(*map(np.concatenate, columns))


def common_time(left: Intervals, right: Intervals) -> Intervals:
    """The time that both cover. Neither side's intervals may overlap within a key."""
    met = overlaps(left, right)
    return Intervals(left.key[met.left], met.begin, met.end)


def merge_intervals(spans: Intervals) -> Intervals:
    """The union of each key's intervals: sorted by key and time, disjoint and not adjacent, none empty."""
    spans = spans.where(spans.end > spans.begin)
    if len(spans) == 0:
        return spans
    spans = spans.where(np.lexsort((spans.begin, spans.key)))
    number = np.cumsum(np.append(False, spans.key[1:] != spans.key[:-1]))
    low = int(spans.begin.min())
    shift = number * (int(spans.end.max()) - low + 2) - low  # each key's times follow those of the previous key
    reach = np.maximum.accumulate(spans.end + shift)
    starts = np.flatnonzero(np.append(True, (spans.begin + shift)[1:] > reach[:-1]))
    last = np.append(starts[1:], len(spans)) - 1
    return Intervals(spans.key[starts], spans.begin[starts], reach[last] - shift[last])


def uncovered_parts(windows: Intervals, spans: Intervals) -> Intervals:
    """The parts of each window that no interval of its key covers, sorted by key, window and time. All may overlap."""
    order = np.argsort(windows.key, kind="stable")
    keys, opened, closed = windows.key[order], windows.begin[order], windows.end[order]
    place = np.searchsorted(keys, spans.key)
    if np.any(keys[1:] == keys[:-1]):
        parts = split_intervals(windows.where(order), merge_intervals(spans))
        free = parts.right < 0
        return Intervals(keys[parts.left[free]], parts.begin[free], parts.end[free])
    inside = place < len(keys)
    inside[inside] = keys[place[inside]] == spans.key[inside]
    place = place[inside]
    begin, end = (np.clip(side[inside], opened[place], closed[place]) for side in (spans.begin, spans.end))
    every = np.arange(len(keys))
    place = np.concatenate((every, place, every))
    begin, end = np.concatenate((opened, begin, closed)), np.concatenate((opened, end, closed))
    rows = np.lexsort((end, begin, place))
    place, begin, end = place[rows], begin[rows], end[rows]
    width = int((closed - opened).max(initial=0)) + 1
    reach = np.maximum.accumulate(place * width + end - opened[place]) - place * width + opened[place]
    gap = np.flatnonzero((place[1:] == place[:-1]) & (begin[1:] > reach[:-1]))
    return Intervals(keys[place[gap]], reach[gap], begin[gap + 1])


def covered_ns(spans: Intervals, windows: Intervals) -> np.ndarray:
    """The length of each window's overlap with the intervals of its key, summed over the intervals. All may overlap."""
    answer = np.zeros(len(windows), np.int64)
    for key in np.intersect1d(spans.key, windows.key):
        of_windows, of_spans = windows.key == key, spans.key == key
        begin, end = windows.begin[of_windows], windows.end[of_windows]
        opened, closed = np.sort(spans.begin[of_spans], kind="stable"), np.sort(spans.end[of_spans], kind="stable")
        answer[of_windows] = ns_since(opened, end) - ns_since(closed, end) - ns_since(opened, begin) + ns_since(closed, begin)
    return answer


def ns_since(moments: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """For each ts, the sum of (ts - moment) over the sorted `moments` before it."""
    if len(moments) == 0:
        return np.zeros(len(ts), np.int64)
    row, first = np.searchsorted(moments, ts), int(moments[0])
    return row * (ts - first) - np.append(0, np.cumsum(moments - first))[row]


def by_precedence(windows: Intervals, candidates: Iterable[tuple[str, Intervals]], rest: str) -> tuple[Intervals, pd.Categorical]:
    """(pieces, cause of each piece): the windows split by the first candidate that covers each moment, `rest` where none does.

    Pieces are sorted by key and time; neighbours have different causes. At most 62 candidates. All intervals may overlap.
    """
    names, spans = zip(*candidates, ("", windows), strict=True)
    causes = list(dict.fromkeys((*names[:-1], rest)))
    line = TimeAxis.of(windows)
    ts, covering = _covering_layers([line.place(part) for part in spans])
    first = np.bitwise_count((covering & -covering) - 1)  # the lowest bit that is set
    code = np.array([*(causes.index(name) for name in names[:-1]), causes.index(rest)])[np.minimum(first, len(names) - 1)]
    code[covering < 1 << len(names) - 1] = -1
    changes = np.flatnonzero(np.append(True, code[1:] != code[:-1])[: len(code)])
    code, ts = code[changes], ts[changes]
    inside = np.flatnonzero(code >= 0)
    return line.intervals(ts[inside], ts[inside + 1]), pd.Categorical.from_codes(code[inside], causes)


def foremost_pieces(spans: Intervals, rank: np.ndarray) -> tuple[Intervals, np.ndarray]:
    """(pieces, row of each): the union of the spans, split so that each moment of a key belongs to the span of the least rank.

    Pieces are sorted by key and time and do not overlap. All spans may overlap; among equal ranks the first row counts.
    """
    rows = np.flatnonzero(spans.end > spans.begin)
    if len(rows) == 0:
        return spans.where(rows), rows
    spans, line = spans.where(rows), TimeAxis.of(spans)
    placed = line.clipped(spans)
    cuts = np.sort(np.concatenate((placed.begin, placed.end)))
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])]
    first, last = (np.searchsorted(cuts, side) for side in (placed.begin, placed.end))
    span = np.repeat(np.arange(len(spans)), last - first)
    cell = np.arange(len(span)) - np.repeat(np.cumsum(last - first) - last, last - first)
    order = np.lexsort((rank[rows][span], cell))
    order = order[np.flatnonzero(np.append(True, cell[order][1:] != cell[order][:-1])[: len(order)])]
    return line.intervals(cuts[cell[order]], cuts[cell[order] + 1]), rows[span[order]]


@dataclass(frozen=True)
class TimeAxis:
    """The times of several keys on one axis: each key's times follow those of the previous key, with a gap between."""

    keys: np.ndarray
    low: int
    high: int

    @classmethod
    def of(cls, spans: Intervals) -> "TimeAxis":
        """The axis that covers these intervals."""
        return cls(distinct_sorted(spans.key), int(spans.begin.min(initial=EVER)), int(spans.end.max(initial=0)))

    @property
    def width(self) -> int:
        """The distance from one key's origin to the next key's."""
        return self.high - self.low + 1

    def place(self, spans: Intervals) -> Intervals:
        """The union of the intervals on the axis, clipped to it; keys that it does not have are omitted."""
        return merge_intervals(self.clipped(spans.where(np.isin(spans.key, self.keys))))

    def clipped(self, spans: Intervals) -> Intervals:
        """Intervals of the axis' keys as positions on it, each clipped to it."""
        begin, end = (np.clip(side, self.low, self.high) - self.low for side in (spans.begin, spans.end))
        shift = np.searchsorted(self.keys, spans.key) * self.width
        return Intervals.of(begin + shift, end + shift)

    def intervals(self, begin: np.ndarray, end: np.ndarray) -> Intervals:
        """Positions on the axis as intervals of its keys."""
        number = begin // self.width
        shift = self.low - number * self.width
        return Intervals(self.keys[number], begin + shift, end + shift)


def _covering_layers(layers: list[Intervals]) -> tuple[np.ndarray, np.ndarray]:
    """(times, bit mask of the layers that cover the time after each); the intervals of one layer do not overlap."""
    bits = np.repeat(1 << np.arange(len(layers)), [len(layer) for layer in layers])
    ts = np.concatenate([layer.begin for layer in layers] + [layer.end for layer in layers])
    order = np.argsort(ts, kind="stable")  # merges the layers' sorted times
    ts, covering = ts[order], np.cumsum(np.concatenate((bits, -bits))[order])
    last = np.append(ts[1:] != ts[:-1], True)[: len(ts)]
    return ts[last], covering[last]
