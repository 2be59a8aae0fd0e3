"""Encodes many protobuf messages at once, from columns to wire bytes, by the C extension `_messages`."""

import numpy as np

from views.errors import ViewError

try:
    from views.timeline import _messages
except ImportError:
    raise ViewError("views/timeline/_messages.so is not built: run `make build`") from None

VARINT, FIXED64, LENGTH = 0, 1, 2
CONSTANT_STEP, VARINT_STEP, FIXED64_STEP, MEMBER_STEP, OPEN_STEP, CLOSE_STEP = range(6)
Step = tuple[int, bytes, np.ndarray | None, np.ndarray | None, int | None]
Part = tuple[bytes, np.ndarray, np.ndarray | None]
"""Messages one after the other, where each begins and the last ends, and which of them each slice has (None: its own number)."""


def valid_text(text: str) -> str:
    """A text that protobuf accepts: a command line may contain bytes that are not UTF-8."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def varint_bytes(value: int) -> bytes:
    """One integer as a varint."""
    return bytes(packed_varints(np.array([value])))


def tag(field: int, wire: int) -> bytes:
    """The tag of a field."""
    return varint_bytes(field << 3 | wire)


def field_bytes(field: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return tag(field, LENGTH) + varint_bytes(len(payload)) + payload


def int64_or_float(values: np.ndarray) -> np.ndarray:
    """A column for the extension: int64, or float64 unchanged."""
    return np.ascontiguousarray(values if values.dtype == np.float64 else values.astype(np.int64, copy=False))


class Form:
    """The form of all messages of one kind, built field by field in wire order; each row of the columns is a message.

    A field is omitted from messages in which its value equals `absent`.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(
        self,
        kind: int,
        data: bytes,
        column: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        absent: int | None = None,
    ) -> "Form":
        """Add a step; combined with the preceding constant bytes if it is never omitted."""
        if self.steps and self.steps[-1][0] == CONSTANT_STEP and kind != MEMBER_STEP and absent is None:
            data = self.steps.pop()[1] + data
        column, labels = (None if values is None else int64_or_float(values) for values in (column, labels))
        self.steps.append((kind, data, column, labels, absent))
        return self

    def constant(self, data: bytes) -> "Form":
        """Add bytes that are the same in every message."""
        return self.step(CONSTANT_STEP, data)

    def varint(self, field: int, column: np.ndarray, labels: np.ndarray | None = None) -> "Form":
        """Add an integer, enum or bool field; with `labels`, its value is labels[column]."""
        return self.step(VARINT_STEP, tag(field, VARINT), column, labels)

    def fixed64(self, field: int, column: np.ndarray, absent: int | None = None) -> "Form":
        """Add a fixed64 or double field, by the dtype of `column`."""
        return self.step(FIXED64_STEP, tag(field, FIXED64), column, absent=absent)

    def member(self, field: int, head: bytes, number: int, column: np.ndarray, labels: np.ndarray | None, absent: int) -> "Form":
        """Add a short sub-message: `head`, then one integer field. `field` is below 16, the sub-message below 128 bytes."""
        inner = head + tag(number, VARINT)
        data = tag(field, LENGTH) + bytes([(len(inner) + 1) & 0x7F]) + inner
        return self.step(MEMBER_STEP, data, column, labels, absent)

    def open(self, field: int) -> "Form":
        """Begin a sub-message."""
        return self.step(OPEN_STEP, tag(field, LENGTH))

    def close(self) -> "Form":
        """End the sub-message that was opened last."""
        self.steps.append((CLOSE_STEP, b"", None, None, None))
        return self


def encode(form: Form, n: int) -> tuple[bytes, np.ndarray]:
    """(messages for the first `n` rows of the columns, their offsets and the total length [n + 1]).

    Raises IndexError if a column or a map is too short.
    """
    offsets = np.empty(n + 1, np.int64)
    return _messages.encode(form.steps, offsets), offsets


def packed_varints(values: np.ndarray) -> bytes:
    """The payload of a packed repeated varint field."""
    return _messages.varints(int64_or_float(values))
