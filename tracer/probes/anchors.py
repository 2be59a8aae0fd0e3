"""Finds functions of a stripped program by what their code refers to: a text in its data, or an imported function.

The starts of functions come from .eh_frame_hdr, which `strip` keeps because unwinding needs it. References are found by
evaluating the 32-bit displacements of all calls, jumps and address loads of the code at once.
"""

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tracer.probes.elf_headers import PT_LOAD, RELOCATION, SYMBOL, SYMBOL_TABLES, Headers, as_probe_error
from tracer.probes.reach import opening_path
from tracer.recording.user_files import open_regular

PT_GNU_EH_FRAME, SHT_RELA = 0x6474E550, 4
EXECUTABLE = 1  # PF_X
MOST_LOADED = 1 << 30  # bytes of a program that is searched
EH_HEADER = 12  # version, three encodings, pointer to .eh_frame, count of the table that follows
PCREL_TABLE = b"\x01\x1b\x03\x3b"  # the encodings that linkers write
ENTRY, BEGIN_AT = struct.Struct("<IIiI"), 8  # of .eh_frame: length, place of the CIE, begin relative to itself, bytes of code
STUB_STARTS = (0, 1, 4, 5)  # bytes before a stub's jump: none, a prefix, endbr64, both
ARM64_WINDOW = 8  # instructions after adrp in which the one that adds the low bits is looked for


@dataclass(eq=False)
class Code:
    """One executable segment."""

    address: int
    offset: int
    data: np.ndarray

    @cached_property
    def x86_displacements(self) -> tuple[np.ndarray, np.ndarray]:
        """(place, target), from the segment's begin, of the 32-bit displacement behind each opcode of a call, jump or lea."""
        before, last = self.data[:-5], self.data[1:-4]
        hits = (last & 0xFE == 0xE8) | (before == 0x0F) & (last & 0xF0 == 0x80)
        hits |= (before == 0x8D) & (last & 0xC7 == 0x05) | (before == 0xFF) & ((last == 0x15) | (last == 0x25))
        places = np.flatnonzero(hits) + 2
        words: np.ndarray = np.ndarray((max(len(self.data) - 3, 0),), "<i4", self.data, strides=(1,))
        return places, places + 4 + words[places]


class Image:
    """A program's code, the start addresses of its functions, and its data, by address."""

    def __init__(self, path: str):
        with open_regular(opening_path(path)) as file:
            headers = Headers(file)
            self.raw = np.memmap(file, np.uint8, "r")
            self.machine, self.loads = headers.machine, headers.loads
            loaded = headers.segments[headers.segments["type"] == PT_LOAD]
            if sum(size for *_, size in self.loads) > MOST_LOADED:
                raise ValueError("it loads too much for a search")
            code = loaded[loaded["flags"] & EXECUTABLE > 0][["vaddr", "offset", "filesz"]].tolist()
            self.codes = [Code(address, offset, self.raw[offset : offset + size]) for address, offset, size in code]
            tables = headers.segments[headers.segments["type"] == PT_GNU_EH_FRAME][["vaddr", "offset"]].tolist()
            self.starts: np.ndarray
            self.starts, self._entries = self._table(*tables[0]) if tables else self._table(0, 0)
            self.slots = import_slots(headers)
        self.found: dict[str, int | None] = {}  # file offset of the function that an anchor, in words, describes

    def _table(self, address: int, offset: int) -> np.ndarray:
        """(start, address of the entry in .eh_frame) of each piece of code, in order."""
        if bytes(self.raw[offset : offset + 4]) != PCREL_TABLE:
            return np.empty((2, 0), np.int64)
        rows = offset + EH_HEADER
        count = struct.unpack_from("<I", self.raw[offset + 8 : rows].tobytes())[0]
        table = self.raw[rows : rows + 8 * count].view("<i4").reshape(-1, 2).astype(np.int64) + address
        return table[np.argsort(table[:, 0])].T

    def file_offset(self, address: int) -> int:
        """The file offset of a loaded address; -1 if it is not loaded."""
        return next((address - start + offset for start, offset, size in self.loads if start <= address < start + size), -1)

    def address(self, offset: int) -> int:
        """The loaded address of a file offset; -1 if it is not loaded."""
        return next((offset - at + start for start, at, size in self.loads if at <= offset < at + size), -1)

    def texts(self, text: str) -> list[int]:
        """All addresses of a NUL-terminated text."""
        wanted, addresses = text.encode() + b"\0", []
        for address, offset, size in self.loads:
            data = self.raw[offset : offset + size].tobytes()
            position = data.find(wanted)
            while position >= 0:
                addresses.append(address + position)
                position = data.find(wanted, position + 1)
        return addresses

    def function_of(self, address: int) -> int:
        """The start of the function that contains an address."""
        row = int(np.searchsorted(self.starts, address, "right")) - 1
        return int(self.starts[row]) if row >= 0 else -1

    def functions_of(self, addresses: list[int]) -> set[int]:
        """The starts of the functions that contain these addresses."""
        return {self.function_of(address) for address in addresses} - {-1}

    def end_of(self, start: int) -> int:
        """The start of the next function."""
        row = int(np.searchsorted(self.starts, start, "right"))
        return int(self.starts[row]) if row < len(self.starts) else start + 1

    def piece_at(self, address: int) -> tuple[int, int]:
        """(start, end) of the code of one unwinding entry that contains an address; (-1, -1) if there is none.

        It is a function, or a part of one that the compiler moved away.
        """
        row = int(np.searchsorted(self.starts, address, "right")) - 1
        at = self.file_offset(int(self._entries[row])) if row >= 0 else -1
        entry = self.raw[at : at + ENTRY.size].tobytes() if at >= 0 else b""
        if len(entry) < ENTRY.size:
            return -1, -1
        _, _, begin, size = ENTRY.unpack(entry)
        start = int(self._entries[row]) + BEGIN_AT + begin
        return (start, start + size) if start == self.starts[row] and address < start + size else (-1, -1)


