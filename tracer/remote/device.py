"""A connected device: its root shell, our temporary folder on it, its collector and files."""

import contextlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from tracer.errors import RequirementError
from tracer.kernel.plan_file import ARCHITECTURES
from tracer.recording.paths import COLLECTORS
from tracer.remote.transport import Transport, way_to

IDENTIFIED = re.compile(r"(?P<id>[0-9a-f]+|xxh3:[0-9a-f]{16}) (?P<path>/.+)")
# With sudo, the collector opens and creates files with the rights of the user who logged in.
MAKE_FOLDER = """
for each in /data/local/tmp /var/tmp /tmp; do
  folder=$(mktemp -d $each/moescope.XXXXXX 2> /dev/null) && break
done
[ -z "$SUDO_UID" ] || chown "$SUDO_UID" $folder || exit
uname -m && echo $folder
"""
KEEP_CLEAN = """exec setsid sh -c 'read word && exit
sleep {seconds}
[ -e {folder}/status ] || rm -rf {folder}' > /dev/null 2>&1"""
"""Removes our folder from a device if, before a recording begins, the host ends or is cut off for longer than it retries."""
PATIENCE_S = 150


@dataclass
class Device:
    """A device on which recordings can be made."""

    way: Transport
    folder: str
    """Our folder on the device; "" once it was removed."""
    features: dict[str, Any] = field(default_factory=dict)
    """The device's features, as `moescope-collect --probe-features` prints them."""
    keeper: subprocess.Popen[bytes] | None = None
    """The connection to the script that cleans the device if this process ends."""

    @property
    def collector(self) -> str:
        """The collector's path on the device."""
        return f"{self.folder}/moescope-collect"

    def write(self, name: str, content: bytes) -> None:
        """Write a file into our folder on the device."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self.way.push(Path(file.name), f"{self.folder}/{name}")

    def identify(self, listing: str) -> dict[str, str]:
        """Path → id (build id, or content's hash) of the programs and libraries among the paths that a script prints."""
        lines = self.way.ask(f"({listing}) | {self.collector} --identify").splitlines()
        rows = map(IDENTIFIED.fullmatch, lines)
        return {row["path"]: row["id"] for row in rows if row and ".." not in PurePosixPath(row["path"]).parts}

    def keep_clean(self) -> None:
        """From now on, have the device remove our folder if this process is killed."""
        script, none = KEEP_CLEAN.format(seconds=PATIENCE_S, folder=quote(self.folder)), subprocess.DEVNULL
        self.keeper = subprocess.Popen(self.way.command(script), stdin=subprocess.PIPE, stdout=none, stderr=none)

    def let_be(self) -> None:
        """Stop guarding the folder: a recording is made in it, or it is already gone."""
        if self.keeper:
            with contextlib.suppress(OSError):
                self.keeper.communicate(b"done\n")
            self.keeper = None

    def is_full(self) -> bool:
        """Whether our folder's disk is full."""
        return self.way.ask(f"df -P {self.folder} | tail -n 1").split()[-3:-2] == ["0"]

    def clean(self) -> None:
        """Remove our folder."""
        if self.folder:
            self.way.insist(lambda: self.way.ask(f"rm -rf {quote(self.folder)}"))
            self.folder = ""
        self.let_be()


def reach(target: str) -> Transport:
    """Connect to the device that a user names, with a root shell."""
    way = way_to(target)
    way.become_root()
    return way


def settle(way: Transport) -> Device:
    """Push the collector and query the device's features; if that fails, nothing stays on the device."""
    arch, _, folder = way.ask(MAKE_FOLDER).strip().partition("\n")
    device = Device(way, folder)
    try:
        if not folder:
            raise RequirementError(f"{way.name} has no folder for temporary files: none of /data/local/tmp, /var/tmp and /tmp")
        device.keep_clean()
        way.push(collector_for(way.name, arch), device.collector)
        device.features = json.loads(way.ask(f"chmod 700 {device.collector} && {device.collector} --probe-features"))
    except BaseException:
        device.clean()
        raise
    return device


def collector_for(name: str, arch: str) -> Path:
    """The collector for an architecture. Raises RequirementError if there is none."""
    path = COLLECTORS / f"moescope-collect-{arch}"
    if arch not in ARCHITECTURES:
        raise RequirementError(f"{name} is an {arch} machine: moescope-collect runs on {' and '.join(ARCHITECTURES)}")
    if not path.exists():
        raise RequirementError(f"{path.name} has not been built: run `make collect`, or install a wheel, which contains it")
    return path
