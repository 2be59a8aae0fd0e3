"""The three vectorised joins that every table is made of: begin with end, event with the latest before it, point with its span.

All functions take parallel arrays, loop over nesting levels at most, and answer with row numbers; -1 says "none".
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

NONE = -1


@dataclass(frozen=True)
class Marks:
    """Begins or ends: the thread each stands on, its time, its place in the file and whose begin or end it is."""

    key: np.ndarray  # thread
    ts: np.ndarray  # ns
    position: np.ndarray  # slot in the file: the thread's program order among equal times
    identity: np.ndarray  # what begins or ends
    known: np.ndarray  # bool: `identity` was told


@dataclass(frozen=True)
class Pairs:
    """`end[i]` is the end of begin i, or -1; `unpaired` are the ends that no begin was recorded for."""

    end: np.ndarray
    unpaired: np.ndarray


NARROW = 1 << 16
SPARSE = 4
FEW_GROUPS = 8
"""So many groups are cheaper searched one by one than sorted."""
ROOMY = 4
"""A table may have so many places for each row before hashing is the cheaper way."""


def dense(column: np.ndarray) -> tuple[np.ndarray, int]:
    """(non-negative numbers that distinguish the column's values, their upper bound); hashes only what spreads widely."""
    if len(column) and column.dtype.kind in "iu":
        low, high = int(column.min()), int(column.max())
        if high - low < NARROW:
            return (column - column.dtype.type(low)).astype(np.int64, copy=False), high - low + 1
    number, values = pd.factorize(column)
    return number.astype(np.int64, copy=False), len(values)


def codes(*columns: np.ndarray) -> np.ndarray:
    """One number per distinct combination of the columns' values, counted from 0 in order of first appearance."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        number, width = dense(column)
        if size * width >= 1 << 62:
            code, size = dense(code)
        if width > 1:
            code, size = code * width + number, size * width
    return in_order_of_appearance(code, size)


def in_order_of_appearance(code: np.ndarray, size: int) -> np.ndarray:
    """Numbers below `size` renumbered from 0 as they first appear; by a table where that is not much larger than the column."""
    n = len(code)
    if size > ROOMY * n:
        return pd.factorize(code)[0].astype(np.int64, copy=False)
    first = np.full(size, n, np.int64)
    first[code[::-1]] = np.arange(n - 1, -1, -1)  # the last to be written is the first of its number
    used = np.flatnonzero(first < n)
    number = np.empty(size, np.int64)
    number[used[np.argsort(first[used], kind="stable")]] = np.arange(len(used))
    return number[code]


def first_of_codes(code: np.ndarray) -> np.ndarray:
    """The first row of each number, for numbers that count from 0 without a gap."""
    first = np.empty(int(code.max(initial=-1)) + 1, np.int64)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    return first


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
    values = distinct(column)
    if len(values) == 0 or int(values[-1]) - int(values[0]) >= NARROW:
        return np.unique(column, return_index=True)
    first = np.empty(int(values[-1]) - int(values[0]) + 1, np.int64)
    first[(column - values[0])[::-1]] = np.arange(len(column) - 1, -1, -1)
    return values, first[values - values[0]]


def stable_order(code: np.ndarray) -> np.ndarray:
    """Stable argsort of small non-negative integers; a radix sort where they fit 16 bits."""
    narrow = len(code) > 0 and int(code.max()) < NARROW
    return np.argsort(code.astype(np.uint16) if narrow else code, kind="stable")


def order_in_groups(group: np.ndarray, ts: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The order by (group, ts, position); cheap where the file's order is already the order of time within each group."""
    by_position = np.argsort(position, kind="stable")
    order = by_position[stable_order(group[by_position])]
    times, groups = ts[order], group[order]
    if np.any((times[1:] < times[:-1]) & (groups[1:] == groups[:-1])):
        return np.lexsort((position, ts, group))
    return order


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


def match_stack(group: np.ndarray, step: np.ndarray) -> np.ndarray:
    """For sorted +1/-1 events: the event number of each begin's end, -1 elsewhere."""
    answer = np.full(len(step), NONE, np.int64)
    if len(step) == 0:
        return answer
    depth, orphan = stack_depth(group, step)
    rows = np.flatnonzero(~orphan)
    level = np.where(step > 0, depth, depth + 1)[rows]
    place = group[rows] * (int(level.max()) + 1 if len(level) else 1) + level
    if len(level) and level.max() > 1:
        order = stable_order(place)
        rows, place = rows[order], place[order]
    hit = (step[rows[:-1]] > 0) & (step[rows[1:]] < 0) & (place[:-1] == place[1:])
    answer[rows[:-1][hit]] = rows[1:][hit]
    return answer


def _match(begin: Marks, end: Marks, group: np.ndarray, b: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stack-match begin rows `b` with end rows `e` within groups (of begins, then ends); rows of begins and their ends."""
    rows = np.concatenate((b, e + len(begin.ts)))
    group = dense(group[rows])[0]
    ts = np.concatenate((begin.ts[b], end.ts[e]))
    order = order_in_groups(group, ts, np.concatenate((begin.position[b], end.position[e])))
    step = np.where(order < len(b), 1, -1)
    closing = match_stack(group[order], step)
    found = np.flatnonzero(closing >= 0)
    return b[order[found]], e[order[closing[found]] - len(b)]


def pair(begin: Marks, end: Marks) -> Pairs:
    """Pair begins with ends, a stack per thread.

    A pair whose identities disagree is a record lost between them: both are offered again, matched by identity alone.
    """
    answer = np.full(len(begin.ts), NONE, np.int64)
    taken = np.zeros(len(end.ts), bool)
    thread = np.concatenate((begin.key, end.key))
    b, e = _match(begin, end, thread, np.arange(len(begin.ts)), np.arange(len(end.ts)))
    agree = ~begin.known[b] | ~end.known[e] | (begin.identity[b] == end.identity[e])
    answer[b[agree]], taken[e[agree]] = e[agree], True
    if not agree.all():
        left, right = np.flatnonzero((answer < 0) & begin.known), np.flatnonzero(~taken & end.known)
        group = codes(thread, np.concatenate((begin.identity, end.identity)))
        b, e = _match(begin, end, group, left, right)
        answer[b], taken[e] = e, True
    return Pairs(answer, np.flatnonzero(~taken))


def rank(ordered: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """How many of the times in order are <= each of `ts`; cheap where these are many and in order, too."""
    if len(ordered) * SPARSE > len(ts) or np.any(ts[1:] < ts[:-1]):
        return np.searchsorted(ordered, ts, "right")
    cuts = np.searchsorted(ts, ordered, "left")
    return np.repeat(np.arange(len(ordered) + 1), np.diff(cuts, prepend=0, append=len(ts)))


def latest(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row the right row of its group with the greatest time <= its own; among equal times the last."""
    n = len(right_ts)
    answer = np.full(len(left_ts), NONE, np.int64)
    if n == 0 or len(left_ts) == 0:
        return answer
    if (right_group == right_group[0]).all():
        by_time = np.argsort(right_ts, kind="stable")
        return _in_one_group(by_time, rank(right_ts[by_time], left_ts) - 1, left_group == right_group[0])
    groups = distinct(right_group)
    if len(groups) <= FEW_GROUPS:
        for group in groups.tolist():
            right, left = np.flatnonzero(right_group == group), np.flatnonzero(left_group == group)
            right = right[np.argsort(right_ts[right], kind="stable")]
            place = rank(right_ts[right], left_ts[left]) - 1
            answer[left] = np.where(place >= 0, right[place], NONE)
        return answer
    group = dense(np.concatenate((right_group, left_group)))[0]
    by_time = np.argsort(np.concatenate((right_ts, left_ts)), kind="stable")
    order = by_time[stable_order(group[by_time])]
    at = np.maximum.accumulate(np.where(order < n, np.arange(len(order)), NONE))
    asks = np.flatnonzero(order >= n)
    at = at[asks]
    found = (at >= 0) & (group[order[at]] == group[order[asks]])
    answer[order[asks[found]] - n] = order[at[found]]
    return answer


def following(right_group: np.ndarray, right_ts: np.ndarray, left_group: np.ndarray, left_ts: np.ndarray) -> np.ndarray:
    """For each left row the right row of its group with the smallest time > its own."""
    if len(right_ts) and (right_group == right_group[0]).all():
        by_time = np.argsort(right_ts, kind="stable")
        return _in_one_group(by_time, rank(right_ts[by_time], left_ts), left_group == right_group[0])
    back = len(right_ts) - 1 - latest(right_group[::-1], -right_ts[::-1], left_group[::-1], -left_ts[::-1] - 1)[::-1]
    return np.where(back < len(right_ts), back, NONE)


def _in_one_group(by_time: np.ndarray, place: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Rows at places of the order by time; -1 where a place lies outside or the group differs."""
    good = same & (place >= 0) & (place < len(by_time))
    return np.where(good, by_time[np.clip(place, 0, len(by_time) - 1)], NONE)


def successors(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """The next row of each row's group in order of time."""
    answer = np.full(len(ts), NONE, np.int64)
    by_time = np.argsort(ts, kind="stable")
    order = by_time[stable_order(dense(group[by_time])[0])]
    same = group[order[1:]] == group[order[:-1]]
    answer[order[:-1][same]] = order[1:][same]
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
        other = np.concatenate((-end[span], -begin[span]))  # ends before begins, outer begins first, inner ends first
        order = np.lexsort((other, step, ts, thread))
        self.at, self.thread, self.step = ts[order], thread[order], step[order]
        self.span = np.concatenate((span, span))[order]
        self.top = self._tops()

    def _tops(self) -> np.ndarray:
        """The innermost span after each event."""
        top = np.full(len(self.at), NONE, np.int64)
        if len(self.at) == 0:
            return top
        depth, _ = stack_depth(self.thread, self.step)
        rows = np.arange(len(self.at))
        for level in range(1, int(depth.max()) + 1):
            opened = np.maximum.accumulate(np.where((self.step > 0) & (depth == level), rows, NONE))
            inside = depth == level
            top[inside] = self.span[opened[inside]]
        return top

    def innermost(self, key: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """The innermost span of `key` that contains `ts`."""
        event = latest(self.thread, self.at, key, ts)
        span = np.where(event >= 0, self.top[event] if len(self.top) else NONE, NONE)
        inside = (span >= 0) & (self.begin[span] <= ts) & (ts < self.end[span]) if len(self.begin) else span >= 0
        return np.where(inside, span, NONE)

    def segments(self) -> "Segments":
        """Each thread's time cut into pieces by its innermost span; time without a span is left out."""
        if len(self.at) == 0:
            return Segments(self.top, self.at, self.at)
        same = np.append(self.thread[1:] == self.thread[:-1], False)
        end = np.where(same, np.append(self.at[1:], 0), self.at)
        keep = (self.top >= 0) & (end > self.at)
        return Segments(self.top[keep], self.at[keep], end[keep])
