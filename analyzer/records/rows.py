"""Records of one kind as columns, spans made of begin and end records, and text fields."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analyzer.records.slot_columns import columns_of
from analyzer.records.spans import SpanMarks, number_rows
from tracer.recording.format import RING_HEADER_BYTES

UNKNOWN_U32 = 2**32 - 1
SELDOM = ("cpu",)


class Rows:
    """The records of one kind in time order; a field that the recording lacks reads as zeros.

    They are rows `index` of `stored`, which may be a mapping of the file: only the requested fields are copied.
    """

    def __init__(self, stored: np.ndarray, dtype: np.dtype, position: np.ndarray, index: np.ndarray | None = None):
        self.stored, self.dtype, self.position = stored, dtype, position
        self.index = np.arange(len(stored)) if index is None else index
        self._columns: dict[str, np.ndarray] = {}
        self._of: tuple[Rows, np.ndarray] | None = None
        """The rows that these were chosen from, and which."""

    @classmethod
    def of_columns(cls, columns: dict[str, np.ndarray], position: np.ndarray) -> "Rows":
        """Records made by the analyzer: int64 columns by field, and the file slot that each was made from."""
        rows = cls(np.empty(0, "V64"), np.dtype([(name, "<i8") for name in columns]), position, np.arange(len(position)))
        rows._columns = dict(columns)
        return rows

    @cached_property
    def slots(self) -> np.ndarray:
        """The records' slots."""
        return self.stored[self.index]

    @property
    def records(self) -> np.ndarray:
        """The records as a structured array."""
        width = self.slots.dtype.itemsize
        slot_dtype = np.dtype({"names": ["r"], "formats": [self.dtype], "offsets": [RING_HEADER_BYTES], "itemsize": width})
        return self.slots.view(slot_dtype)["r"]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, field: str) -> np.ndarray:
        """A field as int64 (integers), float64 or bytes; treat it as read-only."""
        if field not in self._columns:
            self._columns[field] = self._column(field)
        column = self._columns[field]
        column.flags.writeable = False
        return column

    def _column(self, field: str) -> np.ndarray:
        if field not in (self.dtype.names or ()):
            return np.zeros(len(self), np.int64)
        if self._of is not None and self.dtype[field].kind in "iu":
            rows, keep = self._of
            return rows[field][keep]
        numbers = [name for name in self.dtype.names or () if self.dtype[name].kind in "iu" and name != "kind"]
        if field in numbers:  # all common fields at once, so that each slot is fetched once
            fields = [name for name in numbers if name == field or (name not in SELDOM and name not in self._columns)]
            self._columns |= columns_of(self.stored, self.index, self.dtype, fields)
            return self._columns[field]
        column = self.records[field]
        return column.astype(np.int64) if column.dtype.kind in "iu" else column.copy()

    def raw(self, field: str) -> np.ndarray:
        """A field as unsigned 64-bit numbers: handles, addresses and values."""
        return self[field].view(np.uint64)

    def where(self, keep: np.ndarray) -> "Rows":
        """The records selected by a mask or by row numbers."""
        if keep.dtype == bool and keep.all():
            return self
        chosen = Rows(self.stored, self.dtype, self.position[keep], self.index[keep])
        chosen._of = self, keep
        return chosen

    def marks(self, identity: np.ndarray | None = None, unknown: int | None = None) -> SpanMarks:
        """The records as begins or ends on their threads; the identity `unknown` means that it was not recorded."""
        identified = np.zeros(len(self), bool)
        if identity is None:
            identity = np.zeros(len(self), np.int64)
        else:
            identified = identity != unknown if unknown is not None else ~identified
        return SpanMarks(self["tid"], self["ts"], self.position, identity, identified)


@dataclass(frozen=True)
class RecordSpans:
    """Begin records with their ends: `end` indexes the end records, -1 for none."""

    end: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    complete: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        """The columns of the group `span`."""
        duration = self.end_ns - self.begin_ns
        return {"begin_ns": self.begin_ns, "end_ns": self.end_ns, "duration_ns": duration, "complete": self.complete}

    def of_end(self, ends: Rows, field: str, missing: int = -1) -> np.ndarray:
        """A field of each span's end record; `missing` for spans without one."""
        return np.append(ends[field], missing)[self.end]

    def until(self) -> np.ndarray:
        """Exclusive end for containment tests: an unfinished span also contains its last instant."""
        return np.where(self.complete | (self.end_ns == self.begin_ns), self.end_ns, self.end_ns + 1)


def identity_of(rows: Rows, fields: tuple[str, ...]) -> np.ndarray | None:
    """The identity fields of each record combined into one number."""
    if not fields:
        return None
    answer = rows[fields[0]]
    for field in fields[1:]:
        answer = (answer << 32) ^ (rows[field] & UNKNOWN_U32)
    return answer


def decode_texts(column: np.ndarray) -> np.ndarray:
    """Fixed-size C strings as text: up to the first NUL, undecodable bytes replaced."""
    if column.dtype.kind != "S":
        return np.full(len(column), "", object)
    return map_distinct(column, lambda value: value.split(b"\0", 1)[0].decode(errors="replace"))


def map_distinct(values: np.ndarray, name: Callable[[Any], str]) -> np.ndarray:
    """The name of each value, computed once per distinct value."""
    code, first = number_rows(values)
    return np.array([*map(name, values[first].tolist()), ""], object)[code]
