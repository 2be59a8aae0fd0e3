"""The three joins that every table is made of: begin with end, event with the latest before it, point with its span.

All functions take parallel arrays and answer with row numbers; -1 says "none". The loops of `pair`, `latest` and `numbered` are
C, and want rows in order of time, which they almost always are; others are put in order first.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.loops import loops

NONE = -1


@dataclass(frozen=True)
class Marks:
    """Begins or ends: the thread each stands on, its time, its place in the file and whose begin or end it is."""

    key: np.ndarray  # thread
    ts: np.ndarray  # ns
    position: np.ndarray  # slot in the file: the thread's program order among equal times
    identity: np.ndarray  # what begins or ends
    identified: np.ndarray  # bool: `identity` is known


@dataclass(frozen=True)
class Pairs:
    """`end[i]` is the end of begin i, or -1; `unpaired` are the ends that no begin was recorded for."""

    end: np.ndarray
    unpaired: np.ndarray


NARROW = 1 << 16
"""Values that lie closer together are counted, not sorted (see `distinct`)."""
SMALL = 1024
"""This many counters cost nothing, however few rows there are."""


def flat(column: np.ndarray) -> np.ndarray:
    """The column as the C code reads it: contiguous 64-bit integers; other values by their numbers."""
    if column.dtype.kind not in "iub":
        column = pd.factorize(column)[0]
    return np.ascontiguousarray(column.view(np.int64) if column.dtype == np.uint64 else column, np.int64)


def numbered(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(one number per distinct combination of the columns' values, from 0 in order of appearance; first row of each number)."""
    values, n = [flat(column) for column in columns], len(columns[0])
    code, first = np.empty(n, np.int64), np.empty(n, np.int64)
    if n == 0:
        return code, first
    low, width = zip(*map(extent, values), strict=True)
    possible = math.prod(width)
    if possible > 4 * n + SMALL:  # too many to count each
        return numbered(_hashed(values))
    places = (ctypes.c_void_p * len(values))(*(column.ctypes.data for column in values))
    extents = np.array([low, width], np.int64)
    count = loops.distinct(len(values), n, places, *extents, np.zeros(possible, np.int64), first, code)
    return code, first[:count]


def extent(column: np.ndarray) -> tuple[int, int]:
    """(the least value of a column of 64-bit integers, how many there are from it to the greatest); not of an empty one."""
    edges = np.empty(2, np.int64)
    loops.extent(len(column), column, edges)
    low, high = edges.tolist()
    return low, high - low + 1


def _hashed(columns: list[np.ndarray]) -> np.ndarray:
    """The same numbers, by hashing."""
    code = pd.factorize(columns[0])[0]
    for column in columns[1:]:
        more = pd.factorize(column)[0]
        code = pd.factorize(code * (int(more.max()) + 1) + more)[0]
    return code


def codes(*columns: np.ndarray) -> np.ndarray:
    """One number per distinct combination of the columns' values, counted from 0 in order of first appearance."""
    return numbered(*columns)[0]


