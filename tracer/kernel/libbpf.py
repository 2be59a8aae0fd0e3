"""The default loader: compiled CO-RE objects through libbpf, called by ctypes."""

import ctypes
import errno
import itertools
import os
import re
import struct
import sys
from collections.abc import Iterable
from ctypes import byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path

from tracer.errors import ProbeError, RequirementError
from tracer.kernel.features import Offered, offered
from tracer.probes.denials import few_descriptors, why_denied
from tracer.probes.elf import read_binary
from tracer.probes.uprobes import KPROBE_PROGRAM, UPROBE_MULTI, has_multi_links, load_program

STATS_RUN_TIME = 0
LOG_CALLBACK = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)
WARNING = 0  # libbpf's level for error messages
MESSAGE_BYTES = 1 << 20
REFUSED = re.compile(r"^libbpf: prog '(\w+)': (?:(BPF program load failed)|failed to|relo #\d+: failed)", re.M)
LAST_LINES = 3  # of the verifier's log, which ends with the reason for the refusal
LONGEST_LINE = 160
COOKIE_MARK = 0x0C00C1E5  # placeholder for the cookie in programs for kernels without cookies (bpf/custom.bpf.c)
MOVE_NUMBER = 0xB7
INSTRUCTION = struct.Struct("<BBhi")


class Refused(ProbeError):
    """The kernel refused a program after accepting others."""

    def __init__(self, program: str, why: str, accepted: set[str]):
        super().__init__(f"the kernel refused the BPF program {program}: {why}; see `python -m tracer doctor`")
        self.program, self.why, self.accepted = program, why, accepted


def last_lines(text: str) -> str:
    """The last lines of the verifier's log before its statistics."""
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("libbpf:", "processed ", "-- "))]
    return " | ".join(line[:LONGEST_LINE] for line in said[-LAST_LINES:])


class ProgramInfo(ctypes.Structure):
    """The head of struct bpf_prog_info, up to the run statistics."""

    _fields_ = [
        ("type", c_uint32),
        ("id", c_uint32),
        ("before_stats", ctypes.c_uint8 * 184),
        ("run_time_ns", c_uint64),
        ("run_cnt", c_uint64),
        ("recursion_misses", c_uint64),
    ]


def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise RequirementError("libbpf 1.x is not installed; on Debian: apt-get install libbpf1") from None
    pointers = ("open_file", "next_program", "find_map_by_name")
    for name in (*(f"bpf_object__{name}" for name in pointers), "bpf_map__initial_value", "bpf_program__insns"):
        getattr(lib, name).restype = c_void_p
    lib.bpf_program__insn_cnt.restype = ctypes.c_size_t
    lib.bpf_program__name.restype = c_char_p
    return lib


class Kernel:
    """Thin wrappers for calls on programs and maps by file descriptor; shared by both loaders."""

    def __init__(self) -> None:
        self.lib = _library()
        self.messages: list[str] = []
        self._print = LOG_CALLBACK(self._note)
        self.lib.libbpf_set_print(self._print)

    def _note(self, level: int, text: bytes, args: int) -> int:
        """Keep libbpf's warnings; `args` is a va_list, which both architectures pass as an address."""
        if level == WARNING:
            message = ctypes.create_string_buffer(MESSAGE_BYTES)
            ctypes.CDLL(None).vsnprintf(message, ctypes.c_size_t(MESSAGE_BYTES), text, c_void_p(args))
            self.messages.append(message.value.decode(errors="replace"))
        return 0

    @cached_property
    def offered(self) -> Offered:
        """Features that this kernel offers to programs."""
        before = self.messages
        self.messages = []
        answer = offered(self.lib)
        self.messages = before
        return answer

    def update(self, map_fd: int, key: bytes, value: bytes) -> None:
        """Set one map element."""
        if self.lib.bpf_map_update_elem(map_fd, key, value, c_uint64(0)):
            raise ProbeError(f"cannot write a BPF map: {os.strerror(ctypes.get_errno())}")

    def delete(self, map_fd: int, key: bytes) -> None:
        """Remove one map element if it exists."""
        self.lib.bpf_map_delete_elem(map_fd, key)

    def lookup(self, map_fd: int, key: bytes, value_bytes: int) -> bytes:
        """One map element's value; zeros if absent."""
        value = ctypes.create_string_buffer(value_bytes)
        self.lib.bpf_map_lookup_elem(map_fd, key, value)
        return value.raw

    def enable_stats(self) -> int:
        """Have the kernel count runs and run time of BPF programs while the returned descriptor is open; -1 if it cannot."""
        return int(self.lib.bpf_enable_stats(STATS_RUN_TIME))

    def program_stats(self, program_fd: int) -> tuple[int, int, int]:
        """(runs, ns inside the program: both while statistics were enabled; events that the kernel kept from the program)."""
        info = ProgramInfo()
        size = c_uint32(ctypes.sizeof(info))
        if self.lib.bpf_obj_get_info_by_fd(program_fd, byref(info), byref(size)):
            return 0, 0, 0
        return info.run_cnt, info.run_time_ns, info.recursion_misses


