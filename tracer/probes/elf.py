"""What the tracer reads from ELF files: symbols, USDT sites, build ids, and the way from addresses to file offsets."""

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from tracer.errors import ProbeError
from tracer.probes.reach import way_to

SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
FUNCTION_TYPES = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
SEGMENT = np.dtype(
    [("type", "<u4"), ("flags", "<u4"), *((name, "<u8") for name in ("offset", "vaddr", "paddr", "filesz", "memsz", "align"))]
)
SECTION = np.dtype(
    [
        *(("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"), ("size", "<u8")),
        *(("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entsize", "<u8")),
    ]
)
PT_LOAD, SHT_NOTE = 1, 7
SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM


# What the compiler appends to the name of a copy that it made of a function.
CLONE = re.compile(rb"(\.(isra|constprop|lto_priv|llvm)\.\d+)+|\.\d+")
SIGNATURE = re.compile(rb"[^.]*")
MANGLED = re.compile(rb"[A-Za-z0-9_]*(\.(isra|constprop|lto_priv|llvm)\.\d+)*")
CHANGING = re.compile(rb"\.(isra|constprop)\.")


@dataclass(frozen=True)
class Symbol:
    """A function as it was found; `changed` where the compiler may have taken arguments away."""

    name: str
    offset: int
    changed: bool = False


@dataclass(eq=False)
class Binary:
    """An ELF file as far as probes need it. Offsets are file offsets, which is what uprobes take."""

    path: str
    machine: str
    build_id: str
    segments: list[tuple[int, int, int]]
    tables: list[tuple[np.ndarray, bytes]] = field(default_factory=list)
    usdt: dict[str, int] = field(default_factory=dict)
    _found: dict[str, "Symbol | None"] = field(default_factory=dict)

    def symbol(self, name: str) -> int | None:
        """The file offset of the function `name`, or None. Linkers let names share their tails, hence any match counts."""
        wanted = name.encode() + b"\0"
        for entries, strings in self.tables:
            places, at = [], strings.find(wanted)
            while at >= 0:
                places.append(at)
                at = strings.find(wanted, at + 1)
            if not places:
                continue
            functions = np.isin(entries["info"] & 0xF, FUNCTION_TYPES) & (entries["value"] > 0)
            for entry in entries[functions & np.isin(entries["name"], places)]:
                return self.file_offset(int(entry["value"]))
        return None

    def function_at(self, offset: int) -> str:
        """The name of the function that a file offset lies in, as far as symbols tell; else the offset."""
        address = next((offset - at + start for start, at, size in self.segments if at <= offset < at + size), -1)
        for entries, strings in self.tables:
            inside = (entries["value"] <= address) & (address - entries["value"] < entries["size"])
            for entry in entries[inside & np.isin(entries["info"] & 0xF, FUNCTION_TYPES)]:
                return strings[entry["name"] : strings.index(b"\0", entry["name"])].decode(errors="replace")
        return f"{offset:#x}"

    def find(self, name: str) -> "Symbol | None":
        """The function declared as `name`: under this name, as a local C++ function, or as the compiler's clone of either.

        A name that ends in * is the beginning of a mangled one, whatever its signature; one with a * within stands for all that
        differ there, of which the first by name is meant.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> "Symbol | None":
        if name.endswith("*"):
            return min(self._beginning_with(name[:-1].encode(), SIGNATURE), key=lambda symbol: symbol.name, default=None)
        if "*" in name:
            return self._like(*name.split("*"))
        plain = name.encode()
        if not any(plain in strings for _, strings in self.tables):
            return None
        exact = self.symbol(name)
        if exact is not None:
            return Symbol(name, exact)
        symbols: list[Symbol] = []
        for start in (plain, *(b"_Z%s%d%s" % (local, len(plain), plain) for local in (b"L", b""))):
            symbols += self._beginning_with(start, MANGLED if start != plain else CLONE)
        return min(symbols, key=lambda symbol: (symbol.changed, symbol.name), default=None)

    def _like(self, first: str, last: str) -> "Symbol | None":
        """A C or C++ function whose name begins and ends so, with lower-case letters, digits and _ between."""
        if not any(last.encode() in strings for _, strings in self.tables):
            return None
        sought = re.compile(rf"(?:_ZL?\d+)?{first}[a-z][a-z0-9_]*{last}(?:[RP]\d.*|\..*)?")
        named = self.functions(lambda name: bool(sought.fullmatch(name)) and not name.endswith(".cold"))
        offset = min(named, key=named.__getitem__, default=None)
        return Symbol(named[offset], offset, bool(CHANGING.search(named[offset].encode()))) if offset is not None else None

    def _beginning_with(self, start: bytes, rest: re.Pattern[bytes]) -> list["Symbol"]:
        """Functions whose name is `start` and what `rest` matches."""
        symbols = []
        for entries, strings in self.tables:
            position = strings.find(start)
            while position >= 0:
                full = strings[position : strings.index(0, position)]
                tail = rest.fullmatch(full[len(start) :])
                rows = entries[(entries["name"] == position) & np.isin(entries["info"] & 0xF, FUNCTION_TYPES)] if tail else ()
                for entry in rows:
                    offset = self.file_offset(int(entry["value"])) if entry["value"] else None
                    if offset is not None:
                        symbols.append(Symbol(full.decode(errors="replace"), offset, bool(CHANGING.search(full))))
                position = strings.find(start, position + 1)
        return symbols

    def mentions(self, name: str) -> bool:
        """Whether the file defines, or asks for, a symbol of this name."""
        return any(b"\0" + name.encode() + b"\0" in strings for _, strings in self.tables)

    def functions(self, wanted: Callable[[str], bool]) -> dict[int, str]:
        """File offset → name of the functions whose name is wanted; of several names for one place the first."""
        names: dict[int, str] = {}
        for entries, strings in self.tables:
            for entry in entries[np.isin(entries["info"] & 0xF, FUNCTION_TYPES) & (entries["value"] > 0)]:
                position = int(entry["name"])
                name = strings[position : strings.index(0, position)].decode(errors="replace")
                offset = self.file_offset(int(entry["value"])) if wanted(name) else None
                if offset is not None:
                    names.setdefault(offset, name)
        return names

    def begins_function(self, offset: int) -> bool:
        """Whether a function's symbol stands at this file offset."""
        for start, at, size in self.segments:
            if at <= offset < at + size:
                return any(bool((entries["value"] == offset - at + start).any()) for entries, _ in self.tables)
        return False

    def file_offset(self, address: int) -> int | None:
        """The file offset of a virtual address, or None where no segment holds it."""
        for start, offset, size in self.segments:
            if start <= address < start + size:
                return address - start + offset
        return None

    def bytes_at(self, offset: int, count: int = 1024) -> bytes:
        """Raw bytes at a file offset."""
        with open(way_to(self.path), "rb") as file:
            file.seek(offset)
            return file.read(count)