def import_slots(headers: Headers) -> dict[str, int]:
    """Imported function → address of the slot that holds its address."""
    slots: dict[str, int] = {}
    for section in headers.of_type(SHT_RELA):
        table = headers.sections[section["link"]]
        if table["type"] not in SYMBOL_TABLES:
            continue
        names, strings = np.frombuffer(headers.data(table), SYMBOL)["name"], headers.data(headers.sections[table["link"]])
        relocations = np.frombuffer(headers.data(section), RELOCATION)
        named = relocations[relocations["info"] >> np.uint64(32) > 0]
        for symbol, slot in zip((named["info"] >> np.uint64(32)).tolist(), named["offset"].tolist(), strict=True):
            position = int(names[symbol])
            slots[strings[position : strings.index(0, position)].decode(errors="replace")] = slot
    return slots


def x86_references(image: Image, low: int, high: int) -> list[tuple[int, int, int]]:
    """(address of a 32-bit displacement, the two bytes before it) where code calls, jumps to or takes low .. high."""
    references: list[tuple[int, int, int]] = []
    for code in image.codes:
        places, targets = code.x86_displacements
        hits = places[(targets >= low - code.address) & (targets < high - code.address)].tolist()
        references += [(code.address + i, int(code.data[i - 2]), int(code.data[i - 1])) for i in hits]
    return references


def x86_loads(image: Image, target: int) -> list[int]:
    """Where code takes an address: `lea target(%rip), reg`, or `mov $target, reg` in a program at a fixed address."""
    relative = [at for at, code, mode in x86_references(image, target, target + 1) if code == 0x8D and mode & 0xC7 == 0x05]
    absolute = []
    if target < 1 << 31:
        for code in image.codes:
            data, wanted = code.data.tobytes(), struct.pack("<I", target)
            position = data.find(wanted)
            while position > 0:
                if 0xB8 <= data[position - 1] <= 0xBF:
                    absolute.append(code.address + position)
                position = data.find(wanted, position + 1)
    return relative + absolute


def x86_transfers(image: Image, low: int, high: int, calls: bool, jumps: bool) -> list[int]:
    """Where code calls, or jumps to, an address of low .. high."""
    return [
        at
        for at, before, last in x86_references(image, low, high)
        if (calls and last == 0xE8) or (jumps and (last == 0xE9 or (before == 0x0F and last & 0xF0 == 0x80)))
    ]


def x86_stubs(image: Image, slot: int) -> list[int]:
    """Possible start addresses of stubs that jump through the slot of an imported function."""
    jumps = [at - 2 for at, code, mode in x86_references(image, slot, slot + 1) if (code, mode) == (0xFF, 0x25)]
    return [jump - before for jump in jumps for before in STUB_STARTS]


def x86_uses(image: Image, slot: int, calls: bool, jumps: bool) -> list[int]:
    """Where code calls, or jumps to, the imported function of a slot, through a stub or through the slot itself."""
    through = x86_references(image, slot, slot + 1)
    transfers = [at for at, code, mode in through if calls and (code, mode) == (0xFF, 0x15)]
    for jump in [at - 2 for at, code, mode in through if (code, mode) == (0xFF, 0x25)]:
        starts = [jump - before for before in STUB_STARTS]
        if any(x86_transfers(image, start, start + 1, True, True) for start in starts):
            transfers += [at for start in starts for at in x86_transfers(image, start, start + 1, calls, jumps)]
        elif jumps:
            transfers.append(jump)
    return transfers


