"""The traced program: started but held until its probes are attached, or followed by process id."""

import contextlib
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracer.errors import TargetError
from tracer.probes import reach
from tracer.recording.paths import Owner, owner_of

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of a task's flags."""


def tasks(pid: int) -> list[int]:
    """Thread ids of a process; empty if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def state(pid: int) -> str:
    """The kernel's letter for a process's state; raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process since it began, by its own clock (clock_getcpuclockid); 0 if it is gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | 2)
    return 0


def children(pid: int) -> list[int]:
    """Process ids of all descendants."""
    descendants: list[int] = []
    for tid in tasks(pid):
        with contextlib.suppress(OSError):
            direct = [int(p) for p in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()]
            descendants += direct + [grandchild for child in direct for grandchild in children(child)]
    return descendants


@dataclass(frozen=True)
class Mapping:
    """One executable mapping of a file."""

    start: int
    end: int
    offset: int
    inode: int
    path: str

    def file_offset(self, address: int) -> int:
        """The file offset of an address in this mapping."""
        return address - self.start + self.offset


def mappings(pid: int) -> list[Mapping]:
    """The executable file mappings of a process; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = []
    for line in lines:
        row = line.split(None, 5)
        if len(row) == 6 and "x" in row[1] and row[5].startswith("/"):
            start, end = (int(part, 16) for part in row[0].split("-"))
            path = reach.mapped(pid, row[5], int(row[4]), row[0])
            mapped.append(Mapping(start, end, int(row[2], 16), int(row[4]), path))
    return mapped


def executable(pid: int) -> str:
    """The program that a process runs, by the path in its mappings; raises OSError if the process is gone."""
    inode = os.stat(f"/proc/{pid}/exe").st_ino
    return next((m.path for m in mappings(pid) if m.inode == inode), os.path.realpath(f"/proc/{pid}/exe"))


class Target:
    """A command that this process started, waiting for `release` before its first instruction."""

    started_here = True

    def __init__(self, command: list[str], owner: Owner):
        self.command = command
        self.exit_code: int | None = None
        self.cpu_ns = 0
        self.started = time.monotonic_ns()
        gate, self._gate = os.pipe2(os.O_CLOEXEC)
        self._failure, failure = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(gate, failure, owner)
        os.close(gate)
        os.close(failure)

    def _child(self, gate: int, failure: int, owner: Owner) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # Python changes all of these
                signal.signal(number, signal.SIG_DFL)
            os.close(self._gate)
            if not os.read(gate, 1):
                os._exit(127)
            if os.geteuid() == 0 and owner.uid != 0:
                owner.become()
            os.execvpe(self.command[0], self.command, owner.environment())
        except OSError as error:
            os.write(failure, struct.pack("<i", error.errno or 0))
        finally:
            os._exit(127)

    def folder(self) -> Path:
        """The folder of relative paths on its command line."""
        return Path.cwd()

    def release(self) -> None:
        """Let the command run; raises TargetError if it cannot be executed."""
        with contextlib.suppress(BrokenPipeError):  # Ctrl-C has ended it
            os.write(self._gate, b"g")
        self.abandon()

    def end(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)

    def abandon(self) -> None:
        """End a command that was not released, without running it; a running command is left alone."""
        if self._gate >= 0:
            os.close(self._gate)
        self._gate = -1

    def check_start(self) -> None:
        """Raise TargetError if the command could not be executed."""
        data = os.read(self._failure, 4) if self.exit_code is not None else b""
        if data:
            reason = os.strerror(struct.unpack("<i", data)[0])
            raise TargetError(f"cannot run {self.command[0]!r}: {reason}; give the full path or check $PATH")

    def poll(self) -> bool:
        """True while it lives."""
        if self.exit_code is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self.cpu_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
            else:
                self.cpu_ns = cpu_ns(self.pid)
        return self.exit_code is None


def command_line(pid: int) -> bytes:
    """The words of a process's command line, each terminated by NUL; raises TargetError if there is no program to follow."""
    if pid == os.getpid():
        raise TargetError(f"{pid} is the tracer itself; give another process")
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        raise TargetError(f"there is no process {pid}; it may have ended") from None
    if status[0] in "ZX":
        raise TargetError(f"process {pid} has ended and waits for its parent, process {status[1]}, to collect its status")
    if int(status[6]) & KERNEL_THREAD:
        raise TargetError(f"{pid} is a kernel thread, which has no program to probe")
    return words


def runs(pid: int) -> bool:
    """Whether a process with this id exists and runs a program."""
    try:
        return bool(command_line(pid))
    except TargetError:
        return False


class Followed:
    """A process that was already running; it is never waited for and never ended."""

    started_here = False
    exit_code: int | None = None

    def __init__(self, pid: int):
        self.pid, self.started = pid, time.monotonic_ns()
        self.cpu_ns, self._cpu_before = 0, cpu_ns(pid)  # while it was followed, as of the last `poll`
        self.command = [part.decode(errors="replace") for part in command_line(pid).split(b"\0") if part]
        self.owner = owner_of(pid)

    def folder(self) -> Path:
        """The folder of relative paths on its command line, unless it has changed folders."""
        return Path(f"/proc/{self.pid}/cwd").resolve()

    def release(self) -> None:
        """It runs already."""

    def abandon(self) -> None:
        """It runs already."""

    def end(self) -> None:
        """It is never ended."""

    def check_start(self) -> None:
        """It runs already."""

    def poll(self) -> bool:
        """True while it lives; one that has ended remains listed until its parent waits for it."""
        self.cpu_ns = max(self.cpu_ns, cpu_ns(self.pid) - self._cpu_before)
        with contextlib.suppress(OSError):
            return len(tasks(self.pid)) > 1 or state(self.pid) != "Z"
        return False


@contextlib.contextmanager
def urgent() -> Iterator[None]:
    """Give this thread priority over all ordinary ones, if permitted, so that the stopped target does not wait for them too."""
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameter)
