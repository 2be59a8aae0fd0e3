"""A small process that outlives a killed tracer: it resumes the processes that the tracer had stopped, and removes probes."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable

from tracer.probes.uprobes import detach

PID = struct.Struct("<i")
PROBES = 0  # in place of a process id: the descriptors sent along hold probes; without descriptors: remove these probes now
MOST_FDS = 250  # per message; Linux allows 253


class Guard:
    """The tracer's end of the connection to the guard.

    If SIGKILL hits a thread that is removing a probe, Linux leaves its breakpoints in place, and programs die of them: hence
    the guard removes the probes, as it does none of the work that a tracer may be killed for.
    """

    def __init__(self) -> None:
        self._socket, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._detaching = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            watch_over(asked)
        asked.close()

    def add(self, pid: int) -> None:
        """Watch another process."""
        self._socket.send(PID.pack(pid))

    def remove(self, pid: int) -> None:
        """Stop watching a process that has ended, so that a new process with its number is left alone."""
        self._socket.send(PID.pack(-pid))

    def detach(self, holders: Iterable[int]) -> None:
        """Close the descriptors that hold probes and wait until the probes are gone: the last close removes them."""
        fds = list(holders)
        with self._detaching:
            with contextlib.suppress(OSError):  # the guard was killed too: then the tracer removes them
                for first in range(0, len(fds), MOST_FDS):
                    socket.send_fds(self._socket, [PID.pack(PROBES)], fds[first : first + MOST_FDS])
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(OSError):
                self._socket.send(PID.pack(PROBES))
                self._socket.recv(1)

    def close(self) -> None:
        """End the guard."""
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def watch_over(asked: socket.socket) -> None:
    """The guard's main loop: serve the tracer until it is gone, then resume what it may have stopped. Does not return."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        pids: set[int] = set()
        with contextlib.suppress(ConnectionError):  # the tracer was killed while it waited for an answer
            serve(asked, pids)
        time.sleep(0.05 if pids else 0)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
    finally:
        os._exit(0)


def serve(asked: socket.socket, pids: set[int]) -> None:
    """Keep the ids of the watched processes, and remove probes on request."""
    probes: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(asked, PID.size, MOST_FDS)
        if not data:
            return
        pid = PID.unpack(data)[0]
        probes += fds
        if pid:
            (pids.add if pid > 0 else pids.discard)(abs(pid))
        elif not fds:
            detach(probes)
            probes.clear()
            asked.send(b".")
