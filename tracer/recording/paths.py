"""Where the project's built parts lie, in a checkout and installed, and on whose behalf it runs."""

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the packages: the checkout, or the one into which a wheel was installed."""
TRACER = ROOT / "tracer"
IN_CHECKOUT = (ROOT / "bpf").is_dir()
BPF_SOURCE = (ROOT if IN_CHECKOUT else TRACER) / "bpf" / "moescope.bpf.c"
OBJECTS = TRACER / "kernel" / "objects"
BPF_OBJECT = OBJECTS / "moescope.bpf.o"
BPF_OBJECTS = {"ring": BPF_OBJECT, "perf": OBJECTS / "moescope-perf.bpf.o"}
MAPS_OBJECTS = {"ring": OBJECTS / "maps.bpf.o", "perf": OBJECTS / "maps-perf.bpf.o"}
CALIBRATION = TRACER / "probes" / "calibrate.so"
LIBRARIES = [
    CALIBRATION,
    ROOT / "runtime" / "telemetry" / "_probes.so",
    ROOT / "runtime" / "backends" / "_blocks.so",
    ROOT / "analyzer" / "records" / "_joins.so",
    ROOT / "views" / "timeline" / "_messages.so",
]
BUILT_PARTS = [*BPF_OBJECTS.values(), *MAPS_OBJECTS.values(), *LIBRARIES]
"""Everything that CMakeLists.txt builds."""
BUILD = ROOT / "build"
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"


@dataclass(frozen=True)
class Owner:
    """The user who typed sudo; the traced command runs as them and output belongs to them."""

    uid: int
    gid: int
    name: str
    home: str

    def give(self, path: Path) -> None:
        """Hand a file, or a folder with all it holds, to the owner."""
        os.chown(path, self.uid, self.gid)
        for folder, folders, files in os.walk(path):
            for name in folders + files:
                os.chown(os.path.join(folder, name), self.uid, self.gid, follow_symlinks=False)

    def become(self) -> None:
        """Drop root for good in this (child) process."""
        os.initgroups(self.name, self.gid)
        os.setgid(self.gid)
        os.setuid(self.uid)

    def environment(self) -> dict[str, str]:
        """The process environment with the owner's identity instead of root's."""
        return dict(os.environ, HOME=self.home, USER=self.name, LOGNAME=self.name)

    def kept(self) -> Path:
        """Where what is made once stays: the checkout's build folder, else the owner's cache."""
        return BUILD if IN_CHECKOUT else Path(os.environ.get("XDG_CACHE_HOME") or Path(self.home) / ".cache") / "moescope"


def invoking_user() -> Owner:
    """The user behind sudo, or the present one."""
    uid = int(os.environ.get("SUDO_UID", os.getuid())) if os.geteuid() == 0 else os.getuid()
    try:
        entry = pwd.getpwuid(uid)
        return Owner(uid, entry.pw_gid, entry.pw_name, entry.pw_dir)
    except KeyError:
        return Owner(uid, int(os.environ.get("SUDO_GID", os.getgid())), str(uid), "/")
