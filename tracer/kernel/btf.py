"""BTF: record layouts from an object file, and field offsets from the running kernel."""

import contextlib
import os
import struct
from pathlib import Path

import numpy as np

from tracer.errors import TracerError
from tracer.probes.elf_headers import Headers
from tracer.recording.user_files import open_regular, read_bytes

INT, PTR, ARRAY, STRUCT, UNION, ENUM = 1, 2, 3, 4, 5, 6
TRANSPARENT = {8, 9, 10, 11, 17, 18}  # typedef, volatile, const, restrict, decl tag, type tag
MEMBER_BYTES = {STRUCT: 12, UNION: 12, ENUM: 8, 13: 8, 15: 12, 19: 12}
FIXED_BYTES = {INT: 4, ARRAY: 12, 14: 4, 17: 4}


class BtfError(TracerError):
    """The BTF data is missing, damaged, or lacks a type."""


MAGIC = b"\x9f\xeb"
MOST_BYTES = 1 << 30
"""Of a file with types; a kernel with debugging information has about half of that."""


def check_file(path: Path) -> None:
    """Raise BtfError if a file is neither raw BTF nor an ELF file with a BTF section."""
    try:
        blob_of(path)
    except OSError as error:
        raise BtfError(f"--btf {path} cannot be read: {error.strerror}") from None
    except BtfError as error:
        raise BtfError(f"--btf {error}") from None


def blob_of(path: Path) -> bytes:
    """The BTF in a file, raw or in an ELF section."""
    if path.is_relative_to("/sys"):
        return path.read_bytes()
    with open_regular(path, MOST_BYTES) as file, contextlib.suppress(ValueError):
        if os.pread(file.fileno(), len(MAGIC), 0) == MAGIC:
            return read_bytes(path, MOST_BYTES)
        headers = Headers(file)
        section = headers.named(".BTF")
        if section is not None:
            return headers.data(section)
    raise BtfError(f"{path} contains no BTF, neither raw nor in an ELF section: see docs/kernels.md")


class Btf:
    """The types of one BTF blob, by id and by name."""

    def __init__(self, blob: bytes):
        magic, _, _, header, type_off, type_len, str_off, str_len = struct.unpack_from("<HBBIIIII", blob)
        if magic != 0xEB9F:
            raise BtfError("not little-endian BTF data")
        self.strings = blob[header + str_off : header + str_off + str_len]
        self.data = blob[header + type_off : header + type_off + type_len]
        self.offsets = [0]
        self.by_name: dict[tuple[int, str], int] = {}
        position = 0
        while position < len(self.data):
            name, info = struct.unpack_from("<II", self.data, position)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            if kind in (STRUCT, UNION, ENUM) and name:
                self.by_name.setdefault((kind, self.string(name)), len(self.offsets))
            self.offsets.append(position)
            position += 12 + FIXED_BYTES.get(kind, 0) + MEMBER_BYTES.get(kind, 0) * count

    @classmethod
    def of_file(cls, path: Path) -> "Btf":
        """Types of a raw BTF file, or of an ELF file such as a compiled BPF object or a kernel."""
        return cls(blob_of(path))

    def string(self, offset: int) -> str:
        """The NUL-terminated name at `offset` of the string section."""
        return self.strings[offset : self.strings.index(0, offset)].decode()

    def head(self, type_id: int) -> tuple[str, int, int, int, int]:
        """(name, kind, count, size or type, position after this header) of a type."""
        position = self.offsets[type_id]
        name, info, size = struct.unpack_from("<III", self.data, position)
        return self.string(name), info >> 24 & 0x1F, info & 0xFFFF, size, position + 12

    def find(self, kind: int, name: str) -> int:
        """The id of the struct, union or enum called `name`."""
        try:
            return self.by_name[kind, name]
        except KeyError:
            raise BtfError(f"no type called {name}") from None

    def members(self, type_id: int) -> list[tuple[str, int, int]]:
        """(name, type id, byte offset) of each member of a struct."""
        _, _, count, _, position = self.head(type_id)
        rows = [struct.unpack_from("<III", self.data, position + 12 * i) for i in range(count)]
        return [(self.string(name), kind, (offset & 0xFFFFFF) // 8) for name, kind, offset in rows]

    def enums(self) -> list[str]:
        """The names of all enums."""
        return [name for kind, name in self.by_name if kind == ENUM]

    def enum(self, name: str) -> dict[str, int]:
        """Name → value of an enum without negative values."""
        _, _, count, _, position = self.head(self.find(ENUM, name))
        rows = [struct.unpack_from("<II", self.data, position + 8 * i) for i in range(count)]
        return {self.string(text): value for text, value in rows}

    def offset(self, struct_name: str, member: str) -> int:
        """Byte offset of a struct's member, including members of its anonymous structs and unions."""
        offset = self._offset(self.find(STRUCT, struct_name), member)
        if offset is None:
            raise BtfError(f"struct {struct_name} has no member {member}")
        return offset

    def _offset(self, type_id: int, member: str) -> int | None:
        for name, kind, offset in self.members(type_id):
            if name == member:
                return offset
            if not name and self.head(kind)[1] in (STRUCT, UNION):
                inner = self._offset(kind, member)
                if inner is not None:
                    return offset + inner
        return None

    def dtype(self, type_id: int) -> np.dtype:
        """The NumPy dtype of a type; character arrays become byte strings."""
        _, kind, _, size, position = self.head(type_id)
        if kind in TRANSPARENT:
            return self.dtype(size)
        if kind == INT:
            encoding = struct.unpack_from("<I", self.data, position)[0] >> 24
            return np.dtype(f"<{'i' if encoding & 1 else 'u'}{size}")
        if kind == 16:
            return np.dtype(f"<f{size}")
        if kind in (PTR, ENUM):
            return np.dtype("<u8" if kind == PTR else f"<u{size}")
        if kind == ARRAY:
            element, _, length = struct.unpack_from("<III", self.data, position)
            name = self.head(element)[0]
            return np.dtype(f"S{length}") if name == "char" else np.dtype((self.dtype(element), (length,)))
        if kind == STRUCT:
            rows = self.members(type_id)
            names, types, offsets = zip(*[(n, self.dtype(t), o) for n, t, o in rows], strict=True)
            return np.dtype({"names": names, "formats": types, "offsets": offsets, "itemsize": size})
        raise BtfError(f"cannot express BTF kind {kind} as a NumPy dtype")
