"""A connected device: its root shell, our temporary folder on it, its recorder and files."""

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
from tracer.kernel import bcc_helper
from tracer.kernel.features import ARCHITECTURES
from tracer.recording.paths import BPF_SOURCE, RECORDERS
from tracer.remote.transport import LinkError, Transport, transport_to

IDENTIFIED = re.compile(r"(?P<id>[0-9a-f]+|xxh3:[0-9a-f]{16}) (?P<path>/.+)")
# With sudo, the recorder opens and creates files with the rights of the user who logged in. The shell that makes the folder
# waits for a word: if, before a recording begins, the host ends or is cut off for longer than it retries, it removes the folder;
# at once where nobody reads its name.
VISIT = """
trap '' PIPE HUP
for each in /data/local/tmp /var/tmp /tmp; do
  folder=$(mktemp -d $each/moescope.XXXXXX 2> /dev/null) && break
done
[ -z "$SUDO_UID" ] || chown "$SUDO_UID" $folder || { rmdir $folder; exit; }
uname -m && echo $folder || { rmdir $folder; exit; }
exec setsid sh -c 'read word && exit
sleep {seconds}
[ -z "$0" ] || [ -e "$0"/status ] || rm -rf "$0"' "$folder" > /dev/null 2>&1"""
PATIENCE_S = 150
HELPER = "bcc_helper.py"
INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclass
class Device:
    """A device on which recordings can be made."""

    way: Transport
    folder: str
    """Our folder on the device; "" once it was removed."""
    features: dict[str, Any] = field(default_factory=dict)
    """The device's features, as `moescope-recorder --probe-features` prints them."""
    launcher: str = ""
    """What stands before the recorder's command line."""
    keeper: subprocess.Popen[bytes] | None = None
    """The connection to the script that made the folder, and removes it if this process ends."""

    @property
    def recorder(self) -> str:
        """The recorder's path on the device."""
        return f"{self.folder}/moescope-recorder"

    def write(self, name: str, content: bytes) -> None:
        """Write a file into our folder on the device."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self.way.push(Path(file.name), f"{self.folder}/{name}")

    def compile_with_bcc(self) -> None:
        """From now on, have the recorder's programs compiled there, by a Python that has the package bcc."""
        if not self.way.ask("command -v python3 || true"):
            raise RequirementError(f"{self.way.name} has no python3 for --loader bcc; on Debian: apt-get install python3-bpfcc")
        self.write(HELPER, Path(bcc_helper.__file__).read_bytes())
        self.write(BPF_SOURCE.name, with_included(BPF_SOURCE).encode())
        self.launcher = f"python3 -I {self.folder}/{HELPER} {self.folder}/{BPF_SOURCE.name} "

    def identify(self, listing: str) -> dict[str, str]:
        """Path → id (build id, or content's hash) of the programs and libraries among the paths that a script prints."""
        lines = self.way.ask(f"({listing}) | {self.recorder} --identify").splitlines()
        rows = map(IDENTIFIED.fullmatch, lines)
        return {row["path"]: row["id"] for row in rows if row and ".." not in PurePosixPath(row["path"]).parts}

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


def connect_as_root(target: str) -> Transport:
    """Connect to the device that a user names, with a root shell."""
    way = transport_to(target)
    way.become_root()
    return way


def prepare(way: Transport) -> Device:
    """Push the recorder and query the device's features; if that fails, nothing stays on the device."""
    visit = subprocess.Popen(
        way.command(VISIT.replace("{seconds}", str(PATIENCE_S))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert visit.stdout is not None
    arch, folder = (visit.stdout.readline().decode().strip() for _ in range(2))
    device = Device(way, folder, keeper=visit)
    try:
        if not arch:
            raise LinkError(f"{way.name} cannot be reached")
        if not folder:
            raise RequirementError(f"{way.name} has no folder for temporary files: none of /data/local/tmp, /var/tmp and /tmp")
        way.push(recorder_for(way.name, arch), device.recorder)
        device.features = json.loads(way.ask(f"chmod 700 {device.recorder} && {device.recorder} --probe-features"))
    except BaseException:
        device.clean()
        raise
    return device


def with_included(path: Path) -> str:
    """A source with the contents of the files that it includes from its own folder, which guard themselves."""
    return INCLUDED.sub(lambda found: with_included(path.with_name(found[1])), path.read_text())


def recorder_for(name: str, arch: str) -> Path:
    """The recorder for an architecture. Raises RequirementError if there is none."""
    path = RECORDERS / f"moescope-recorder-{arch}"
    if arch not in ARCHITECTURES:
        raise RequirementError(f"{name} is an {arch} machine: moescope-recorder runs on {' and '.join(ARCHITECTURES)}")
    if not path.exists():
        raise RequirementError(f"{path.name} has not been built: run `make recorders`, or install a wheel, which contains it")
    return path
