"""A shell on another machine: any command that takes one line of it; files go through that command's input and output."""

import hashlib
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from tracer.errors import RequirementError, TracerError

SSH = ["ssh", "-T", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
DEAF = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""Ctrl-C reaches the commands on a terminal too: it is answered here, and must not cut the way."""
ENDED = re.compile(r"(?s)(.*)moescope-ended (\d+)\n")
WAITS_S = (0.2, 1, 2, 4, 8, 15, 30, 60)
ROOTS = ("", "sudo -n sh -c", "su -c", "su 0 sh -c")
"""What makes root of a shell: nothing, sudo, su as most have it, su as Android's development images have it."""


class LinkError(TracerError):
    """The way to a device is cut, or was never there."""


class DeviceError(TracerError):
    """A device was reached and refused."""


def words_of(target: str) -> list[str]:
    """The command that takes a line of shell, from what a user gives as a target. Raises TracerError for what is none."""
    kind, _, rest = target.partition(":")
    if kind == "adb":
        return ["adb", *(["-s", rest] if rest else []), "shell"]
    if kind in ("ssh", "exec") and rest.strip():
        return [*(SSH if kind == "ssh" else []), *shlex.split(rest)]
    raise TracerError(f"--on {target}: give ssh:USER@HOST, adb, adb:SERIAL, or exec:COMMAND that takes a line of shell (sh -c)")


@dataclass
class Transport:
    """The way to one device; `root` is what its lines need in front to run as root."""

    name: str
    words: list[str]
    root: str = ""

    def command(self, script: str) -> list[str]:
        """What runs a script there, as root where that was asked for. It says on its standard error how the script ended."""
        line = f"({script}\n); echo moescope-ended $? >&2"
        return [*DEAF, *self.words, f"{self.root} {quote(line)}" if self.root else line]

    def ask(self, script: str, stdin: Any = subprocess.DEVNULL, stdout: Any = subprocess.PIPE) -> str:
        """What a script prints there. Raises LinkError where the device is not reached, DeviceError where the script fails."""
        try:
            done = subprocess.run(self.command(script), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, check=False)
        except OSError as error:
            raise RequirementError(f"{self.words[0]} cannot be run: {error.strerror}") from None
        said = done.stderr.decode(errors="replace")
        ended = ENDED.fullmatch(said)
        if not ended:
            raise LinkError(f"{self.name} is not reached: {last_line(said) or 'it gives no shell'}")
        if ended[2] != "0":
            raise DeviceError(f"{self.name}: {last_line(ended[1]) or f'status {ended[2]}'}")
        return (done.stdout or b"").decode(errors="surrogateescape")

    def insist(self, action: Callable[[], Any]) -> Any:
        """The action's answer; while the way is cut, it is tried again, for two minutes."""
        for wait in WAITS_S:
            try:
                return action()
            except LinkError:
                time.sleep(wait)
        return action()

    def become_root(self) -> None:
        """Find out how lines run as root. Raises RequirementError where none of the ways leads there."""
        for self.root in ROOTS:
            try:
                if self.ask("id -u").strip() == "0":
                    return
            except LinkError:
                if not self.root:
                    raise
        raise RequirementError(
            f"{self.name} gives no root shell, which probes need: log in as root, allow `sudo` without a password, "
            "or on Android use `adb root` or an image with `su`"
        )

    def push(self, path: Path, place: str) -> None:
        """Copy a file there, from where an earlier attempt was cut. Raises DeviceError where there is no room."""

        def once() -> None:
            with path.open("rb", buffering=0) as file:
                file.seek(int(self.ask(f"touch {quote(place)} && wc -c < {quote(place)}")))
                self.ask(f"cat >> {quote(place)}", stdin=file)
            if self.sum_of(place) != sum_of(path):
                self.ask(f"rm -f {quote(place)}")
                raise LinkError(f"{self.name}: {path.name} was damaged on its way")

        self.insist(once)

    def pull(self, place: str, path: Path) -> None:
        """Copy a file from there, from where an earlier attempt was cut."""
        wanted = self.insist(lambda: self.sum_of(place))

        def once() -> None:
            with path.open("ab") as file:
                self.ask(f"tail -c +{file.tell() + 1} {quote(place)}", stdout=file)
            if sum_of(path) != wanted:
                path.unlink()
                raise LinkError(f"{self.name}: {path.name} was damaged on its way")

        self.insist(once)

    def sum_of(self, place: str) -> str:
        """The SHA-256 of a file there."""
        return self.ask(f"sha256sum < {quote(place)}").split()[0]


def sum_of(path: Path) -> str:
    """The SHA-256 of a file here."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_line(text: str) -> str:
    """What was said last."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