def arm64_pairs(image: Image, target: int, low_bits: tuple[int, int, int]) -> list[int]:
    """Where adrp forms an address's page and a later instruction, matched by (mask, value, offset shift), adds its low bits."""
    mask, value, shift = low_bits
    references = []
    for code in image.codes:
        words = code.data[: len(code.data) // 4 * 4].view("<u4").astype(np.int64)
        addresses = np.arange(len(words), dtype=np.int64) * 4 + code.address
        pages = ((words >> 5 & 0x7FFFF) << 2 | words >> 29 & 3) << 43 >> 31
        hits = np.flatnonzero((words & 0x9F000000 == 0x90000000) & ((addresses & ~0xFFF) + pages == target & ~0xFFF))
        for i in hits.tolist():
            for word in words[i + 1 : i + 1 + ARM64_WINDOW].tolist():
                same = word >> 5 & 31 == int(words[i]) & 31
                if word & 0x9F00001F == int(words[i]) & 0x9F00001F:
                    break  # the register is overwritten: the next stub begins
                if word & mask == value and same and (word >> 10 & 0xFFF) << shift == target & 0xFFF:
                    references.append(int(addresses[i]))
                    break
    return references


def arm64_loads(image: Image, target: int) -> list[int]:
    """Where code takes an address with adrp and add."""
    return arm64_pairs(image, target, (0xFFC00000, 0x91000000, 0))


def arm64_transfers(image: Image, low: int, high: int, calls: bool, jumps: bool) -> list[int]:
    """Where code calls (bl), or jumps to (b), an address of low .. high."""
    transfers: list[int] = []
    for code in image.codes:
        words = code.data[: len(code.data) // 4 * 4].view("<u4").astype(np.int64)
        addresses = np.arange(len(words), dtype=np.int64) * 4 + code.address
        target = addresses + ((words & 0x3FFFFFF) << 38 >> 36)
        kind = words & 0xFC000000
        wanted = (kind == 0x94000000) & calls | (kind == 0x14000000) & jumps
        transfers += addresses[wanted & (target >= low) & (target < high)].tolist()
    return transfers


def arm64_stubs(image: Image, slot: int) -> list[int]:
    """The stubs of an imported function: the code that loads its slot."""
    return arm64_pairs(image, slot, (0xFFC00000, 0xF9400000, 3))


def arm64_uses(image: Image, slot: int, calls: bool, jumps: bool) -> list[int]:
    """Where code calls, or jumps to, the stub of an imported function."""
    return [at for stub in arm64_stubs(image, slot) for at in arm64_transfers(image, stub, stub + 1, calls, jumps)]


MACHINES = {"x64": (x86_loads, x86_transfers, x86_uses), "AArch64": (arm64_loads, arm64_transfers, arm64_uses)}
STUBS = {"x64": x86_stubs, "AArch64": arm64_stubs}


def whole_function(image: Image, start: int) -> int:
    """The function that the code at `start` belongs to: `start`, or for a part that the compiler split off, which nothing calls,
    the only function that jumps into it.
    """
    transfers = MACHINES[image.machine][1]
    if transfers(image, start, start + 1, True, False):
        return start
    into = image.functions_of(transfers(image, start, image.end_of(start), False, True)) - {start}
    return into.pop() if len(into) == 1 else start


def matching_functions(image: Image, anchor: dict[str, Any]) -> set[int]:
    """Addresses of the functions that refer to everything that an anchor names."""
    loads, _, uses = MACHINES[image.machine]
    sets: list[set[int]] = []
    for text in anchor.get("strings", ()):
        places = [place for address in image.texts(text) for place in loads(image, address)]
        sets.append({whole_function(image, start) for start in image.functions_of(places)})
    for key in ("calls", "jumps"):
        if key in anchor:
            slot = image.slots.get(anchor[key])
            places = uses(image, slot, key == "calls", key == "jumps") if slot else []
            sets.append(image.functions_of(places))
    return set.intersection(*sets) if sets else set()


@lru_cache(maxsize=4)
def _cached_image(path: str, stamp: tuple[int, int]) -> Image:
    return Image(path)


def image_of(path: str) -> Image:
    """A program's image; raises ProbeError if it cannot be read."""
    with as_probe_error(path):
        status = Path(opening_path(path)).stat()
        return _cached_image(path, (status.st_ino, status.st_mtime_ns))


def find_offset(path: str, anchor: dict[str, Any]) -> int | None:
    """The file offset of the only function that an anchor describes; None if there is none or more than one."""
    image, key = image_of(path), describe_anchor(anchor)
    if key not in image.found:
        functions = matching_functions(image, anchor) if image.machine in MACHINES and len(image.starts) else set()
        image.found[key] = image.file_offset(functions.pop()) if len(functions) == 1 else None
    return image.found[key]


def find_import_stub(path: str, function: str) -> int | None:
    """The file offset of the stub through which code calls an imported function; None if there is none."""
    image = image_of(path)
    slot = image.slots.get(function) if image.machine in MACHINES else None
    if slot is None:
        return None
    transfers, starts = MACHINES[image.machine][1], STUBS[image.machine](image, slot)
    return next((image.file_offset(start) for start in starts if transfers(image, start, start + 1, True, True)), None)


def describe_anchor(anchor: dict[str, Any]) -> str:
    """The anchor in words, for the plan."""
    parts = [f"refers to {text!r}" for text in anchor.get("strings", ())]
    parts += [f"{key} {anchor[key]}" for key in ("calls", "jumps") if key in anchor]
    return " and ".join(parts).replace("jumps ", "jumps to ")