class OpenOptions(ctypes.Structure):
    """The head of struct bpf_object_open_opts."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("object_name", c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", c_char_p),
        ("unused", c_uint32),
        ("kconfig", c_char_p),
        ("btf_custom_path", c_char_p),
    ]


class BpfObject:
    """An object file opened by libbpf: its maps and the requested programs.

    `btf`: a file with the running kernel's types, for kernels that do not expose BTF.
    """

    def __init__(self, kernel: Kernel, path: Path, btf: Path | None = None):
        self.kernel, self.path = kernel, path
        if not path.exists():
            raise RequirementError(f"{path.name} has not been built; run `make build`")
        options = OpenOptions(size=ctypes.sizeof(OpenOptions), btf_custom_path=str(btf).encode() if btf else None)
        self.handle = kernel.lib.bpf_object__open_file(str(path).encode(), byref(options))
        if not self.handle:
            raise ProbeError(f"libbpf cannot open {path}: {os.strerror(ctypes.get_errno())}")
        self.programs = self._list_programs()
        self._tell_offered()

    def _list_programs(self) -> dict[str, int]:
        programs: dict[str, int] = {}
        program = self.kernel.lib.bpf_object__next_program(c_void_p(self.handle), None)
        while program:
            programs[self.kernel.lib.bpf_program__name(c_void_p(program)).decode()] = program
            program = self.kernel.lib.bpf_object__next_program(c_void_p(self.handle), c_void_p(program))
        return programs

    def _tell_offered(self) -> None:
        """Set the constants that adapt the programs to this kernel."""
        places = symbols(self.path)
        size = ctypes.c_size_t()
        section = self.kernel.lib.bpf_object__find_map_by_name(c_void_p(self.handle), b".rodata")
        start = self.kernel.lib.bpf_map__initial_value(c_void_p(section), byref(size)) if section else None
        for name, value in asdict(self.kernel.offered).items():
            if start and f"has_{name}" in places:
                ctypes.c_bool.from_address(start + places[f"has_{name}"]).value = value

    def share_maps(self, other: "BpfObject", names: Iterable[str]) -> None:
        """Reuse the named maps of another, loaded object instead of creating them."""
        for name in names:
            own = self.kernel.lib.bpf_object__find_map_by_name(c_void_p(self.handle), name.encode())
            self.kernel.lib.bpf_map__reuse_fd(c_void_p(own), other.map_fd(name))

    def resize_map(self, name: str, entries: int) -> None:
        """Set a map's size (bytes for a ring) before loading."""
        map_handle = self.kernel.lib.bpf_object__find_map_by_name(c_void_p(self.handle), name.encode())
        self.kernel.lib.bpf_map__set_max_entries(c_void_p(map_handle), c_uint32(entries))

    def load(self, wanted: set[str]) -> None:
        """Create the maps and load the programs in `wanted`; raises Refused at the first program that the kernel refuses."""
        missing = wanted - self.programs.keys()
        if missing:
            raise ProbeError(f"{self.path.name} has no program {', '.join(sorted(missing))}: check the name, or run `make build`")
        for name, program in self.programs.items():
            self.kernel.lib.bpf_program__set_autoload(c_void_p(program), ctypes.c_bool(name in wanted))
            if self.kernel.lib.bpf_program__type(c_void_p(program)) == KPROBE_PROGRAM and has_multi_links():
                self.kernel.lib.bpf_program__set_expected_attach_type(c_void_p(program), UPROBE_MULTI)
        self.kernel.messages.clear()
        error = self.kernel.lib.bpf_object__load(c_void_p(self.handle))
        if error:
            raise self._refusal(-error)

    def _refusal(self, code: int) -> ProbeError:
        if code == errno.EMFILE:
            raise RequirementError(few_descriptors(sys.maxsize))
        text, reason = "".join(self.kernel.messages), os.strerror(code)
        program, denied, said = REFUSED.search(text), why_denied(code), last_lines(text)
        if program and (said or not denied):
            return Refused(program[1], said or reason, self._before(program[1]) if program[2] else set())
        failures = [line.removeprefix("libbpf: ") for line in text.splitlines() if "failed" in line]
        said = failures[0] if failures else "libbpf gives no reason"
        return ProbeError(f"the kernel refused the BPF programs: {reason}: {denied or said}; see `python -m tracer doctor`")

    def _before(self, program: str) -> set[str]:
        """The programs that were loaded before this one: libbpf loads them in the order in which it lists them."""
        return set(itertools.takewhile(lambda name: name != program, self.programs))

    def map_fd(self, name: str) -> int:
        """File descriptor of a loaded map."""
        fd = self.kernel.lib.bpf_object__find_map_fd_by_name(c_void_p(self.handle), name.encode())
        if fd < 0:
            raise ProbeError(f"{self.path.name} has no map {name}; run `make build`")
        return int(fd)

    def map_sizes(self, name: str) -> tuple[int, int]:
        """(bytes of a key, bytes of a value) of a map."""
        found = c_void_p(self.kernel.lib.bpf_object__find_map_by_name(c_void_p(self.handle), name.encode()))
        return int(self.kernel.lib.bpf_map__key_size(found)), int(self.kernel.lib.bpf_map__value_size(found))

    def program_fd(self, name: str) -> int:
        """File descriptor of a loaded program."""
        fd = self.kernel.lib.bpf_program__fd(c_void_p(self.programs[name]))
        if fd < 0:
            raise ProbeError(f"program {name} was not loaded")
        return int(fd)

    def copy_with_cookie(self, name: str, cookie: int) -> int:
        """Load a copy of a program with its cookie patched in; returns the descriptor."""
        program = c_void_p(self.programs[name])
        count = int(self.kernel.lib.bpf_program__insn_cnt(program))
        code = bytearray(ctypes.string_at(self.kernel.lib.bpf_program__insns(program), count * INSTRUCTION.size))
        for position in range(0, len(code), INSTRUCTION.size):
            operation, registers, _, number = INSTRUCTION.unpack_from(code, position)
            if (operation, number) == (MOVE_NUMBER, COOKIE_MARK):
                INSTRUCTION.pack_into(code, position, operation, registers, 0, cookie)
        try:
            return load_program(bytes(code), UPROBE_MULTI if has_multi_links() else 0)
        except OSError as error:
            raise ProbeError(f"the kernel refused a copy of the BPF program {name}: {error.strerror}") from None

    def close(self) -> None:
        """Free maps and programs (probes hold their own references)."""
        if self.handle:
            self.kernel.lib.bpf_object__close(c_void_p(self.handle))
            self.handle = None


@cache
def symbols(path: Path) -> dict[str, int]:
    """Symbol name → offset in its section, for every symbol of an object file."""
    offsets = {}
    for entries, strings in read_binary(str(path)).tables:
        for name, value in zip(entries["name"].tolist(), entries["value"].tolist(), strict=True):
            offsets[strings[name : strings.index(b"\0", name)].decode()] = value
    return offsets
