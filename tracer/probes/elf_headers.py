"""The tables of an ELF file's headers, read within bounds: sizes may lie, files be sparse, truncated or of another kind."""

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

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
DAMAGE: tuple[type[Exception], ...] = (OSError, ELFError, ArithmeticError, AssertionError, AttributeError, LookupError)
DAMAGE += (MemoryError, RecursionError, TypeError, ValueError, struct.error)
"""What reading a damaged file can raise, pyelftools included."""
NOTE = struct.Struct("<III")
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
LITTLE_64 = b"\x7fELF\x02\x01"  # the first bytes of a 64-bit little-endian file
MACHINES = {62: "x64", 183: "AArch64"}  # pyelftools' names
RESERVED = 0xFF00  # from this value on, the number of sections or segments is stored elsewhere


@contextlib.contextmanager
def as_probe_error(path: str) -> Iterator[None]:
    """Turn whatever damage of an ELF file causes into a ProbeError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error}" or type(error).__name__
        raise ProbeError(f"{path} cannot be read as a program or library: {reason}") from None


class FileHeader(NamedTuple):
    """The header of an ELF file; segments and sections as (file offset, bytes of each, count)."""

    machine: str
    segments: tuple[int, int, int]
    sections: tuple[int, int, int]
    names_at: int

    @classmethod
    def of(cls, file: BinaryIO) -> "FileHeader":
        """Read the header: directly for ordinary files of known machines, otherwise by pyelftools, which takes a millisecond."""
        raw = file.read(FILE_HEADER.size)
        if raw.startswith(LITTLE_64) and len(raw) == FILE_HEADER.size:
            _, _, machine, _, _, first_segment, first_section, *_ = header = FILE_HEADER.unpack(raw)
            segment_bytes, segment_count, section_bytes, section_count, names_at = header[-5:]
            if machine in MACHINES and max(segment_count, section_count, names_at) < RESERVED and section_count:
                segments = first_segment, segment_bytes, segment_count
                sections = first_section, section_bytes, section_count
                return cls(MACHINES[machine], segments, sections, names_at)
        elf = ELFFile(file)
        segments = elf["e_phoff"], elf["e_phentsize"], elf.num_segments()
        sections = elf["e_shoff"], elf["e_shentsize"], elf.num_sections()
        return cls(elf.get_machine_arch(), segments, sections, elf.get_shstrndx())


class Headers:
    """An ELF file's segments and sections, each table read at once: the target is stopped meanwhile, and pyelftools would
    create an object for each entry.

    `loads`: (address, file offset, size) of loaded segments. Everything is empty if the file is not a 64-bit one. Reads raise
    ValueError for what the file does not hold, and once they exceed MOST_BYTES together: headers may lie, and files be sparse.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.bytes = file, os.fstat(file.fileno()).st_size
        self._left = MOST_BYTES
        header = FileHeader.of(file)
        self.machine = header.machine
        self.segments = segments = self._table(*header.segments, SEGMENT)
        self.loads = segments[segments["type"] == PT_LOAD][["vaddr", "offset", "filesz"]].tolist()
        self.sections = self._table(*header.sections, SECTION)
        number = header.names_at
        self._names = self.data(self.sections[number]) if number < len(self.sections) else b""

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
