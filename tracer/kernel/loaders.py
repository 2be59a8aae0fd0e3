"""Two loaders with one interface of program and map descriptors; the maps always come from the compiled object."""

import contextlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tracer.errors import ProbeError, RequirementError
from tracer.kernel.btf import VMLINUX, Btf, BtfError
from tracer.kernel.libbpf import BpfObject, Kernel, Refused, last_lines
from tracer.probes.denials import CLOSED, denials, lockdown
from tracer.probes.kernel_probes import IN_INTERRUPTS, KERNEL_PROBES, SOFTWARE, STAND_INS
from tracer.probes.perf_events import SYSCALL
from tracer.probes.tracefs import tracefs
from tracer.probes.uprobes import UPROBE_MULTI, has_multi_links
from tracer.recording.paths import BPF_OBJECTS, BPF_SOURCE, MAPS_OBJECTS

DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
MAPS: tuple[str, ...] = (
    "events",
    "details",
    "lost",
    "threads",
    "calls",
    "patterns",
    "paths",
    "chosen",
    "described",
    "runs",
    "blank",
    "call_specs",
    "driver_layouts",
    "backends",
)
MAPS += ("faulting", "reading", "requests", "counted", "counters")
KERNEL_PROGRAMS = {name: category for name, _, category in (*KERNEL_PROBES, *STAND_INS)}
BUFFER_MAPS: dict[str, tuple[str, ...]] = {"ring": (), "perf": ("doorbell",)}
BUFFER_FLAGS: dict[str, tuple[str, ...]] = {"ring": (), "perf": ("-DBUFFER_PERF",)}
TASK_FIELDS = ("maj_flt", "min_flt")
# struct → members that KERNEL_AT reads
KERNEL_FIELDS = {
    "task_struct": ("files", "pid", "prio", "comm", "thread_info"),
    "files_struct": ("fdt",),
    "fdtable": ("max_fds", "fd"),
    "file": ("f_mapping", "f_path", "f_pos"),
    "path": ("dentry",),
    "address_space": ("host",),
    "inode": ("i_mode", "i_ino", "i_sb"),
    "super_block": ("s_dev",),
    "dentry": ("d_name",),
    "qstr": ("name",),
    "request": ("q", "__sector"),
    "gendisk": ("major", "first_minor"),
}
# members that some kernels lack → whether a kernel version has them; needed with headers, which cannot be queried
VARYING_FIELDS: dict[tuple[str, str], Callable[[tuple[int, ...]], bool]] = {
    ("task_struct", "cpu"): lambda version: version < (5, 16),
    ("thread_info", "cpu"): lambda version: version >= (5, 16),
    ("request", "rq_disk"): lambda version: version < (5, 17),
    ("request_queue", "disk"): lambda version: version >= (5, 15),
}
NO_FIELD = 1 << 20
# tracepoint → the tracepoint whose record in bpf/compat.h it shares
TEMPLATES = {
    "mm_filemap_map_pages": "mm_filemap_op_page_cache_range",
    "mm_filemap_add_to_page_cache": "mm_filemap_op_page_cache",
    "block_io_start": "block_rq",
    "block_rq_issue": "block_rq",
    "cpu_frequency": "cpu",
}
USED_FIELD = re.compile(r"\bFIELD(?:_AT)?\(ctx, (\w+), (\w+)")
TRACEPOINT_FIELD = re.compile(r"field:(__data_loc )?.*?(\w+)(?:\[\d*\])?;\s*offset:(\d+);")


