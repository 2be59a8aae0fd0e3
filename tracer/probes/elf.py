"""What the tracer reads from ELF files: symbols, USDT sites, build ids, and the mapping of addresses to file offsets."""

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from tracer.probes import anchors
from tracer.probes.elf_headers import DAMAGE, SYMBOL, SYMBOL_TABLES, Headers, as_probe_error, find_offsets
from tracer.probes.reach import opening_path
from tracer.probes.symbol_names import SymbolNames
from tracer.recording.user_files import open_regular

FUNCTION_TYPES = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
STUB = "@plt"
NT_BUILD_ID = 3

# What the compiler appends to the names of a function's clones.
CLONE = re.compile(rb"(\.(isra|constprop|lto_priv|llvm)\.\d+)+|\.\d+")
SIGNATURE = re.compile(rb"[^.]*")
MANGLED = re.compile(rb"[A-Za-z0-9_]*(\.(isra|constprop|lto_priv|llvm)\.\d+)*")
CHANGING = re.compile(rb"\.(isra|constprop)\.")


@dataclass(frozen=True)
class Symbol:
    """A function found in a file; `changed` if the compiler may have removed arguments."""

    name: str
    offset: int
    changed: bool = False


def is_function(entry: np.void) -> bool:
    """Whether a symbol is a function that the file defines."""
    return int(entry["info"]) & 0xF in FUNCTION_TYPES and bool(entry["value"])


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

    @cached_property
    def names(self) -> list[SymbolNames]:
        """The names of each symbol table."""
        return [SymbolNames(entries["name"], strings) for entries, strings in self.tables]

    def symbol(self, name: str) -> int | None:
        """The file offset of the function `name`, or None. Linkers merge names with common tails, hence any match counts."""
        for names, (entries, _) in zip(self.names, self.tables, strict=True):
            rows = [row for row in names.beginning_with(name.encode() + b"\0") if is_function(entries[row])]
            if rows:
                return self.file_offset(int(entries[min(rows)]["value"]))
        return None

    def function_at(self, offset: int) -> str:
        """The name of the function that contains a file offset; the offset itself if no symbol covers it."""
        address = next((offset - at + start for start, at, size in self.segments if at <= offset < at + size), -1)
        for entries, strings in self.tables:
            inside = (entries["value"] <= address) & (address - entries["value"] < entries["size"])
            for entry in entries[inside & np.isin(entries["info"] & 0xF, FUNCTION_TYPES)]:
                return strings[entry["name"] : strings.index(b"\0", entry["name"])].decode(errors="replace")
        return f"{offset:#x}"

    def function_bytes(self, offset: int) -> bytes:
        """The code of the function at a file offset; empty if no symbol covers it."""
        address = next((offset - at + start for start, at, size in self.segments if at <= offset < at + size), -1)
        sizes = [int(entries["size"][entries["value"] == address].max(initial=0)) for entries, _ in self.tables]
        return self.bytes_at(offset, max(sizes, default=0))

    def find(self, name: str) -> "Symbol | None":
        """The function declared as `name`: under this name, as a local C++ function, or a compiler's clone of either.

        NAME@plt is the stub through which the file calls an imported function. A name that ends in * is the prefix of a
        mangled name with any signature; of the functions that match a name with * inside, the first by name is taken.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> "Symbol | None":
        if name.endswith(STUB):
            imported = name.removesuffix(STUB)
            stub = anchors.find_import_stub(self.path, imported) if self.mentions(imported) else None
            return Symbol(name, stub) if stub is not None else None
        if name.endswith("*"):
            return min(self.beginning_with(name[:-1].encode(), SIGNATURE), key=lambda symbol: symbol.name, default=None)
        if "*" in name:
            return self._like(*name.split("*"))
        plain = name.encode()
        exact = self.symbol(name)
        if exact is not None:
            return Symbol(name, exact)
        symbols: list[Symbol] = []
        for start in (plain, *(b"_Z%s%d%s" % (local, len(plain), plain) for local in (b"L", b""))):
            symbols += self.beginning_with(start, MANGLED if start != plain else CLONE)
        return min(symbols, key=lambda symbol: (symbol.changed, symbol.name), default=None)

    def _like(self, first: str, last: str) -> "Symbol | None":
        """A C or C++ function whose name has this beginning and end, with lower-case letters, digits and _ between."""
        if not any(last.encode() in strings for _, strings in self.tables):
            return None
        sought = re.compile(rf"(?:_ZL?\d+)?{first}[a-z][a-z0-9_]*{last}(?:[RP]\d.*|\..*)?")
        named = self.functions(lambda name: bool(sought.fullmatch(name)) and not name.endswith(".cold"))
        offset = min(named, key=named.__getitem__, default=None)
        return Symbol(named[offset], offset, bool(CHANGING.search(named[offset].encode()))) if offset is not None else None

    def beginning_with(self, start: bytes, rest: re.Pattern[bytes]) -> list["Symbol"]:
        """Functions whose name is `start` followed by a match of `rest`."""
        symbols = []
        for names, (entries, _) in zip(self.names, self.tables, strict=True):
            for row in names.beginning_with(start):
                full, entry = names.name(row), entries[row]
                wanted = is_function(entry) and rest.fullmatch(full, len(start))
                offset = self.file_offset(int(entry["value"])) if wanted else None
                if offset is not None:
                    symbols.append(Symbol(full.decode(errors="replace"), offset, bool(CHANGING.search(full))))
        return symbols

    def mentions(self, name: str) -> bool:
        """Whether the file defines or imports a symbol of this name."""
        return any(names.beginning_with(name.encode() + b"\0") for names in self.names)

    def functions(self, wanted: Callable[[str], bool]) -> dict[int, str]:
        """File offset → name of the functions whose name is wanted; the first of several names for one offset."""
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
        """Whether a function's symbol has this file offset."""
        for start, at, size in self.segments:
            if at <= offset < at + size:
                return any(bool((entries["value"] == offset - at + start).any()) for entries, _ in self.tables)
        return False

    def file_offset(self, address: int) -> int | None:
        """The file offset of a virtual address; None if no segment contains it."""
        for start, offset, size in self.segments:
            if start <= address < start + size:
                return address - start + offset
        return None

    def bytes_at(self, offset: int, count: int = 1024) -> bytes:
        """Raw bytes at a file offset."""
        with open_regular(opening_path(self.path)) as file:
            return os.pread(file.fileno(), count, offset)


