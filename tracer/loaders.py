"""The two loaders behind one face: both give program and map descriptors; the maps always come from the compiled object."""

import platform
import re
import struct
import sys
from pathlib import Path
from typing import Any

from tracer.attach import KERNEL_PROBES
from tracer.btf import UNION, VMLINUX, Btf
from tracer.errors import ProbeError, RequirementError
from tracer.libbpf import BpfObject, Kernel
from tracer.paths import BPF_OBJECT, BPF_SOURCE, MAPS_OBJECT
from tracer.perf_events import SYSCALL, TRACEFS
from tracer.recording import dtype_to_json

DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
MAPS = (
    "events",
    "details",
    "lost",
    "threads",
    "calls",
    "patterns",
    "paths",
    "chosen",
    "described",
    "routed",
    "call_specs",
    "backends",
)
TRACEPOINTS = {name for name, _, _ in KERNEL_PROBES}
TASK_FIELDS = ("maj_flt", "min_flt")
# tracepoint → the name of its record in bpf/compat.h, where that is another's
TEMPLATES = {"sched_waking": "sched_wakeup_template", "sched_process_free": "sched_process_template"}
TRACEPOINT_FIELD = re.compile(r"field:(__data_loc )?.*?(\w+)(?:\[\d*\])?;\s*offset:(\d+);")
PATTERN = struct.Struct("<I28s")


class LibbpfLoader:
    """Loads the CO-RE object through libbpf."""

    name = "libbpf"

    def __init__(self, kernel: Kernel, wanted: set[str], ring_bytes: dict[str, int]):
        if not VMLINUX.exists():
            raise RequirementError(f"this kernel has no BTF ({VMLINUX}), which the default loader needs; {other_ways()}")
        self.object = open_object(kernel, BPF_OBJECT, ring_bytes)
        self.object.load(wanted)

    def map_fd(self, name: str) -> int:
        """File descriptor of a map."""
        return self.object.map_fd(name)

    def update(self, name: str, key: bytes, value: bytes) -> None:
        """Set one element of a map."""
        self.object.kernel.update(self.map_fd(name), key, value)

    def program_fd(self, name: str) -> int:
        """File descriptor of a program."""
        return self.object.program_fd(name)

    def close(self) -> None:
        """Free what was loaded."""
        self.object.close()


class BccLoader(LibbpfLoader):
    """Compiles the same sources through BCC against kernel headers; the maps are made from their own object."""

    name = "bcc"

    def __init__(self, kernel: Kernel, wanted: set[str], ring_bytes: dict[str, int]):
        bcc = import_bcc()
        if headers() is None:
            raise RequirementError(
                f"--loader bcc needs kernel headers in /lib/modules/{platform.release()}/build; run `make headers`"
            )
        self.object = open_object(kernel, MAPS_OBJECT, ring_bytes)
        self.object.load(set())
        flags = ["-DLOADER_BCC", f"-I{BPF_SOURCE.parent}", *task_offsets(), *tracepoint_offsets()]
        flags += [f"-DMAP_FD_{name}={self.map_fd(name)}" for name in MAPS]
        try:
            self.module = bcc.BPF(src_file=str(BPF_SOURCE).encode(), cflags=flags)
            self.programs = {name: self._load(bcc, name).fd for name in wanted}
        except Exception as error:
            text = " ".join(str(error).split())
            raise ProbeError(f"BCC cannot compile or load the programs: {text}; its kernel headers: see doctor") from None

    def _load(self, bcc: Any, name: str) -> Any:
        kind = bcc.BPF.TRACEPOINT if name in TRACEPOINTS else bcc.BPF.KPROBE
        return self.module.load_func(name.encode(), kind)

    def program_fd(self, name: str) -> int:
        """File descriptor of a program."""
        return int(self.programs[name])

    def close(self) -> None:
        """Free what was loaded."""
        self.module.cleanup()
        super().close()


def open_object(kernel: Kernel, path: Path, ring_bytes: dict[str, int]) -> BpfObject:
    """An object file with its rings sized, not yet loaded."""
    opened = BpfObject(kernel, path)
    for ring, size in ring_bytes.items():
        opened.resize_map(ring, size)
    return opened


def headers() -> Path | None:
    """The kernel headers that BCC would use."""
    path = Path("/lib/modules") / platform.release() / "build"
    return path if path.exists() else None


def other_ways() -> str:
    """What to do on a kernel without BTF."""
    if headers():
        return "use --loader bcc"
    return f"it has no headers either: install linux-headers-{platform.release()} and use --loader bcc, or boot a kernel with BTF"


def task_offsets() -> list[str]:
    """Compiler flags: where task_struct keeps what we read, by BTF, else by the headers (which must then be the kernel's)."""
    if not VMLINUX.exists():
        return ["-include", "linux/sched.h", *(f"-DOFFSET_{name}=offsetof(struct task_struct,{name})" for name in TASK_FIELDS)]
    btf = Btf.of_kernel()
    return [f"-DOFFSET_{name}={btf.offset('task_struct', name)}" for name in TASK_FIELDS]


def tracepoint_offsets() -> list[str]:
    """Compiler flags: where the running kernel's tracepoints keep their fields, from tracefs."""
    flags = []
    for name, _, category in KERNEL_PROBES:
        text = (TRACEFS / "events" / category / name / "format").read_text()
        for is_location, field, offset in TRACEPOINT_FIELD.findall(text):
            full = f"__data_loc_{field}" if is_location else field
            flags.append(f"-DOFFSET_{TEMPLATES.get(name, name)}_{full}={offset}")
    return flags


LOADERS = {"libbpf": LibbpfLoader, "bcc": BccLoader}


def import_bcc() -> Any:
    """Debian's BCC bindings: pure Python over ctypes, so a virtual environment may borrow them."""
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


def layouts() -> dict[str, Any]:
    """Every record's layout for the manifest, from the object's BTF."""
    if not BPF_OBJECT.exists():
        raise RequirementError(f"{BPF_OBJECT.name} has not been built; run `make bpf`")
    btf = Btf.of_object(BPF_OBJECT)
    numbers = btf.enum("record_kind")
    found = {}
    for name, type_id, _ in btf.members(btf.find(UNION, "record")):
        dtype = btf.dtype(type_id)
        found[name] = {"kind": numbers[f"KIND_{name.upper()}"], "bytes": dtype.itemsize, "fields": dtype_to_json(dtype)}
    return found


def enumeration(name: str) -> dict[str, int]:
    """Name → value of an enum of bpf/records.h, from the object's BTF."""
    return Btf.of_object(BPF_OBJECT).enum(name)


def check_architecture(machine: str) -> None:
    """Raise where this architecture's system calls are not known."""
    if machine not in SYSCALL:
        raise RequirementError(f"{machine} is not supported; x86_64 and aarch64 are")
