"""Many protobuf messages of one shape at once: NumPy columns in, wire bytes out.

A `Messages` batch is a list of byte columns. Column `j` of a block holds byte `j` of every message's piece; `lengths`
says how many of the columns each message uses, so absent fields and short varints cost nothing on the wire.
"""

import numpy as np

VARINT, FIXED64, LENGTH = 0, 1, 2
Where = np.ndarray | None


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


def varint_columns(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Byte columns [width, n] of the values' varints and their lengths; negative numbers take ten bytes, as protobuf has it."""
    rest = np.asarray(values).astype(np.int64, copy=False).view(np.uint64)
    width = max(1, (int(rest.max()).bit_length() + 6) // 7) if len(rest) else 1
    columns, lengths = np.empty((width, len(rest)), np.uint8), np.ones(len(rest), np.int64)
    for i in range(width):
        columns[i] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        if i + 1 < width:
            more = rest > 0
            columns[i] |= more.astype(np.uint8) << 7
            lengths += more
    return columns, lengths


def packed_varints(values: np.ndarray) -> bytes:
    """The payload of a packed repeated varint field."""
    columns, lengths = varint_columns(values)
    used = np.arange(len(columns))[:, None] < lengths
    return columns.T[used.T].tobytes()


class Messages:
    """`n` messages of one type, built field by field in wire order."""

    def __init__(self, n: int):
        self.n = n
        self.lengths = np.zeros(n, np.int64)
        self.blocks: list[tuple[np.ndarray, np.ndarray | int]] = []

    def _append(self, columns: np.ndarray, lengths: np.ndarray | int, where: Where) -> None:
        if where is not None:
            lengths = np.where(where, lengths, 0)
        self.blocks.append((columns, lengths))
        self.lengths += lengths

    def constant(self, data: bytes, where: Where = None) -> "Messages":
        """The same bytes in every message (of `where`)."""
        self._append(np.frombuffer(data, np.uint8)[:, None], len(data), where)
        return self

    def varint(self, field: int, values: np.ndarray, where: Where = None) -> "Messages":
        """An integer, enum or bool field."""
        self.constant(tag(field, VARINT), where)
        if where is not None:
            values = np.where(where, values, 0)
        self._append(*varint_columns(values), where)
        return self

    def fixed64(self, field: int, values: np.ndarray, where: Where = None) -> "Messages":
        """A fixed64 or double field, by the dtype of `values` (8 bytes)."""
        self.constant(tag(field, FIXED64), where)
        self._append(np.ascontiguousarray(values).view(np.uint8).reshape(self.n, 8).T, 8, where)
        return self

    def message(self, field: int, child: "Messages", where: Where = None) -> "Messages":
        """A sub-message per message."""
        self.constant(tag(field, LENGTH), where)
        self._append(*varint_columns(child.lengths), where)
        for columns, lengths in child.blocks:
            self._append(columns, lengths, where)
        return self

    def write(self, out: np.ndarray, offsets: np.ndarray) -> None:
        """Put message i at `out[offsets[i]]`."""
        if not self.n:
            return
        position = offsets.copy()
        for columns, lengths in self.blocks:
            for j, column in enumerate(columns):
                if isinstance(lengths, int):
                    out[position + j] = column if len(column) > 1 else column[0]
                    continue
                rows = np.flatnonzero(lengths > j)
                out[position[rows] + j] = column[rows] if len(column) > 1 else column[0]
            position += lengths

    def tobytes(self) -> bytes:
        """All messages one after the other, each as it stands (no tag)."""
        return interleave([self], [np.arange(self.n)])


def interleave(batches: list[Messages], places: list[np.ndarray]) -> bytes:
    """Messages of several types in one byte string; `places[b][i]` is the rank of message i of batch b in the output."""
    total = sum(batch.n for batch in batches)
    lengths = np.zeros(total, np.int64)
    for batch, place in zip(batches, places, strict=True):
        lengths[place] = batch.lengths
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if total else 0, np.uint8)
    starts = ends - lengths
    for batch, place in zip(batches, places, strict=True):
        batch.write(out, starts[place])
    return out.tobytes()
