"""Reads possibly damaged FlatBuffers: every offset is checked, which the package `flatbuffers` does not do."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class OffsetOutside(Exception):
    """An offset of the file is outside the file."""


@dataclass
class FlatBuffer:
    """A FlatBuffer: tables, texts and lists by offset in the file. Raises Damaged if one is outside it."""

    raw: bytes

    def number(self, form: str, at: int) -> Any:
        """The number at an offset, in a format of `struct`."""
        if not 0 <= at <= len(self.raw) - struct.calcsize(form):
            raise OffsetOutside
        return struct.unpack_from(form, self.raw, at)[0]

    def slot(self, table: int, index: int) -> int:
        """The offset of a table's field; 0 if it is omitted."""
        layout = table - self.number("<i", table)
        entry = 4 + 2 * index
        known = entry + 2 <= self.number("<H", layout)
        offset = self.number("<H", layout + entry) if known else 0
        return table + offset if offset else 0

    def scalar(self, table: int, index: int, form: str, absent: int) -> int:
        """The value of a number field; `absent` if it is omitted."""
        field = self.slot(table, index)
        return int(self.number(form, field)) if field else absent

    def child(self, table: int, index: int) -> int:
        """The offset of the table, text or list that a field refers to; 0 if it is omitted."""
        field = self.slot(table, index)
        return field + int(self.number("<I", field)) if field else 0

    def text(self, table: int, index: int) -> str | None:
        """The value of a text field; None if it is omitted."""
        start = self.child(table, index)
        if not start:
            return None
        end = start + 4 + int(self.number("<I", start))
        if end > len(self.raw):
            raise OffsetOutside
        return self.raw[start + 4 : end].decode("utf-8", errors="replace")

    def tables(self, table: int, index: int) -> Iterator[int]:
        """The offsets of the tables in a field's list."""
        start = self.child(table, index)
        count = int(self.number("<I", start)) if start else 0
        if start + 4 * count > len(self.raw):
            raise OffsetOutside
        for entry in range(start + 4, start + 4 + 4 * count, 4):
            yield entry + int(self.number("<I", entry))