def _add_usdt_site(headers: Headers, data: bytes, binary: Binary) -> None:
    """Record a USDT note's site as `provider:name` → file offset."""
    base_section = headers.named(".stapsdt.base")
    address, base, _ = struct.unpack_from("<QQQ", data)
    provider, name, _ = (part.decode() for part in data[24:].split(b"\0")[:3])
    moved = int(base_section["addr"]) - base if base_section is not None and base else 0
    offset = binary.file_offset(address + moved)
    if offset is not None:
        binary.usdt[f"{provider}:{name}"] = offset


@lru_cache(maxsize=256)
def _parse_binary(path: str, _: tuple[int, int, int]) -> Binary:
    with open_regular(opening_path(path)) as file:
        headers = Headers(file)
        binary = Binary(path, headers.machine, "", headers.loads)
        for table in headers.of_type(*SYMBOL_TABLES):
            entries, strings = headers.data(table), headers.data(headers.sections[table["link"]])
            binary.tables.append((np.frombuffer(entries, SYMBOL), strings))
        for whose, kind, data in headers.notes():
            if whose == b"stapsdt" and len(data) >= 24:
                _add_usdt_site(headers, data, binary)
            elif (whose, kind) == (b"GNU", NT_BUILD_ID):
                binary.build_id = data.hex()
        return binary


def file_stamp(path: str) -> tuple[int, int, int]:
    """A value that changes when the file does."""
    status = Path(opening_path(path)).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_binary(path: str) -> Binary:
    """Parse an ELF file; parsed files are cached until they change."""
    with as_probe_error(path):
        return _parse_binary(path, file_stamp(path))


def file_contains(path: str, text: bytes) -> bool:
    """Whether a file contains `text`: a quick check before an executable is parsed, cached until the file changes."""
    try:
        return _search_file(path, text, file_stamp(path))
    except DAMAGE:
        return False


@lru_cache(maxsize=256)
def _search_file(path: str, text: bytes, _: tuple[int, int, int]) -> bool:
    with open_regular(opening_path(path)) as file:
        return next(find_offsets(file, text, 0, os.fstat(file.fileno()).st_size), -1) >= 0
