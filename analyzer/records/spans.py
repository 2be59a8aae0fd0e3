"""The three joins behind every table: begin with end, event with the latest one before it, moment with the enclosing span.

All functions take parallel arrays, return row numbers, -1: none. The loops of `pair_spans`, `latest` and `number_rows` are in C
and require rows in time order, which is the usual case; other rows are sorted first.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.loops import loops

NONE = -1
EVER = np.iinfo(np.int64).max
"""The time that stands for never: later than any."""


@dataclass(frozen=True)
class SpanMarks:
    """Begins or ends: thread, time, position in the file, and identity of what begins or ends."""

    key: np.ndarray  # thread
    ts: np.ndarray  # ns
    position: np.ndarray  # slot in the file: the thread's program order among equal times
    identity: np.ndarray  # what begins or ends
    identified: np.ndarray  # bool: `identity` is known


@dataclass(frozen=True)
class Pairs:
    """`end[i]` is the end of begin i, or -1; `unpaired` are the ends without a recorded begin."""

    end: np.ndarray
    unpaired: np.ndarray


NARROW = 1 << 16
"""Values within a smaller range are counted, not sorted (see `distinct_sorted`)."""
SMALL = 1024
"""This many counters are cheap, regardless of the number of rows."""


def int64_codes(column: np.ndarray) -> np.ndarray:
    """The column as contiguous 64-bit integers for the C code; other values are replaced by codes."""
    if column.dtype.kind not in "iub":
        column = pd.factorize(column)[0]
    return np.ascontiguousarray(column.view(np.int64) if column.dtype == np.uint64 else column, np.int64)


def number_rows(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(one number per distinct combination of the columns' values, from 0 in order of appearance; first row of each number)."""
    values, n = [int64_codes(column) for column in columns], len(columns[0])
    code, first = np.empty(n, np.int64), np.empty(n, np.int64)
    if n == 0:
        return code, first
    low, width = zip(*map(value_range, values), strict=True)
    possible = math.prod(width)
    if possible > 4 * n + SMALL:  # range too wide for a counting table
        return number_rows(_hashed_codes(values))
    places = (ctypes.c_void_p * len(values))(*(column.ctypes.data for column in values))
    extents = np.array([low, width], np.int64)
    count = loops.distinct(len(values), n, places, *extents, np.zeros(possible, np.int64), first, code)
    return code, first[:count]


def value_range(column: np.ndarray) -> tuple[int, int]:
    """(minimum, maximum - minimum + 1) of a column of 64-bit integers, which must not be empty."""
    edges = np.empty(2, np.int64)
    loops.extent(len(column), column, edges)
    low, high = edges.tolist()
    return low, high - low + 1


def _hashed_codes(columns: list[np.ndarray]) -> np.ndarray:
    """`row_codes` computed by hashing, for columns with a wide range of values."""
    code = pd.factorize(columns[0])[0]
    for column in columns[1:]:
        more = pd.factorize(column)[0]
        code = pd.factorize(code * (int(more.max()) + 1) + more)[0]
    return code


def row_codes(*columns: np.ndarray) -> np.ndarray:
    """One number per distinct combination of the columns' values, counted from 0 in order of first appearance."""
    return number_rows(*columns)[0]


