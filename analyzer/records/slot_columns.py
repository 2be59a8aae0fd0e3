"""Slots of a recording's files, as raw bytes: which kind lies where, and single fields of them. The loops are C."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.records.loops import loops
from analyzer.records.spans import flat, numbered
from tracer.recording.format import RING_HEADER_BYTES


@dataclass(frozen=True)
class Sorted:
    """Which slots hold which kind of record, in the order of the file, and the times of the written ones."""

    rows: dict[int, np.ndarray]
    first_ns: int
    last_ns: int
    damaged: int
    """Records with a time that no clock can show; they count, but for first_ns and last_ns (0 where there is none)."""
    discarded: int
    """Slots that the kernel side gave up or never finished."""


def by_kind(slots: np.ndarray, begin_ns: int = 0, end_ns: int = 2**64 - 1) -> Sorted:
    """The slots (void, contiguous) with a time from begin_ns on and before end_ns, by kind."""
    order, kind = np.empty(len(slots), np.int64), np.empty(len(slots), np.uint16)
    ends, about = np.zeros(1 << 16, np.int64), np.zeros(4, np.uint64)
    most = loops.by_kind(slots, slots.dtype.itemsize, len(slots), begin_ns, end_ns, kind, order, ends, about)
    first, last, damaged, discarded = about.tolist()
    ends = ends[: most + 1]
    begins = np.append(0, ends[:-1])
    rows = {each: order[begins[each] : ends[each]] for each in np.flatnonzero(ends > begins).tolist()}
    return Sorted(rows, first if first <= last else 0, last, damaged, discarded)


def columns_of(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Integer fields of the records in some slots, as int64. Raises IndexError where a slot has no room for them."""
    declared: Mapping[str, Any] = dtype.fields or {}
    width = slots.dtype.itemsize
    offset = np.array([RING_HEADER_BYTES + declared[name][1] for name in names], np.int64)
    size = np.array([declared[name][0].itemsize for name in names], np.int64)
    sign = np.array([-1 if declared[name][0].kind == "i" else 1 for name in names], np.int64)
    answer = np.empty((len(names), len(rows)), np.int64)
    fields = len(names), offset, size * sign
    if np.any(offset + size > width) or not loops.gather(slots, width, len(slots), *fields, len(rows), flat(rows), answer):
        raise IndexError("no such slot or field")
    return dict(zip(names, answer, strict=True))


def firsts(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> np.ndarray:
    """Of `rows`, those at which some integer fields have values together for the first time."""
    return rows[numbered(*columns_of(slots, rows, dtype, names).values())[1]]