class LibbpfLoader:
    """Loads the CO-RE object through libbpf."""

    name = "libbpf"

    def __init__(
        self, kernel: Kernel, wanted: set[str], ring_bytes: dict[str, int], buffer: str = "ring", btf: Path | None = None
    ):
        if lockdown() == CLOSED:  # each program would be refused separately, which takes minutes
            raise RequirementError("; ".join(denials()))
        if not (btf or VMLINUX).exists():
            raise RequirementError(f"this kernel has no BTF ({btf or VMLINUX}), which the default loader needs; {other_ways()}")
        self.refused: dict[str, str] = {}  # program → the kernel's reason for refusing it
        self.copies: dict[tuple[str, int], int] = {}  # (program, cookie) → descriptor of the copy with the cookie patched in
        self.late: dict[str, BpfObject] = {}  # program loaded later → the object that contains it
        self._open = partial(open_object, kernel, BPF_OBJECTS[buffer], ring_bytes if buffer == "ring" else {}, btf)
        self._shared = (*MAPS, *BUFFER_MAPS[buffer])
        self.object = self._load(wanted)

    def bring(self, wanted: set[str]) -> None:
        """Load programs that were not wanted at first, onto the same maps."""
        self.late |= dict.fromkeys(wanted, self._load(wanted, self.object))

    def _load(self, wanted: set[str], owner: BpfObject | None = None) -> BpfObject:
        """Load the object without the programs that the kernel refuses; each accepted program is verified at most twice."""
        unknown = wanted
        while True:
            opened = self._open()
            if owner:
                opened.share_maps(owner, self._shared)
            try:
                opened.load(unknown)
            except ProbeError as error:
                opened.close()
                if not isinstance(error, Refused) or error.program in self.refused:
                    raise
                self.refused[error.program] = error.why
                unknown = unknown - error.accepted - {error.program}
                continue
            if unknown == wanted - self.refused.keys():
                return opened
            opened.close()
            unknown = wanted - self.refused.keys()

    def map_fd(self, name: str) -> int:
        """File descriptor of a map."""
        return self.object.map_fd(name)

    def update(self, name: str, key: bytes, value: bytes) -> None:
        """Set one element of a map; raises BtfError if key or value have another size than the map's."""
        given, wanted = (len(key), len(value)), self.object.map_sizes(name)
        if given != wanted:
            raise BtfError(f"key and value of map {name} have {wanted} bytes, not {given}; run `make build`")
        self.object.kernel.update(self.map_fd(name), key, value)

    def program_fd(self, name: str) -> int:
        """File descriptor of a program."""
        return self.late.get(name, self.object).program_fd(name)

    def attachable(self, name: str, cookie: int) -> tuple[int, int]:
        """(program descriptor, cookie to attach with); on kernels without cookies, a copy with the cookie patched in, and 0."""
        if not cookie or self.object.kernel.offered.cookies:
            return self.program_fd(name), cookie
        if (name, cookie) not in self.copies:
            self.copies[name, cookie] = self.object.copy_with_cookie(name, cookie)
        return self.copies[name, cookie], 0

    def close(self) -> None:
        """Free what was loaded."""
        for fd in self.copies.values():
            os.close(fd)
        self.copies.clear()
        self.object.close()
        for late in set(self.late.values()):
            late.close()
        self.late.clear()


class BccLoader(LibbpfLoader):
    """Compiles the same sources through BCC against kernel headers; the maps come from an object of their own."""

    name = "bcc"

    def __init__(
        self, kernel: Kernel, wanted: set[str], ring_bytes: dict[str, int], buffer: str = "ring", btf: Path | None = None
    ):
        bcc = import_bcc()
        if headers() is None:
            raise RequirementError(
                f"--loader bcc needs kernel headers in /lib/modules/{platform.release()}/build; run `make headers`"
            )
        self.refused, self.copies, self.late = {}, {}, {}
        self.object = open_object(kernel, MAPS_OBJECTS[buffer], ring_bytes if buffer == "ring" else {})
        self.object.load(set())
        flags = ["-DLOADER_BCC", f"-I{BPF_SOURCE.parent}", *task_offsets(btf), *tracepoint_offsets()]
        flags += [f"-DMAP_FD_{name}={self.map_fd(name)}" for name in (*MAPS, *BUFFER_MAPS[buffer])]
        flags += BUFFER_FLAGS[buffer]
        try:
            self.module = bcc.BPF(src_file=str(BPF_SOURCE).encode(), cflags=flags)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ProbeError(f"BCC cannot compile the programs: {text}; its kernel headers: see doctor") from None
        self.programs: dict[str, int] = {}
        for name in sorted(wanted):
            self._load_one(bcc, name)

    def bring(self, wanted: set[str]) -> None:
        """Load programs that were not wanted at first."""
        for name in sorted(wanted):
            self._load_one(import_bcc(), name)

    def _load_one(self, bcc: Any, name: str) -> None:
        """Load one program, or note the kernel's reason for refusing it, which BCC prints."""
        reason = ""
        with captured_stderr() as printed:
            try:
                self.programs[name] = self._program(bcc, name).fd
            except Exception as error:
                reason = " ".join(str(error).split())
        if name not in self.programs:
            self.refused[name] = last_lines(printed[0]) or reason

    def _program(self, bcc: Any, name: str) -> Any:
        attach_type = UPROBE_MULTI if name not in KERNEL_PROGRAMS and has_multi_links() else -1
        return self.module.load_func(name.encode(), kind_of(bcc.BPF, name), attach_type=attach_type)

    def program_fd(self, name: str) -> int:
        """File descriptor of a program."""
        return int(self.programs[name])

    def attachable(self, name: str, cookie: int) -> tuple[int, int]:
        """The program's descriptor and the cookie: kernels without cookies refuse BCC's programs."""
        return self.program_fd(name), cookie

    def close(self) -> None:
        """Free what was loaded."""
        self.module.cleanup()
        super().close()


