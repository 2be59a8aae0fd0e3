"""Slots of a recording's files, as raw bytes: which kind lies where, and single fields of them. The loops are C."""

from dataclasses import dataclass

import numpy as np

from analyzer.spans import _joins


@dataclass(frozen=True)
class Sorted:
    """Which slots hold which kind of record, in the order of the file, and what the written ones tell."""

    rows: dict[int, np.ndarray]
    first_ns: int
    last_ns: int
    damaged: int
    """Records with a time that no clock can show; they count, but for first_ns and last_ns (0 where there is none)."""
    discarded: int
    """Slots that the kernel side gave up or never finished."""


def by_kind(slots: np.ndarray, begin_ns: int = 0, end_ns: int = 2**64 - 1) -> Sorted:
    """The slots (void, contiguous) with a time from begin_ns on and before end_ns, by kind."""
    order = np.empty(len(slots), np.int64)
    counts, first, last, damaged, discarded = _joins.by_kind(slots.dtype.itemsize, begin_ns, end_ns, slots, order)
    ends = np.cumsum([count for _, count in counts]).tolist()
    rows = {kind: order[end - count : end] for (kind, count), end in zip(counts, ends, strict=True)}
    return Sorted(rows, first if first <= last else 0, last, damaged, discarded)


def column_of(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, offset: int) -> np.ndarray:
    """An integer field of some slots, as int64."""
    answer = np.empty(len(rows), np.int64)
    _joins.gather(slots.dtype.itemsize, offset, dtype.itemsize, dtype.kind == "i", slots, rows, answer)
    return answer


def firsts(slots: np.ndarray, rows: np.ndarray, one: tuple[int, int], other: tuple[int, int]) -> np.ndarray:
    """Of `rows`, those at which a pair of two fields, given as (offset, bytes), has a value for the first time."""
    answer = np.empty(len(rows), np.int64)
    count = _joins.firsts(slots.dtype.itemsize, *one, *other, slots, rows, answer)
    return rows[answer[:count]]