def shared_codes(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`row_codes` of two sets of rows, given as columns: rows with equal columns get equal codes, within and across the sets."""
    code = row_codes(*map(np.concatenate, zip(one, other, strict=True)))
    return code[: len(one[0])], code[len(one[0]) :]


def equal_rows(right: Sequence[np.ndarray], left: Sequence[np.ndarray]) -> np.ndarray:
    """For each left row, the last right row with the same values in all columns."""
    theirs, ours = shared_codes(right, left)
    row = np.full(len(theirs) + len(ours), NONE, np.int64)
    row[theirs] = np.arange(len(theirs))
    return row[ours]


def in_time(ts: np.ndarray) -> bool:
    """Whether times are sorted."""
    return bool(np.all(ts[1:] >= ts[:-1]))


def distinct_sorted(column: np.ndarray) -> np.ndarray:
    """The sorted distinct values of an integer column; without hashing if their range is small."""
    if len(column) == 0:
        return column
    low, high = int(column.min()), int(column.max())
    if high - low >= NARROW:
        return np.unique(column)
    return np.flatnonzero(np.bincount(column - low)).astype(column.dtype) + column.dtype.type(low)


def first_rows(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sorted distinct values of an integer column, the first row of each)."""
    first = number_rows(column)[1]
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
    """(depth after each event, mask of ends without a begin) of +1/-1 events sorted by group; such ends leave the depth at 0."""
    total = np.cumsum(step)
    starts = first_of_runs(group)
    lengths = run_lengths(starts, len(group))
    depth = total - np.repeat(total[starts] - step[starts], lengths)
    drop = np.repeat(np.arange(len(starts)), lengths) * (2 * len(group) + 2)
    lowest = np.minimum(np.minimum.accumulate(depth - drop) + drop, 0)
    before = np.concatenate(([0], lowest[:-1]))
    before[starts] = 0
    return depth - lowest, (step < 0) & (lowest < before)


def _match_by_stack(
    begin: SpanMarks, end: SpanMarks, group: np.ndarray, b: np.ndarray, e: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(begin rows, their end rows): rows `b` matched with rows `e` by a stack per group; `group` lists begins, then ends."""
    begin_group, end_group = group[: len(begin.ts)][b], group[len(begin.ts) :][e]
    opened, closed = (begin_group, begin.ts[b], begin.position[b]), (end_group, end.ts[e], end.position[e])
    answer, before = np.empty(len(b), np.int64), np.empty(len(b), np.int64)
    unopened = np.full(int(group.max(initial=NONE)) + 1, NONE, np.int64)
    if not loops.pairs(len(b), *map(int64_codes, opened), len(e), *map(int64_codes, closed), unopened, before, answer):
        first, second = (np.lexsort(columns[:0:-1]) for columns in (opened, closed))
        return _match_by_stack(begin, end, group, b[first], e[second])
    matched = np.flatnonzero(answer >= 0)
    return b[matched], e[answer[matched]]


def pair_spans(begin: SpanMarks, end: SpanMarks) -> Pairs:
    """Pair begins with ends by a stack per thread.

    A pair with different identities means that a record between them was lost: both are matched again by identity alone.
    """
    answer = np.full(len(begin.ts), NONE, np.int64)
    taken = np.zeros(len(end.ts), bool)
    thread = row_codes(np.concatenate((begin.key, end.key)))
    b, e = _match_by_stack(begin, end, thread, np.arange(len(begin.ts)), np.arange(len(end.ts)))
    agree = ~begin.identified[b] | ~end.identified[e] | (begin.identity[b] == end.identity[e])
    answer[b[agree]], taken[e[agree]] = e[agree], True
    if not agree.all():
        left, right = np.flatnonzero((answer < 0) & begin.identified), np.flatnonzero(~taken & end.identified)
        group = row_codes(thread, np.concatenate((begin.identity, end.identity)))
        b, e = _match_by_stack(begin, end, group, left, right)
        answer[b], taken[e] = e, True
    return Pairs(answer, np.flatnonzero(~taken))


def latest(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row, the right row of its group with the greatest time <= its own; among equal times the last."""
    return _merge_lookup(loops.latest, (right_group, right_ts), (left_group, left_ts))


def following(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row, the right row of its group with the smallest time > its own; among equal times the first."""
    return _merge_lookup(loops.following, (right_group, right_ts), (left_group, left_ts))


def latest_or_following(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row, the result of `latest` or, if that is -1, of `following`: facts may be recorded late."""
    row = latest(right_group, right_ts, left_group, left_ts)
    late = np.flatnonzero(row < 0)
    row[late] = following(right_group, right_ts, left_group[late], left_ts[late])
    return row


def _merge_lookup(loop: Callable[..., int], right: tuple[np.ndarray, ...], left: tuple[np.ndarray, ...]) -> np.ndarray:
    """The right row for each left row, found by a C loop over both sides, (group, time), in time order."""
    n, answer = len(right[0]), np.full(len(left[0]), NONE, np.int64)
    if n == 0 or len(answer) == 0:
        return answer
    theirs, since, ours, ts = (int64_codes(column) for column in (*right, *left))
    lows, widths = np.array([value_range(theirs), value_range(ours)], object).T
    low = min(lows)
    width = max(lows + widths) - low
    if width > 4 * (n + len(ours)) + SMALL:  # range too wide for a table indexed by group
        group = row_codes(np.concatenate((theirs, ours)))
        theirs, ours, low, width = group[:n], group[n:], 0, n + len(ours)
    if not loop(n, theirs, since, len(ours), ours, ts, low, np.full(width, NONE, np.int64), answer):
        right_order, left_order = (np.argsort(column, kind="stable") for column in (since, ts))
        row = _merge_lookup(loop, (theirs[right_order], since[right_order]), (ours[left_order], ts[left_order]))
        answer[left_order] = np.append(right_order, NONE)[row]
    return answer


def if_lasting(right: tuple[np.ndarray, np.ndarray, np.ndarray], left: tuple[np.ndarray, np.ndarray], answer: np.ndarray) -> None:
    """Fill the -1 in `answer`: for left rows (group, time), the result of `latest` if that right row lasts beyond the left time.

    `right` has the group, time and end of each row.
    """
    without = answer < 0
    missing = slice(None) if without.all() else np.flatnonzero(without)
    group, ts = (column[missing] for column in left)
    row = latest(right[0], right[1], group, ts)
    answer[missing] = np.where(ts < np.append(right[2], 0)[row], row, NONE)


def share_spans(owner: np.ndarray, work: np.ndarray, ts: np.ndarray, lasts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The span of each row; a row without one (-1) takes the span of a row of the same work, if that span contains its time.

    `lasts` has the begins and ends of the spans.
    """
    known = np.flatnonzero(owner >= 0)
    known = known[number_rows(work[known], owner[known])[1]]
    span, row = owner[known], np.where(owner >= 0, 0, NONE)
    if_lasting((work[known], lasts[0][span], lasts[1][span]), (work, ts), row)
    return np.where(owner >= 0, owner, np.append(span, NONE)[row])


def next_in_group(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """The next row in time order of each row's group; -1 for the last."""
    order = np.arange(len(ts)) if in_time(ts) else np.argsort(ts, kind="stable")
    answer, place = np.empty(len(ts), np.int64), np.arange(len(ts))
    answer[order] = np.append(order, NONE)[following(group[order], place, group[order], place)]
    return answer


def running_count(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... within each group, in time order."""
    order = np.lexsort((ts, group))
    starts = first_of_runs(group[order])
    answer = np.empty(len(ts), np.int64)
    answer[order] = np.arange(len(ts)) - np.repeat(starts, run_lengths(starts, len(ts)))
    return answer


def innermost_span(spans: pd.DataFrame, rows: pd.DataFrame) -> np.ndarray:
    """The innermost of `spans` (tid, begin_ns, end_ns) in which each of `rows` (tid, begin_ns) began on its thread."""
    nest = NestedSpans(*(spans[name].to_numpy(np.int64) for name in ("tid", "begin_ns", "end_ns")))
    return nest.innermost(rows["tid"].to_numpy(np.int64), rows["begin_ns"].to_numpy(np.int64))


@dataclass(frozen=True)
class TimeSegments:
    """Time segments and the span that each belongs to."""

    span: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class NestedSpans:
    """The nested spans of each thread, to look up the innermost one at any moment. Spans are half open, [begin, end)."""

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
        if_lasting((self.thread, self.ts, until), (key, ts), event)
        return np.append(self.top, NONE)[event]

    def segments(self) -> "TimeSegments":
        """Each thread's time split by innermost span; time outside all spans is omitted."""
        if len(self.ts) == 0:
            return TimeSegments(self.top, self.ts, self.ts)
        same = np.append(self.thread[1:] == self.thread[:-1], False)
        end = np.where(same, np.append(self.ts[1:], 0), self.ts)
        keep = (self.top >= 0) & (end > self.ts)
        return TimeSegments(self.top[keep], self.ts[keep], end[keep])
