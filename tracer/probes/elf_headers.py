"""The tables of an ELF file's headers, read within bounds: sizes may lie, files be sparse, truncated or of another kind."""

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from tracer.errors import ProbeError

SEGMENT = np.dtype(
    [("type", "<u4"), ("flags", "<u4"), *((name, "<u8") for name in ("offset", "vaddr", "paddr", "filesz", "memsz", "align"))]
)
SECTION = np.dtype(
    [
        *(("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"), ("size", "<u8")),
        *(("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entsize", "<u8")),
    ]
)
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
PT_LOAD, SHT_PROGBITS, SHT_NOTE, SHT_NOBITS = 1, 1, 7, 8
SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
SHF_ALLOC, SHF_EXECINSTR = 2, 4
PIECE = 1 << 18  # bytes of a file that are searched at a time
MOST_SEARCHED = 4 << 30  # bytes of a file that are searched for a text
MOST_BYTES = 512 << 20  # bytes that the tables of a file may have together
MOST_TABLE = {2: 96 << 20, 11: 96 << 20, SHT_NOTE: 4 << 20}  # bytes of one whose rows are visited one by one, by section type
MOST_SECTIONS = 1 << 17
DAMAGE = (OSError, ArithmeticError, LookupError, MemoryError, TypeError, ValueError, struct.error)
"""What reading a damaged file can raise."""
NOTE = struct.Struct("<III")
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF, LITTLE_64 = b"\x7fELF", b"\x7fELF\x02\x01"  # the first bytes of every ELF file, and of a 64-bit little-endian one
MACHINES = {3: "x86", 8: "MIPS", 22: "S/390", 40: "ARM", 62: "x64", 183: "AArch64", 243: "RISC-V", 247: "BPF"}
SHORTEST = 52  # bytes of a 32-bit file's header
RESERVED = 0xFF00  # from this value on, a number is stored in the first section


@contextlib.contextmanager
def as_probe_error(path: str) -> Iterator[None]:
    """Turn whatever damage of an ELF file causes into a ProbeError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error}" or type(error).__name__
        raise ProbeError(f"{path} cannot be read as a program or library: {reason}") from None


class Headers:
    """An ELF file's segments and sections, each table read at once, as the target is stopped meanwhile.

    `loads`: (address, file offset, size) of loaded segments. Everything is empty if the file is not a 64-bit little-endian one.
    Reads raise ValueError for what the file does not hold, and once they exceed MOST_BYTES together: headers may lie, and files
    be sparse.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.bytes = file, os.fstat(file.fileno()).st_size
        self._left = MOST_BYTES
        head = os.pread(file.fileno(), FILE_HEADER.size, 0)
        if not head.startswith(ELF) or len(head) < SHORTEST:
            raise ValueError("it is not an ELF file")
        number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
        self.machine = MACHINES.get(number, f"machine {number}")
        fields = FILE_HEADER.unpack(head) if head.startswith(LITTLE_64) else (0,) * 14  # struct.error if it is cut off
        segments_at, sections_at, (segment_bytes, segment_count, section_bytes, section_count, names) = *fields[5:7], fields[9:]
        if sections_at and (section_count == 0 or max(segment_count, section_count, names) >= RESERVED):
            first = self._table(sections_at, section_bytes, 1, SECTION)[0]
            section_count = section_count or int(first["size"])
            segment_count, names = (
                int(first[key]) if count == 0xFFFF else count for key, count in (("info", segment_count), ("link", names))
            )
        self.segments = segments = self._table(segments_at, segment_bytes, segment_count, SEGMENT)
        self.loads = segments[segments["type"] == PT_LOAD][["vaddr", "offset", "filesz"]].tolist()
        self.sections = self._table(sections_at, section_bytes, section_count, SECTION)
        self._names = self.data(self.sections[names]) if names < len(self.sections) else b""

    def _table(self, offset: int, row_bytes: int, count: int, dtype: np.dtype) -> np.ndarray:
        if row_bytes != dtype.itemsize:
            return np.empty(0, dtype)
        if count > MOST_SECTIONS:
            raise ValueError(f"it has {count} sections or segments")
        return np.frombuffer(self.at(offset, count * dtype.itemsize), dtype)

    def data(self, section: np.void) -> bytes:
        """A section's content; empty if the file does not hold it."""
        kind, size = int(section["type"]), int(section["size"])
        if size > MOST_TABLE.get(kind, MOST_BYTES):
            raise ValueError(f"a section of type {kind} with {size} bytes is too large")
        return b"" if kind == SHT_NOBITS else self.at(int(section["offset"]), size)

    def notes(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(owner, type, description) of each note."""
        left = MOST_TABLE[SHT_NOTE]
        for section in self.of_type(SHT_NOTE):
            left -= int(section["size"])
            if left < 0:
                raise ValueError("its notes are too large")
            yield from parse_notes(self.data(section))

    def at(self, offset: int, size: int) -> bytes:
        """`size` bytes of the file at an offset; raises ValueError if it does not hold them, or too much was read."""
        self._left -= size
        if min(offset, size) < 0 or offset + size > self.bytes or self._left < 0:
            reason = "it is cut off, or its headers are wrong" if self._left >= 0 else "its tables are too large"
            raise ValueError(f"{reason} ({size} bytes at {offset} of {self.bytes})")
        return os.pread(self.file.fileno(), size, offset)

    def of_type(self, *types: int) -> np.ndarray:
        """The sections of these types."""
        return self.sections[np.isin(self.sections["type"], types)]

    def constants(self) -> list[tuple[int, int, int]]:
        """(address, file offset, size) of loaded sections other than code; `loads` if the file has no sections."""
        is_data = self.sections["flags"] & (SHF_ALLOC | SHF_EXECINSTR) == SHF_ALLOC
        kept = self.sections[is_data & (self.sections["type"] == SHT_PROGBITS)]
        rows: list[tuple[int, int, int]] = kept[["addr", "offset", "size"]].tolist()
        return rows or self.loads

    def named(self, name: str) -> np.void | None:
        """The section with this name; None if there is none."""
        return next((each for each in self.sections if self._names.startswith(name.encode() + b"\0", each["name"])), None)


def parse_notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """(owner, type, description) of each note in a section."""
    offset = 0
    while offset + NOTE.size <= len(data):
        name_bytes, size, kind = NOTE.unpack_from(data, offset)
        name, offset = data[offset + NOTE.size : offset + NOTE.size + name_bytes], offset + NOTE.size + (name_bytes + 3 & ~3)
        yield name.rstrip(b"\0"), kind, data[offset : offset + size]
        offset += size + 3 & ~3


def find_offsets(file: BinaryIO, text: bytes, begin: int, end: int) -> Iterator[int]:
    """Offsets of `text` between two offsets of a file, in pieces that fit the processor's cache, at most MOST_SEARCHED bytes.

    Holes of a sparse file are skipped.
    """
    number, left = file.fileno(), MOST_SEARCHED
    while begin < end and left > 0:
        try:
            begin = max(begin, os.lseek(number, begin, os.SEEK_DATA))
        except OSError:  # only a hole follows
            return
        piece = os.pread(number, max(0, min(PIECE + len(text) - 1, end - begin)), begin)
        index = piece.find(text)
        while index >= 0:
            yield begin + index
            index = piece.find(text, index + 1)
        begin, left = begin + PIECE, left - PIECE
