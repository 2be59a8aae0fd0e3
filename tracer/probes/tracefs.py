"""Tracefs: where the kernel's tracepoints are listed, and what prevents reading them."""

import ctypes
import errno
import os
from functools import cache
from pathlib import Path

from tracer.probes.denials import CAP_SYS_ADMIN, bpf_denials, has_capability, why_denied

TRACEFS = Path("/sys/kernel/tracing")
FILESYSTEMS = Path("/proc/filesystems")
MOUNT = f"mount -t tracefs tracefs {TRACEFS}"

mount_call = ctypes.CDLL(None, use_errno=True).mount


@cache
def tracefs_folder() -> Path:
    """Where tracefs is mounted; as root, mounts it at its standard place if it is not mounted."""
    places = tracefs_mounts(Path("/proc/self/mounts").read_text())
    if not places and os.geteuid() == 0:
        mount_tracefs()
    return TRACEFS if TRACEFS in places or not places else places[0]


def mount_tracefs() -> int:
    """Mount tracefs at its standard place; returns the error number, or 0 if it is mounted now."""
    done = mount_call(b"tracefs", bytes(TRACEFS), b"tracefs", 0, None) == 0 or ctypes.get_errno() == errno.EBUSY
    return 0 if done else ctypes.get_errno()


def tracefs_mounts(table: str) -> list[Path]:
    """The readable tracefs mounts in a table of mounts."""
    rows = [line.split() for line in table.splitlines()]
    return [Path(row[1]) for row in rows if row[2] == "tracefs" and os.path.isdir(f"{row[1]}/events")]


def has_tracepoint(category: str, name: str) -> bool:
    """Whether this kernel offers a tracepoint."""
    return os.path.exists(tracefs_folder() / "events" / category / name / "id")


def why_absent() -> tuple[str, str]:
    """(what prevents reading tracepoints, the remedy); two empty texts if nothing does."""
    try:
        if os.listdir(tracefs_folder() / "events"):
            return "", ""
        code = 0
    except OSError as error:
        code = error.errno or 0
    if "\ttracefs\n" not in FILESYSTEMS.read_text():
        return "this kernel has none", "use a kernel built with CONFIG_FTRACE=y"
    if os.geteuid():
        return "only root can read it", "type `sudo moescope ...`"
    return explain_refusal(code)


def explain_refusal(code: int) -> tuple[str, str]:
    """(what denies root a tracefs that the kernel has, the remedy); `code` is the error number of listing it."""
    against = "; ".join(bpf_denials())
    if " tracefs " in Path("/proc/self/mounts").read_text():
        state = "closed" if code else "empty"
        return f"mounted at {tracefs_folder()} but {state}: {against or why_denied(code)}", "lift the restriction"
    code = mount_tracefs()
    if not has_capability(CAP_SYS_ADMIN):
        against = "this process lacks CAP_SYS_ADMIN" + (f"; {against}" if against else "")
    return f"not mounted, and cannot be: {against or why_denied(code) or os.strerror(code)}", f"as root on the machine: {MOUNT}"