def kind_of(kinds: Any, name: str) -> int:
    """A program's type, from BCC's constants."""
    if name not in KERNEL_PROGRAMS:
        return int(kinds.KPROBE)
    if name in IN_INTERRUPTS:
        return int(kinds.RAW_TRACEPOINT)
    return int(kinds.PERF_EVENT if KERNEL_PROGRAMS[name] == SOFTWARE else kinds.TRACEPOINT)


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Capture what C code prints to standard error; the list holds it afterwards."""
    printed: list[str] = []
    with tempfile.TemporaryFile() as file:
        stderr_copy = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield printed
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))


def open_object(kernel: Kernel, path: Path, ring_bytes: dict[str, int], btf: Path | None = None) -> BpfObject:
    """An object file with its rings sized, not yet loaded."""
    opened = BpfObject(kernel, path, btf)
    for ring, size in ring_bytes.items():
        opened.resize_map(ring, size)
    return opened


def headers() -> Path | None:
    """The kernel headers that BCC would use, if there are any."""
    path = Path("/lib/modules") / platform.release() / "build"
    return path if path.exists() else None


def other_ways() -> str:
    """Advice for kernels without BTF."""
    file = "give --btf FILE with its types (docs/kernels.md)"
    if headers():
        return f"{file}, or use --loader bcc"
    install = f"install linux-headers-{platform.release()} and use --loader bcc"
    return f"it has no headers either: {file}, or {install}, or boot a kernel with BTF"


def task_offsets(btf_file: Path | None = None) -> list[str]:
    """Compiler flags with the offsets of the kernel's struct members: from BTF, else from headers of exactly this kernel."""
    fields = [(owner, name) for owner, names in KERNEL_FIELDS.items() for name in names]
    nothing = [f"-DOFFSET_OF_NOTHING={NO_FIELD}"]
    if not (btf_file or VMLINUX).exists():
        return nothing + offsets_by_headers(fields)
    btf = Btf.of_file(btf_file or VMLINUX)
    flags = [f"-DOFFSET_{name}={btf.offset('task_struct', name)}" for name in TASK_FIELDS]
    flags += [f"-DOFFSET_{owner}_{name}={btf.offset(owner, name)}" for owner, name in fields]
    varying = [f"-DOFFSET_{owner}_{name}={btf.offset_or(NO_FIELD, owner, name)}" for owner, name in VARYING_FIELDS]
    return nothing + flags + varying


def offsets_by_headers(fields: list[tuple[str, str]]) -> list[str]:
    """Compiler flags with the same offsets, which the compiler takes from the running kernel's headers."""
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    fields = fields + [place for place, is_there in VARYING_FIELDS.items() if is_there(version)]
    absent = [place for place, is_there in VARYING_FIELDS.items() if not is_there(version)]
    flags = [flag for header in ("sched", "fs", "fdtable", "blk-mq") for flag in ("-include", f"linux/{header}.h")]
    flags += [f"-DOFFSET_{name}=offsetof(struct task_struct,{name})" for name in TASK_FIELDS]
    flags += [f"-DOFFSET_{owner}_{name}=offsetof(struct {owner},{name})" for owner, name in fields]
    return flags + [f"-DOFFSET_{owner}_{name}={NO_FIELD}" for owner, name in absent]


def tracepoint_offsets() -> list[str]:
    """Compiler flags with the offsets of tracepoint fields, from tracefs; 0 for fields that this kernel lacks."""
    sources = "".join(path.read_text() for path in sorted(BPF_SOURCE.parent.glob("*.bpf.c")))
    places = {f"{event}_{field}": "0" for event, field in USED_FIELD.findall(sources)}
    for name, _, category in KERNEL_PROBES:
        path = tracefs() / "events" / category / name / "format"
        for is_location, field, offset in TRACEPOINT_FIELD.findall(path.read_text()) if path.exists() else ():
            full = f"__data_loc_{field}" if is_location else field
            places[f"{TEMPLATES.get(name, name)}_{full}"] = offset
    return [f"-DOFFSET_{place}={offset}" for place, offset in places.items()]


LOADERS = {"libbpf": LibbpfLoader, "bcc": BccLoader}


def import_bcc() -> Any:
    """Import Debian's BCC bindings: pure Python over ctypes, so a virtual environment can use them."""
    try:
        import bcc
    except ImportError:
        sys.path.append(str(DIST_PACKAGES))
        try:
            import bcc
        except ImportError:
            raise RequirementError("--loader bcc needs BCC; on Debian: apt-get install python3-bpfcc") from None
        finally:
            sys.path.remove(str(DIST_PACKAGES))
    return bcc


def check_architecture(machine: str) -> None:
    """Raise RequirementError if this architecture's system calls are not known."""
    if machine not in SYSCALL:
        raise RequirementError(f"{machine} is not supported; x86_64 and aarch64 are")