def _usdt(elf: ELFFile, section: Any, binary: Binary) -> dict[str, int]:
    """`provider:name` → file offset of the site, from the .note.stapsdt section."""
    base_section = elf.get_section_by_name(".stapsdt.base")
    sites = {}
    for note in section.iter_notes():
        data = note["n_descdata"]
        if note["n_name"] != "stapsdt" or len(data) < 24:
            continue
        address, base, _ = struct.unpack_from("<QQQ", data)
        provider, name, _ = (part.decode() for part in data[24:].split(b"\0")[:3])
        moved = base_section["sh_addr"] - base if base_section and base else 0
        offset = binary.file_offset(address + moved)
        if offset is not None:
            sites[f"{provider}:{name}"] = offset
    return sites


def _table(elf: ELFFile, kind: str, count: int, dtype: np.dtype) -> np.ndarray:
    """Headers of segments ("ph") or sections ("sh"), at once: pyelftools makes objects of all, which takes milliseconds.

    The target stands still meanwhile. Empty where the file is not for 64 bits.
    """
    if elf.header[f"e_{kind}entsize"] != dtype.itemsize:
        return np.empty(0, dtype)
    elf.stream.seek(elf.header[f"e_{kind}off"])
    return np.frombuffer(elf.stream.read(count * dtype.itemsize), dtype)


@lru_cache(maxsize=256)
def _read(path: str, _: tuple[int, int, int]) -> Binary:
    with open(way_to(path), "rb") as file:
        elf = ELFFile(file)
        loads = [row for row in _table(elf, "ph", elf.num_segments(), SEGMENT) if row["type"] == PT_LOAD]
        binary = Binary(path, elf.get_machine_arch(), "", [tuple(row[["vaddr", "offset", "filesz"]].tolist()) for row in loads])
        sections = _table(elf, "sh", elf.num_sections(), SECTION)
        for number in np.flatnonzero(np.isin(sections["type"], SYMBOL_TABLES)).tolist():
            entries, strings = (_bytes(file, sections[each]) for each in (number, sections[number]["link"]))
            binary.tables.append((np.frombuffer(entries, SYMBOL), strings))
        for number in np.flatnonzero(sections["type"] == SHT_NOTE).tolist():
            _read_notes(elf, elf.get_section(number), binary)
        return binary


def _bytes(file: BinaryIO, section: np.void) -> bytes:
    file.seek(int(section["offset"]))
    return file.read(int(section["size"]))


def _read_notes(elf: ELFFile, section: Any, binary: Binary) -> None:
    if section.name == ".note.stapsdt":
        binary.usdt = _usdt(elf, section, binary)
        return
    for note in section.iter_notes():
        if note["n_name"] == "GNU" and note["n_type"] == "NT_GNU_BUILD_ID":
            binary.build_id = note["n_desc"]


def stamp(path: str) -> tuple[int, int, int]:
    """What changes when a file does."""
    status = Path(way_to(path)).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_binary(path: str) -> Binary:
    """Parse an ELF file; parsed files are remembered until they change."""
    try:
        return _read(path, stamp(path))
    except (OSError, ELFError, UnicodeDecodeError, ValueError) as error:
        raise ProbeError(f"{path} cannot be read as a program or library: {error}") from None


def contains(path: str, text: bytes) -> bool:
    """Whether a file holds `text`: a quick look before an executable is parsed; remembered until the file changes."""
    try:
        return _contains(path, text, stamp(path))
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=256)
def _contains(path: str, text: bytes, _: tuple[int, int, int]) -> bool:
    with open(way_to(path), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0
