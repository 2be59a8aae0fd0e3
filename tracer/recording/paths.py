"""Paths of the project's built parts, in a checkout or installed, and the user on whose behalf it runs."""

import contextlib
import ctypes
import os
import pwd
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from moescope.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the packages: the checkout, or the one into which a wheel was installed."""
TRACER = ROOT / "tracer"
IN_CHECKOUT = (ROOT / "bpf").is_dir()
BPF_SOURCE = (ROOT if IN_CHECKOUT else TRACER) / "bpf" / "moescope.bpf.c"
OBJECTS = TRACER / "kernel" / "objects"
BPF_OBJECT = OBJECTS / "moescope.bpf.o"
RECORDERS = TRACER / "recorder" / "bin"
RECORDER = RECORDERS / f"moescope-recorder-{os.uname().machine}"
"""The recorder for this machine; the others are for `--on`."""
LIBRARIES = [
    ROOT / "runtime" / "telemetry" / "_probes.so",
    ROOT / "runtime" / "backends" / "_blocks.so",
    ROOT / "analyzer" / "records" / "_joins.so",
    ROOT / "views" / "timeline" / "_messages.so",
]
BUILT_PARTS = [BPF_OBJECT, *LIBRARIES]
"""Everything that CMakeLists.txt builds."""
BUILD = ROOT / "build"
LIBC = ctypes.CDLL(None, use_errno=True)
SETGROUPS = {"x86_64": 116, "aarch64": 159}
"""The system call's number."""
NOBODY_AT_ALL = 2**32 - 1
"""The id that no user has: in the kernel's calls it means "leave unchanged"."""
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"


@dataclass(frozen=True)
class Owner:
    """The user who invoked sudo; the traced command runs as them and owns the output."""

    uid: int
    gid: int
    name: str
    home: str

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """While active, this thread accesses files with the owner's rights instead of root's.

        Files that it creates belong to the owner from the start, and files that the owner could not open stay closed.
        """
        if os.geteuid() or not self.uid:
            yield
            return
        groups = os.getgroups()
        set_thread_groups(self.groups)
        gid, uid = LIBC.setfsgid(self.gid), LIBC.setfsuid(self.uid)  # the kernel drops root's file capabilities with it
        try:
            yield
        finally:
            LIBC.setfsuid(uid)
            LIBC.setfsgid(gid)
            set_thread_groups(groups)

    @cached_property
    def groups(self) -> list[int]:
        """The groups that the owner belongs to."""
        try:
            return os.getgrouplist(self.name, self.gid)
        except OSError:
            return [self.gid]

    def become(self) -> None:
        """Permanently drop root in this (child) process."""
        os.initgroups(self.name, self.gid)
        os.setgid(self.gid)
        os.setuid(self.uid)

    def environment(self) -> dict[str, str]:
        """The process environment with the owner's identity instead of root's."""
        return dict(os.environ, HOME=self.home, USER=self.name, LOGNAME=self.name)

    def kept(self) -> Path:
        """The folder for things that are generated once: the checkout's build folder, else the owner's cache."""
        return BUILD if IN_CHECKOUT else self._own_cache()

    def cache(self) -> Path:
        """The folder for what recordings teach and devices hold: `$MOESCOPE_CACHE`, else in the owner's cache."""
        return Path(os.environ.get("MOESCOPE_CACHE") or self._own_cache())

    def _own_cache(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path(self.home) / ".cache") / "moescope"


def set_thread_groups(groups: list[int]) -> None:
    """Set the supplementary groups of this thread alone, which the C library sets for all threads."""
    numbers = struct.pack(f"={len(groups)}I", *groups)
    if LIBC.syscall(SETGROUPS[os.uname().machine], len(groups), numbers):
        raise OSError(ctypes.get_errno(), "the groups of the user cannot be taken")


def invoking_user() -> Owner:
    """The user who invoked sudo, or the current one."""
    return user_by_id(_number_from_sudo("SUDO_UID", os.getuid()), _number_from_sudo("SUDO_GID", os.getgid()))


@cache
def user_by_id(uid: int, gid: int) -> Owner:
    """The user with this id; one that has no account keeps the given group."""
    try:
        entry = pwd.getpwuid(uid)
        return Owner(uid, entry.pw_gid, entry.pw_name, entry.pw_dir)
    except KeyError:
        return Owner(uid, gid, str(uid), "/")


def _number_from_sudo(name: str, own: int) -> int:
    """The id that sudo set in the environment, if this process is root, else `own`; raises UserError if it is not an id."""
    text = os.environ.get(name, "") if os.geteuid() == 0 else ""
    if text and not (text.isascii() and text.isdigit() and int(text) < NOBODY_AT_ALL):
        raise UserError(f"{name}={text!r} in the environment is not a user or group id: unset it, or use sudo")
    return int(text) if text else own
