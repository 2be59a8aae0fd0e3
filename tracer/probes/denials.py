"""Reasons why this machine denies root access to kernel features, as distinct from missing features."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tracer.recording.paths import RECORDER

LOCKDOWN = Path("/sys/kernel/security/lockdown")
SELINUX = Path("/sys/fs/selinux/enforce")
CLOSED = "confidentiality"
"""The lockdown mode that forbids reading kernel memory."""
LEAST_DESCRIPTORS = 512
"""What a recording of one engine needs at most, twice over."""
CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 21, 38, 39
FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "user": 0xEFFFFFFD}
"""Inodes of the initial namespaces: PROC_PID_INIT_INO, PROC_USER_INIT_INO of include/linux/proc_ns.h."""
OTHER_PIDS = (
    "this process is in a PID namespace of its own (a container), where programs have other numbers than in the kernel: "
    "give it the host's (docker run --pid=host)"
)


def why_denied(code: int) -> str:
    """Text that says what on this machine forbids BPF or probes to root; empty if no reason is known."""
    if code not in (errno.EPERM, errno.EACCES):
        return ""
    return "; ".join(bpf_denials()) or "a seccomp filter, a security module or a container forbids it"


def bpf_denials() -> Iterator[str]:
    """This machine's rules that may forbid BPF, each with the remedy."""
    yield from certain_denials()
    if selinux_enforces():
        yield f"SELinux is enforcing and this process runs as {selinux_domain()}: use a permissive domain (su), or setenforce 0"
    if has_other_namespace("pid"):
        yield OTHER_PIDS


def certain_denials() -> Iterator[str]:
    """Those that leave no doubt, so that nothing need be tried: it would take minutes to have each program refused."""
    mode = lockdown_mode()
    if mode == CLOSED:
        yield f"the kernel is locked down ({LOCKDOWN}: {mode}), so BPF cannot read its memory: boot with lockdown=integrity"
    if has_other_namespace("user"):
        yield "this process is in a user namespace of its own (a rootless container), whose root may not use BPF: run it outside"
    lacking = [name for name, number in (("CAP_BPF", CAP_BPF), ("CAP_PERFMON", CAP_PERFMON)) if not has_capability(number)]
    if lacking and not has_own_rights():
        yield f"this process lacks {' and '.join(lacking)}: in a container, run it privileged"


def has_other_namespace(kind: str) -> bool:
    """Whether pids or users (`user`) differ from those that BPF programs see; False on kernels without such namespaces."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino != FIRST_NAMESPACES[kind]
    except OSError:
        return False


def lockdown_mode() -> str:
    """The kernel's lockdown mode: none, integrity, confidentiality; empty if the kernel has no lockdown."""
    try:
        text = LOCKDOWN.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def selinux_enforces() -> bool:
    """Whether SELinux is present and enforcing."""
    try:
        return SELINUX.read_text().strip() == "1"
    except OSError:
        return False


def selinux_domain() -> str:
    """This process's security context."""
    try:
        return Path("/proc/self/attr/current").read_text().strip("\0\n") or "unknown"
    except OSError:
        return "unknown"


def few_descriptors(enough: int = LEAST_DESCRIPTORS) -> str:
    """The limit on open files with the remedy, if it is below `enough`, else empty."""
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed >= enough:
        return ""
    raising = f"ulimit -n {max(LEAST_DESCRIPTORS, 4 * allowed, min(highest, 4096))}"
    return f"only {allowed} files may be open at once, and each program and probe needs one: type `{raising}` first"


def has_own_rights() -> bool:
    """Whether the recorder's file has capabilities, so that users who may execute it need not be root."""
    try:
        return bool(os.getxattr(RECORDER, "security.capability"))
    except OSError:
        return False


def has_capability(number: int) -> bool:
    """Whether this process has a capability, or CAP_SYS_ADMIN, which covered it before Linux 5.8."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(mask >> number & 1 or mask >> CAP_SYS_ADMIN & 1)
