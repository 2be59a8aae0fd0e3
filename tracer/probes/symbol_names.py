"""A symbol table indexed by name: all names are sorted once by their first letters, since engines look up many."""

from bisect import bisect_left, bisect_right
from functools import cached_property

import numpy as np

LETTERS = 8  # of a name, as one number: the first is the most significant
MANY = 64  # names with a common beginning, as in a C++ namespace: their later letters are compared at once


class SymbolNames:
    """Looks up rows of a symbol table, which may be damaged, by the beginning of their names; `strings`: its string table."""

    def __init__(self, positions: np.ndarray, strings: bytes):
        self.positions, self.strings = positions, strings

    @cached_property
    def _letters(self) -> np.ndarray:
        """The letters from each position of the string table, as one number."""
        return np.ndarray(len(self.strings) + 1, ">u8", self.strings + bytes(LETTERS), strides=(1,))

    @cached_property
    def _ordered(self) -> tuple[memoryview, np.ndarray, np.ndarray]:
        """(first letters, position of the name, row), sorted by the letters."""
        positions = np.minimum(self.positions, len(self.strings))
        keys = self._letters[positions].astype(np.uint64)
        order = np.argsort(keys)
        return memoryview(keys[order]), positions[order], order

    def beginning_with(self, start: bytes) -> list[int]:
        """The rows whose name, with its terminating zero byte, begins with `start`; by string table position, then by row."""
        keys, positions, rows = self._ordered
        first, last = (int.from_bytes(start[:LETTERS].ljust(LETTERS, fill), "big") for fill in (b"\0", b"\xff"))
        low = bisect_left(keys, first)
        high = bisect_right(keys, last, low)
        if low == high:  # the usual case: an engine's functions are spread over several libraries
            return []
        positions, rows = positions[low:high], rows[low:high]
        if high - low > MANY and len(start) > LETTERS:
            ends = np.minimum(positions + (len(start) - LETTERS), len(self.strings))
            alike = self._letters[ends] == np.uint64(int.from_bytes(start[-LETTERS:], "big"))
            positions, rows = positions[alike], rows[alike]
        near = zip(positions.tolist(), rows.tolist(), strict=True)
        return [row for _, row in sorted(place for place in near if self.strings.startswith(start, place[0]))]

    def name(self, row: int) -> bytes:
        """The name of a row; raises ValueError if it is not terminated."""
        position = int(self.positions[row])
        return self.strings[position : self.strings.index(0, position)]
