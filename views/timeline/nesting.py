"""The order in which slices of one track are written, so that they nest; those that do not, on separate lanes."""

import numpy as np

from views.timeline.protobuf import _messages


def preorder(begin: np.ndarray, end: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Slice numbers sorted by begin, then longest first, then by rank. Fast if the levels are sorted, as tables are."""
    order = np.argsort(begin, kind="stable")
    by_begin = begin[order]
    same = by_begin[1:] == by_begin[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        rows = order[tied]
        order[tied] = rows[np.lexsort((rank[rows], -end[rows], begin[rows]))]
    return order


def nested_events(begin: np.ndarray, end: np.ndarray, instant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(events, crossed): begin (i) and end (~i) events, in the order to write them, of one thread's slices in their `preorder`.

    At equal times, ends come first, innermost first, then begins, outermost first; an empty slice ends immediately, an
    instant has no end. `crossed` [bool] marks slices that outlast the one in which they began: at least one in each stretch (from
    one moment without a slice to the next) in which slices do not nest; the order of that stretch's events is then invalid.
    """
    events, crossed = np.empty(2 * len(begin), np.int64), np.zeros(len(begin), bool)
    count = _messages.nested(begin, end, instant, events, crossed)
    return events[:count], crossed


def nesting_lanes(
    begin: np.ndarray, end: np.ndarray, rank: np.ndarray, complete: np.ndarray, crossed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(lane, end) of every slice such that each lane nests; an unfinished slice is clipped to the enclosing one.

    Processes slices one by one, but only in stretches (between two moments without a slice) with `crossed` slices.
    """
    lane, end, stacks = np.zeros(len(begin), np.int64), end.copy(), list[list[int]]()
    order = preorder(begin, end, rank)
    until = np.maximum.accumulate(end[order])
    stretch = np.cumsum(np.append(True, begin[order][1:] >= until[:-1])[: len(order)])
    order = order[np.isin(stretch, stretch[crossed[order]])]
    for i in order.tolist():
        for k in range(len(stacks) + 1):
            if k == len(stacks):
                stacks.append([])
            stack = stacks[k]
            while stack and stack[-1] <= begin[i]:
                stack.pop()
            if stack and stack[-1] < end[i] and not complete[i]:
                end[i] = stack[-1]
            if not stack or end[i] <= stack[-1]:
                stack.append(int(end[i]))
                lane[i] = k
                break
    return lane, end
