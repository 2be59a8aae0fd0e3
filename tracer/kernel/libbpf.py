"""The default loader: compiled CO-RE objects through libbpf, called by ctypes."""

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from tracer.errors import ProbeError, RequirementError
from tracer.probes.uprobes import KPROBE_PROGRAM, UPROBE_MULTI, has_multi_links

STATS_RUN_TIME = 0
LOG_CALLBACK = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)


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
    for name in ("bpf_object__open_file", "bpf_object__next_program", "bpf_object__find_map_by_name"):
        getattr(lib, name).restype = c_void_p
    lib.bpf_program__name.restype = c_char_p
    return lib


class Kernel:
    """Thin calls on programs and maps by file descriptor; shared by both loaders."""

    def __init__(self) -> None:
        self.lib = _library()
        silent = LOG_CALLBACK(lambda level, text, args: 0)
        self._silent = silent
        self.lib.libbpf_set_print(silent)

    def update(self, map_fd: int, key: bytes, value: bytes) -> None:
        """Set one map element."""
        if self.lib.bpf_map_update_elem(map_fd, key, value, c_uint64(0)):
            raise ProbeError(f"cannot write a BPF map: {os.strerror(ctypes.get_errno())}")

    def delete(self, map_fd: int, key: bytes) -> None:
        """Remove one map element, where it is there."""
        self.lib.bpf_map_delete_elem(map_fd, key)

    def lookup(self, map_fd: int, key: bytes, value_bytes: int) -> bytes:
        """One map element's value; zeros where it is absent."""
        value = ctypes.create_string_buffer(value_bytes)
        self.lib.bpf_map_lookup_elem(map_fd, key, value)
        return value.raw

    def enable_stats(self) -> int:
        """Let the kernel count runs and run time of BPF programs while the returned descriptor is open; -1 if it cannot."""
        return int(self.lib.bpf_enable_stats(STATS_RUN_TIME))

    def program_stats(self, program_fd: int) -> tuple[int, int, int]:
        """(runs, ns inside the program) since statistics were enabled, and events that the kernel kept from it."""
        info = ProgramInfo()
        size = c_uint32(ctypes.sizeof(info))
        if self.lib.bpf_obj_get_info_by_fd(program_fd, byref(info), byref(size)):
            return 0, 0, 0
        return info.run_cnt, info.run_time_ns, info.recursion_misses


class BpfObject:
    """An object file opened by libbpf: its maps, and those of its programs that were asked for."""

    def __init__(self, kernel: Kernel, path: Path):
        self.kernel, self.path = kernel, path
        if not path.exists():
            raise RequirementError(f"{path.name} has not been built; run `make build`")
        self.handle = kernel.lib.bpf_object__open_file(str(path).encode(), None)
        if not self.handle:
            raise ProbeError(f"libbpf cannot open {path}: {os.strerror(ctypes.get_errno())}")
        self.programs = self._list_programs()

    def _list_programs(self) -> dict[str, int]:
        found: dict[str, int] = {}
        program = self.kernel.lib.bpf_object__next_program(c_void_p(self.handle), None)
        while program:
            found[self.kernel.lib.bpf_program__name(c_void_p(program)).decode()] = program
            program = self.kernel.lib.bpf_object__next_program(c_void_p(self.handle), c_void_p(program))
        return found

    def resize_map(self, name: str, entries: int) -> None:
        """Set a map's size (bytes for a ring) before loading."""
        found = self.kernel.lib.bpf_object__find_map_by_name(c_void_p(self.handle), name.encode())
        self.kernel.lib.bpf_map__set_max_entries(c_void_p(found), c_uint32(entries))

    def load(self, wanted: set[str]) -> None:
        """Create the maps and load the programs named in `wanted`."""
        missing = wanted - self.programs.keys()
        if missing:
            raise ProbeError(f"{self.path.name} has no program {', '.join(sorted(missing))}: mistyped, or run `make build`")
        for name, program in self.programs.items():
            self.kernel.lib.bpf_program__set_autoload(c_void_p(program), ctypes.c_bool(name in wanted))
            if self.kernel.lib.bpf_program__type(c_void_p(program)) == KPROBE_PROGRAM and has_multi_links():
                self.kernel.lib.bpf_program__set_expected_attach_type(c_void_p(program), UPROBE_MULTI)
        error = self.kernel.lib.bpf_object__load(c_void_p(self.handle))
        if error:
            raise ProbeError(f"the kernel refused the BPF programs: {os.strerror(-error)}; see `python -m tracer doctor`")

    def map_fd(self, name: str) -> int:
        """File descriptor of a loaded map."""
        fd = self.kernel.lib.bpf_object__find_map_fd_by_name(c_void_p(self.handle), name.encode())
        if fd < 0:
            raise ProbeError(f"{self.path.name} has no map {name}; run `make build`")
        return int(fd)

    def program_fd(self, name: str) -> int:
        """File descriptor of a loaded program."""
        fd = self.kernel.lib.bpf_program__fd(c_void_p(self.programs[name]))
        if fd < 0:
            raise ProbeError(f"program {name} was not loaded")
        return int(fd)

    def close(self) -> None:
        """Free maps and programs (probes hold their own references)."""
        if self.handle:
            self.kernel.lib.bpf_object__close(c_void_p(self.handle))
            self.handle = None
