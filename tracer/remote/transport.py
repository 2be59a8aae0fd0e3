"""A shell on another machine: any command that runs one shell line there; files go through its standard input and output."""

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from tracer.errors import RequirementError, TracerError

SSH = ["ssh", "-T", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
DEAF = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""On a terminal, Ctrl-C would reach the commands too: it is handled here and must not cut the link."""
ENDED = re.compile(r"(?s)(.*)moescope-ended (\d+)\n")
WAITS_S = (0.2, 1, 2, 4, 8, 15, 30, 60)
ROOTS = ("", "sudo -n sh -c", "su -c", "su 0 sh -c")
"""Ways for a shell to become root: none needed, sudo, the usual su, and su of Android's development images."""


class LinkError(TracerError):
    """The link to a device is cut, or could not be made."""


class DeviceError(TracerError):
    """A device was reached, but a script failed there."""


def transport_to(target: str, root: str = "") -> "Transport":
    """The transport to a target given by the user. Raises TracerError if it is not a target."""
    kind, _, rest = target.partition(":")
    if kind == "adb":
        return Transport(target, ["adb", *(["-s", rest] if rest else []), "shell"], root)
    if kind == "ssh" and rest.strip():
        return Ssh(target, [*SSH, *shlex.split(rest)], root)
    if kind == "exec" and rest.strip():
        return Transport(target, shlex.split(rest), root)
    raise TracerError(f"--on {target}: give ssh:USER@HOST, adb, adb:SERIAL, or exec:COMMAND that runs a shell command (sh -c)")


def short_name(target: str) -> str:
    """A target's name in messages: for ssh, the host, which is the last word."""
    return target.split()[-1].removeprefix("ssh:") if target.startswith("ssh:") else target


@dataclass
class Transport:
    """The link to one device; `root`: the prefix with which its lines run as root."""

    target: str
    """The target as the user gave it."""
    words: list[str]
    root: str = ""

    @property
    def name(self) -> str:
        """The name for messages."""
        return short_name(self.target)

    def command(self, script: str) -> list[str]:
        """The command that runs a script there, as root if required. It reports the script's exit on its standard error."""
        line = f"({script}\n); echo moescope-ended $? >&2"
        return [*DEAF, *self.words, f"{self.root} {quote(line)}" if self.root else line]

    def ask(self, script: str, stdin: Any = subprocess.DEVNULL, stdout: Any = subprocess.PIPE) -> str:
        """A script's output there. Raises LinkError if the device is not reached, DeviceError if the script fails."""
        try:
            done = subprocess.run(self.command(script), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, check=False)
        except OSError as error:
            raise RequirementError(f"{error.filename} cannot be run: {error.strerror}") from None
        said = done.stderr.decode(errors="replace")
        ended = ENDED.fullmatch(said)
        if not ended:
            raise LinkError(f"{self.name} cannot be reached: {last_line(said) or 'it provides no shell'}")
        if ended[2] != "0":
            raise DeviceError(f"{self.name}: {last_line(ended[1]) or f'status {ended[2]}'}")
        return (done.stdout or b"").decode(errors="surrogateescape")

    def insist(self, action: Callable[[], Any]) -> Any:
        """The result of the action, which is retried for two minutes while the link is cut."""
        for wait in WAITS_S:
            try:
                return action()
            except LinkError:
                time.sleep(wait)
        return action()

    def become_root(self) -> None:
        """Determine how to run lines as root. Raises RequirementError if no way works."""
        for self.root in ROOTS:
            try:
                if self.ask("id -u").strip() == "0":
                    return
            except LinkError:
                if not self.root:
                    raise
        raise RequirementError(
            f"{self.name} provides no root shell, which probes need: log in as root, allow `sudo` without a password, "
            "or on Android use `adb root` or an image with `su`"
        )

    def push(self, path: Path, place: str) -> None:
        """Copy a file there, continuing an interrupted attempt. Raises DeviceError if there is no room."""
        attempts = count()

        def once() -> None:
            offset = int(self.ask(f"touch {quote(place)} && wc -c < {quote(place)}")) if next(attempts) else 0
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                arrived = self.ask(f"cat {'>>' if offset else '>'} {quote(place)} && sha256sum < {quote(place)}", stdin=file)
            if arrived.split()[0] != sum_of(path):
                self.ask(f"rm {quote(place)}")
                raise LinkError(f"{self.name}: {path.name} was damaged in transfer")

        self.insist(once)

    def pull(self, place: str, path: Path, wanted: str = "") -> None:
        """Copy a file whose SHA-256 is `wanted` from there, continuing an interrupted attempt."""
        wanted = wanted or self.insist(lambda: self.sum_of(place))

        def once() -> None:
            with path.open("ab") as file:
                self.ask(f"tail -c +{file.tell() + 1} {quote(place)}", stdout=file)
            if sum_of(path) != wanted:
                path.unlink()
                raise LinkError(f"{self.name}: {path.name} was damaged in transfer")

        self.insist(once)

    def sum_of(self, place: str) -> str:
        """The SHA-256 of a file there."""
        return self.ask(f"sha256sum < {quote(place)}").split()[0]


class Ssh(Transport):
    """A transport by ssh, over one connection for all lines; if it is cut, the next line makes a new one."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.folder = tempfile.TemporaryDirectory(prefix="moescope-")
        self.shared = f"{self.folder.name}/ssh"
        self.master: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()
        self.given = self.words[1:]
        self.words = ["ssh", "-S", self.shared, *self.given]

    def command(self, script: str) -> list[str]:
        """The command that runs a script there, after the connection was made or has failed."""
        with self.lock:
            if not self.master or self.master.poll() is not None:
                self._connect()
        return super().command(script)

    def _connect(self) -> None:
        """Make the shared connection; its remote end reads from a pipe of this process, so that it ends with this process."""
        words = [*DEAF, "ssh", "-M", "-S", self.shared, *self.given, "cat > /dev/null"]
        out = subprocess.DEVNULL
        self.master = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=out)
        while self.master.poll() is None and not os.path.exists(self.shared):
            time.sleep(0.02)


def sum_of(path: Path) -> str:
    """The SHA-256 of a file here."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_line(text: str) -> str:
    """The last line of a text."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
