"""Slots of a recording's files, as raw bytes: which kind lies where, and single fields of them. The loops are C."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.records.spans import _joins, numbered
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
    order = np.empty(len(slots), np.int64)
    counts, first, last, damaged, discarded = _joins.by_kind(slots.dtype.itemsize, begin_ns, end_ns, slots, order)
    ends = np.cumsum([count for _, count in counts]).tolist()
    rows = {kind: order[end - count : end] for (kind, count), end in zip(counts, ends, strict=True)}
    return Sorted(rows, first if first <= last else 0, last, damaged, discarded)


def places(dtype: np.dtype, names: Iterable[str]) -> np.ndarray:
    """Where integer fields of a record lie in its slot, as the C code reads it."""
    fields: Mapping[str, Any] = dtype.fields or {}
    declared = [fields[name] for name in names]
    return np.array([(RING_HEADER_BYTES + begin, each.itemsize, each.kind == "i", 0) for each, begin, *_ in declared], np.int32)


def columns_of(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Integer fields of the records in some slots, as int64."""
    answer = np.empty((len(names), len(rows)), np.int64)
    _joins.gather(slots.dtype.itemsize, places(dtype, names), slots, rows, answer)
    return dict(zip(names, answer, strict=True))


def firsts(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> np.ndarray:
    """Of `rows`, those at which some integer fields have values together for the first time."""
    return rows[numbered(*columns_of(slots, rows, dtype, names).values())[1]]