def shared_codes(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`codes` of two sets of rows, each given by its columns: equal where all columns are, within and across the sets."""
    code = codes(*map(np.concatenate, zip(one, other, strict=True)))
    return code[: len(one[0])], code[len(one[0]) :]


def in_time(ts: np.ndarray) -> bool:
    """Whether times are in order."""
    return bool(np.all(ts[1:] >= ts[:-1]))


def distinct(column: np.ndarray) -> np.ndarray:
    """The sorted distinct values of a column of integers; without hashing where they lie close together."""
    if len(column) == 0:
        return column
    low, high = int(column.min()), int(column.max())
    if high - low >= NARROW:
        return np.unique(column)
    return np.flatnonzero(np.bincount(column - low)).astype(column.dtype) + column.dtype.type(low)


def first_rows(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sorted distinct values of a column of integers, the first row of each)."""
    first = numbered(column)[1]
    first = first[np.argsort(column[first])]
    return column[first], first


def first_of_runs(sorted_values: np.ndarray) -> np.ndarray:
    """Row numbers at which a new value starts."""
    if len(sorted_values) == 0:
        return np.empty(0, np.int64)
    return np.concatenate(([0], np.flatnonzero(sorted_values[1:] != sorted_values[:-1]) + 1))


def run_lengths(starts: np.ndarray, total: int) -> np.ndarray:
    """Lengths of the runs that begin at `starts`."""
    return np.diff(np.append(starts, total))


def stack_depth(group: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(depth after each event, which ends close nothing) of +1/-1 events sorted by group; such ends leave the depth at 0."""
    total = np.cumsum(step)
    starts = first_of_runs(group)
    lengths = run_lengths(starts, len(group))
    depth = total - np.repeat(total[starts] - step[starts], lengths)
    drop = np.repeat(np.arange(len(starts)), lengths) * (2 * len(group) + 2)
    lowest = np.minimum(np.minimum.accumulate(depth - drop) + drop, 0)
    before = np.concatenate(([0], lowest[:-1]))
    before[starts] = 0
    return depth - lowest, (step < 0) & (lowest < before)


def _matched(begin: Marks, end: Marks, group: np.ndarray, b: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stack-match begin rows `b` with end rows `e` within groups (of begins, then ends); rows of begins and their ends."""
    begin_group, end_group = group[: len(begin.ts)][b], group[len(begin.ts) :][e]
    opened, closed = (begin_group, begin.ts[b], begin.position[b]), (end_group, end.ts[e], end.position[e])
    answer, before, unopened = np.empty(len(b), np.int64), np.empty(len(b), np.int64), _none_of(group)
    if not loops.pairs(len(b), *map(flat, opened), len(e), *map(flat, closed), unopened, before, answer):
        first, second = (np.lexsort(columns[:0:-1]) for columns in (opened, closed))
        return _matched(begin, end, group, b[first], e[second])
    matched = np.flatnonzero(answer >= 0)
    return b[matched], e[answer[matched]]


def pair(begin: Marks, end: Marks) -> Pairs:
    """Pair begins with ends, a stack per thread.

    A pair whose identities disagree is a record lost between them: both are offered again, matched by identity alone.
    """
    answer = np.full(len(begin.ts), NONE, np.int64)
    taken = np.zeros(len(end.ts), bool)
    thread = codes(np.concatenate((begin.key, end.key)))
    b, e = _matched(begin, end, thread, np.arange(len(begin.ts)), np.arange(len(end.ts)))
    agree = ~begin.identified[b] | ~end.identified[e] | (begin.identity[b] == end.identity[e])
    answer[b[agree]], taken[e[agree]] = e[agree], True
    if not agree.all():
        left, right = np.flatnonzero((answer < 0) & begin.identified), np.flatnonzero(~taken & end.identified)
        group = codes(thread, np.concatenate((begin.identity, end.identity)))
        b, e = _matched(begin, end, group, left, right)
        answer[b], taken[e] = e, True
    return Pairs(answer, np.flatnonzero(~taken))


def latest(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row the right row of its group with the greatest time <= its own; among equal times the last."""
    return _met(loops.latest, (right_group, right_ts), (left_group, left_ts))


def following(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row the right row of its group with the smallest time > its own; among equal times the first."""
    return _met(loops.following, (right_group, right_ts), (left_group, left_ts))


def latest_or_following(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row the answer of `latest` or, where that has none, of `following`: facts may be recorded late."""
    row = latest(right_group, right_ts, left_group, left_ts)
    late = np.flatnonzero(row < 0)
    row[late] = following(right_group, right_ts, left_group[late], left_ts[late])
    return row


def _met(loop: Callable[..., int], right: tuple[np.ndarray, ...], left: tuple[np.ndarray, ...]) -> np.ndarray:
    """The right row (group, time) that each left row meets by a loop in order of time."""
    n, answer = len(right[0]), np.full(len(left[0]), NONE, np.int64)
    if n == 0 or len(answer) == 0:
        return answer
    theirs, since, ours, ts = (flat(column) for column in (*right, *left))
    lows, widths = np.array([extent(theirs), extent(ours)], object).T
    low = min(lows)
    width = max(lows + widths) - low
    if width > 4 * (n + len(ours)) + SMALL:  # too many to have a place for each
        group = codes(np.concatenate((theirs, ours)))
        theirs, ours, low, width = group[:n], group[n:], 0, n + len(ours)
    if not loop(n, theirs, since, len(ours), ours, ts, low, np.full(width, NONE, np.int64), answer):
        right_order, left_order = (np.argsort(column, kind="stable") for column in (since, ts))
        row = _met(loop, (theirs[right_order], since[right_order]), (ours[left_order], ts[left_order]))
        answer[left_order] = np.append(right_order, NONE)[row]
    return answer


def _none_of(group: np.ndarray) -> np.ndarray:
    """NONE for each of the groups, which are numbered from 0."""
    return np.full(int(group.max(initial=NONE)) + 1, NONE, np.int64)


def lasting(right: tuple[np.ndarray, np.ndarray, np.ndarray], left: tuple[np.ndarray, np.ndarray], answer: np.ndarray) -> None:
    """For each left row (group, time) without an answer (-1) yet: the answer of `latest`, if that row lasts beyond its time.

    `right` are groups, times and until when each row lasts.
    """
    without = answer < 0
    missing = slice(None) if without.all() else np.flatnonzero(without)
    group, ts = (column[missing] for column in left)
    row = latest(right[0], right[1], group, ts)
    answer[missing] = np.where(ts < np.append(right[2], 0)[row], row, NONE)


def shared(owner: np.ndarray, work: np.ndarray, ts: np.ndarray, lasts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The span of each row; one without (-1) takes that of a row of the same work, if it lasts at its time.

    `lasts` are the spans' begins and ends.
    """
    known = np.flatnonzero(owner >= 0)
    known = known[numbered(work[known], owner[known])[1]]
    span, row = owner[known], np.where(owner >= 0, 0, NONE)
    lasting((work[known], lasts[0][span], lasts[1][span]), (work, ts), row)
    return np.where(owner >= 0, owner, np.append(span, NONE)[row])


def in_groups(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """Row numbers group by group, each in order of time; among equal times as they lie."""
    return np.lexsort((ts, group))


def successors(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """The next row of each row's group in order of time; -1 where none follows."""
    order = np.arange(len(ts)) if in_time(ts) else np.argsort(ts, kind="stable")
    answer, place = np.empty(len(ts), np.int64), np.arange(len(ts))
    answer[order] = np.append(order, NONE)[following(group[order], place, group[order], place)]
    return answer


def running_count(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... within each group, in order of time."""
    order = in_groups(group, ts)
    starts = first_of_runs(group[order])
    answer = np.empty(len(ts), np.int64)
    answer[order] = np.arange(len(ts)) - np.repeat(starts, run_lengths(starts, len(ts)))
    return answer


@dataclass(frozen=True)
class Segments:
    """Pieces of time and the span that each belongs to."""

    span: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Nest:
    """Spans of threads, as a stack in time: which span is innermost at any moment. Spans are half open, [begin, end)."""

    def __init__(self, key: np.ndarray, begin: np.ndarray, end: np.ndarray):
        self.key, self.begin, self.end = key, begin, end
        span = np.flatnonzero(end > begin)
        ts = np.concatenate((begin[span], end[span]))
        thread = np.concatenate((key[span], key[span]))
        step = np.repeat([1, -1], len(span))
        partner = np.concatenate((-end[span], -begin[span]))  # ends before begins, outer begins first, inner ends first
        order = np.lexsort((partner, step, ts, thread))
        self.ts, self.thread, self.step = ts[order], thread[order], step[order]
        self.span = np.concatenate((span, span))[order]
        self.top = self._tops()

    def _tops(self) -> np.ndarray:
        """The innermost span after each event."""
        top = np.full(len(self.ts), NONE, np.int64)
        if len(self.ts) == 0:
            return top
        depth, _ = stack_depth(self.thread, self.step)
        rows = np.arange(len(self.ts))
        for level in range(1, int(depth.max()) + 1):
            opened = np.maximum.accumulate(np.where((self.step > 0) & (depth == level), rows, NONE))
            inside = depth == level
            top[inside] = self.span[opened[inside]]
        return top

    def innermost(self, key: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """The innermost span of `key` that contains `ts`."""
        event = np.full(len(ts), NONE, np.int64)
        until = np.where(self.top >= 0, np.append(self.end, 0)[self.top], 0)
        lasting((self.thread, self.ts, until), (key, ts), event)
        return np.append(self.top, NONE)[event]

    def segments(self) -> "Segments":
        """Each thread's time cut into pieces by its innermost span; time without a span is omitted."""
        if len(self.ts) == 0:
            return Segments(self.top, self.ts, self.ts)
        same = np.append(self.thread[1:] == self.thread[:-1], False)
        end = np.where(same, np.append(self.ts[1:], 0), self.ts)
        keep = (self.top >= 0) & (end > self.ts)
        return Segments(self.top[keep], self.ts[keep], end[keep])
