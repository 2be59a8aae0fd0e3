"""Slots of a recording's files as raw bytes: the record kind of each, and single fields. The loops are in C."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.records.loops import loops
from analyzer.records.spans import int64_codes, number_rows
from tracer.recording.format import BUSY, DISCARD, RING_HEADER_BYTES

IMPOSSIBLE_NS = 1 << 62
"""No clock shows a time from here on."""
LONGEST_NS = 1 << 51
"""Maximum time (26 days) of a record before or after the middle of its recording."""
SAMPLED = 256
"""Number of slots of a file sampled for the middle of its times."""


@dataclass(frozen=True)
class SlotsByKind:
    """Slot numbers by record kind, in file order, and the first and last time of the written slots."""

    rows: dict[int, np.ndarray]
    first_ns: int
    last_ns: int
    damaged: int
    """Records with an impossible time: included in `rows`, excluded from first_ns and last_ns (0 if no record remains)."""
    discarded: int
    """Slots that the kernel side discarded or never finished."""


def by_kind(slots: np.ndarray, begin_ns: int = 0, end_ns: int = 2**64 - 1) -> SlotsByKind:
    """The slots (void, contiguous) with a time in [begin_ns, end_ns), by kind."""
    order, kind = np.empty(len(slots), np.int64), np.empty(len(slots), np.uint16)
    ends, about = np.zeros(1 << 16, np.int64), np.zeros(4, np.uint64)
    most = loops.by_kind(slots, slots.dtype.itemsize, len(slots), begin_ns, end_ns, kind, order, ends, about)
    first, last, damaged, discarded = about.tolist()
    ends = ends[: most + 1]
    begins = np.append(0, ends[:-1])
    rows = {each: order[begins[each] : ends[each]] for each in np.flatnonzero(ends > begins).tolist()}
    return SlotsByKind(rows, first if first <= last else 0, last, damaged, discarded)


def possible_times(streams: Sequence[np.ndarray]) -> tuple[int, int]:
    """First and last plausible time of a record in these files: a time that a clock can show, near the median of the records."""
    times = np.concatenate([np.empty(0, np.uint64), *(_sampled_times(slots) for slots in streams)])
    if not len(times):
        return 0, IMPOSSIBLE_NS - 1
    middle = int(np.median(times))
    return max(middle - LONGEST_NS, 0), min(middle + LONGEST_NS, IMPOSSIBLE_NS - 1)


def drop_impossible(kinds: SlotsByKind, slots: np.ndarray, possible: tuple[int, int]) -> SlotsByKind:
    """`kinds` with every record outside the possible times counted as damaged."""
    first, last = possible
    if not kinds.rows or (first <= kinds.first_ns and kinds.last_ns <= last):
        return kinds
    times = slot_headers(slots[np.concatenate(list(kinds.rows.values()))])["ts"]
    fine = times[(times >= first) & (times <= last)]
    ends = (int(fine.min()), int(fine.max())) if len(fine) else (0, 0)
    return SlotsByKind(kinds.rows, *ends, len(times) - len(fine), kinds.discarded)


def _sampled_times(slots: np.ndarray) -> np.ndarray:
    heads = slot_headers(slots[np.linspace(0, len(slots) - 1, min(SAMPLED, len(slots))).astype(np.int64)])
    written = (heads["length"] & (BUSY | DISCARD) == 0) & (heads["kind"] > 0)
    return np.asarray(heads["ts"][written & (heads["ts"] < IMPOSSIBLE_NS)])


def slot_headers(slots: np.ndarray) -> np.ndarray:
    """The header of each slot, a view with the fields length, ts (ns) and kind."""
    fields = {"names": ["length", "ts", "kind"], "formats": ["<u4", "<u8", "<u2"], "offsets": [0, 8, 24]}
    return slots.view(np.dtype({**fields, "itemsize": slots.dtype.itemsize}))  # type: ignore[call-overload]


def columns_of(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Integer fields of the records in some slots, as int64. Raises IndexError if the fields exceed the slot."""
    declared: Mapping[str, Any] = dtype.fields or {}
    width = slots.dtype.itemsize
    offset = np.array([RING_HEADER_BYTES + declared[name][1] for name in names], np.int64)
    size = np.array([declared[name][0].itemsize for name in names], np.int64)
    sign = np.array([-1 if declared[name][0].kind == "i" else 1 for name in names], np.int64)
    answer = np.empty((len(names), len(rows)), np.int64)
    fields = len(names), offset, size * sign
    if np.any(offset + size > width) or not loops.gather(slots, width, len(slots), *fields, len(rows), int64_codes(rows), answer):
        raise IndexError("no such slot or field")
    return dict(zip(names, answer, strict=True))


def first_occurrences(slots: np.ndarray, rows: np.ndarray, dtype: np.dtype, names: Sequence[str]) -> np.ndarray:
    """The `rows` at which a combination of these integer fields appears for the first time."""
    return rows[number_rows(*columns_of(slots, rows, dtype, names).values())[1]]
