"""Many protobuf messages of one shape at once: NumPy columns in, wire bytes out.

`Rows` are messages of one width that differ in numbers only. A number takes the bytes of the widest in its column: a varint
may be longer than it need be, as a reader goes on until a byte says that it is the last. So rows are a matrix, which NumPy
fills column by column and moves row by row. Who wants few bytes puts numbers of like size into one `Rows`.
"""

import numpy as np

VARINT, FIXED64, LENGTH = 0, 1, 2
UNIT_OF = (1, 1, 2, 4, 4, 8, 8, 8, 8)
"""Bytes of the integers in which varints of 0 to 8 bytes are put together."""


def varint_bytes(value: int) -> bytes:
    """One unsigned integer as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire: int) -> bytes:
    """The tag of a field."""
    return varint_bytes(field << 3 | wire)


def field_bytes(field: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return tag(field, LENGTH) + varint_bytes(len(payload)) + payload


def spread(values: np.ndarray, width: int, more: bool = False) -> list[np.ndarray]:
    """Varints of `width` <= 8 bytes each, as unsigned columns of 4, 2 and 1 bytes to write side by side; `more` bytes follow."""
    unit = UNIT_OF[width]
    rest = values.astype(f"u{unit}")
    wire = rest & 0x7F
    for i in range(1, width):
        wire |= (rest << i) & (0x7F << 8 * i)
    wire |= sum(0x80 << 8 * i for i in range(width if more else width - 1))
    parts, at = [], 0
    for size in (8, 4, 2, 1):
        if width & size:
            parts.append(wire.view(f"u{size}").reshape(len(wire), unit // size)[:, at // size])
            at += size
    return parts


def varints(values: np.ndarray) -> list[np.ndarray]:
    """The values as varints of one width, as columns to write side by side; negative numbers take ten bytes."""
    rest = np.asarray(values).astype(np.int64, copy=False).view(np.uint64)
    width = max(1, (int(rest.max()).bit_length() + 6) // 7) if len(rest) else 1
    if width <= 8:
        return spread(rest, width)
    return [*spread(rest & (1 << 56) - 1, 8, more=True), *spread(rest >> 56, width - 8)]


class Rows:
    """`n` messages of one type and width, built field by field in wire order."""

    def __init__(self, n: int):
        self.n = n
        self.template = bytearray()
        self.columns: list[tuple[int, np.ndarray]] = []

    def put(self, *columns: np.ndarray) -> "Rows":
        """Columns of unsigned integers or doubles, byte for byte."""
        for column in columns:
            self.columns.append((len(self.template), column))
            self.template += bytes(column.itemsize)
        return self

    def constant(self, data: bytes | bytearray) -> "Rows":
        """The same bytes in every message."""
        self.template += data
        return self

    def varint(self, field: int, values: np.ndarray) -> "Rows":
        """An integer, enum or bool field."""
        return self.constant(tag(field, VARINT)).put(*varints(values))

    def fixed64(self, field: int, values: np.ndarray) -> "Rows":
        """A fixed64 or double field, by the dtype of `values` (8 bytes)."""
        return self.constant(tag(field, FIXED64)).put(values)

    def message(self, field: int, child: "Rows") -> "Rows":
        """A sub-message per message."""
        self.constant(tag(field, LENGTH) + varint_bytes(len(child.template)))
        at = len(self.template)
        self.columns += [(at + offset, column) for offset, column in child.columns]
        return self.constant(child.template)

    def encoded(self) -> np.ndarray:
        """The messages [n], as raw bytes of one width each, without a tag."""
        width = len(self.template)
        wire = np.frombuffer(self.template * self.n, f"V{width}")
        for offset, column in self.columns if self.n else ():
            np.ndarray(self.n, column.dtype, wire, offset, (width,))[:] = column
        return wire


def interleave(batches: list[np.ndarray], places: list[np.ndarray]) -> bytes:
    """Messages of several shapes in one byte string; `places[b][i]` is the rank of message i of batch b in the output."""
    lengths = np.zeros(sum(map(len, batches)), np.int64)
    for rows, place in zip(batches, places, strict=True):
        lengths[place] = rows.itemsize
    ends = np.cumsum(lengths)
    starts = ends - lengths
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    for rows, place in zip(batches, places, strict=True):
        if len(rows):
            slots = np.ndarray(len(out) - rows.itemsize + 1, rows.dtype, out, 0, (1,))
            slots[starts[place]] = rows
    return out.tobytes()


def packed_varints(values: np.ndarray) -> bytes:
    """The payload of a packed repeated varint field, every number in the bytes of the widest."""
    return Rows(len(values)).put(*varints(values)).encoded().tobytes()
