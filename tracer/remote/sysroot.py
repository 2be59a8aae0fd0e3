"""Keeps devices' engine files by build id, so that each build is transferred once, and makes plans from them."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from moescope.scratch import scratch_folder
from tracer.kernel.plan_file import FileRoot, compose_plan
from tracer.planning.loops import KeptLoops
from tracer.probes.learning import of_recording
from tracer.probes.planner import Planner
from tracer.remote.device import Device

Found = tuple[list[str], dict[str, str]]
"""(programs, path → id of these and of the libraries that may contain an engine's code)."""
planning = threading.Lock()
"""Held while planning: plans are made one by one and share what is known of each file."""


@dataclass(frozen=True)
class Sysroot:
    """The files of all devices, stored in a folder by their ids."""

    kept: Path
    loops: KeptLoops
    """The graph loops that earlier recordings taught."""

    @contextlib.contextmanager
    def laid_out(self, device: Device, files: dict[str, str]) -> Iterator[Path]:
        """A folder with the files (path → id) at the same paths as on the device; pulls those that are not kept yet."""
        self.kept.mkdir(parents=True, exist_ok=True)
        with scratch_folder(self.kept, "device-") as folder:
            (folder / "root").mkdir()
            for path, identity in files.items():
                self.lay_out(device, path, identity, folder / "root")
            yield (folder / "root").resolve()

    def lay_out(self, device: Device, path: str, identity: str, root: Path) -> None:
        """Put one of the device's files below `root`; pulls it if it is not kept yet."""
        held, place = self.kept / identity, root / path.lstrip("/")
        if not held.exists():
            with scratch_folder(self.kept, "device-") as folder:
                device.way.pull(path, draft := folder / "part")
                draft.replace(held)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(held, place)

    def plan(self, device: Device, planner: Planner, programs: list[str], root: Path) -> dict[str, Any]:
        """The plan for a device's programs and the libraries below `root`, with loops learnt from earlier recordings."""
        inside = [str(root / path.lstrip("/")) for path in programs]
        with planning:
            return compose_plan(planner, FileRoot(str(root), device.features["arch"]), inside, [root], self.loops.known())

    def learn(self, recording: Path) -> None:
        """Keep the graph loops learnt from a recording, for the next plan of the same builds."""
        for loop in of_recording(recording):
            self.loops.keep(loop)


def files_of_command(device: Device, planner: Planner, words: list[str], folders: list[str]) -> Found:
    """For a command: the executables that its words name, and libraries in the given folders, or else beside it."""
    script = f"""for word in {" ".join(map(quote, words))}; do
  path=$(command -v "$word" 2> /dev/null) || path=$word
  [ -f "$path" ] && [ -x "$path" ] && echo "$path" && readlink -f "$path"
done; true"""
    programs = list(dict.fromkeys(device.way.ask(script).splitlines()))
    places = " ".join(map(quote, folders or folders_beside(programs, words)))
    names = " -o ".join(f"-name {quote(prefix + '*')}" for prefix in library_prefixes(planner))
    shown = "".join(f"echo {quote(path)}; " for path in [*programs, *planner.named.paths()])
    files = device.identify(f"{shown}find {places} \\( {names} \\) ! -type d 2> /dev/null")
    return [path for path in programs if path in files], files


def files_of_process(device: Device, planner: Planner, words: list[str], folders: list[str]) -> Found:
    """For a running process: its executable, and the libraries that it has mapped or that are in the given folders.

    In another mount namespace, they are accessed below the process's root.
    """
    proc = f"/proc/{words[0]}"
    root = device.way.ask(f"[ $(readlink {proc}/ns/mnt) = $(readlink /proc/self/ns/mnt) ] || printf {proc}/root").strip()
    program = root + device.way.ask(f"readlink -f {proc}/exe").strip()
    listing = f"echo {quote(program)}; sed -n 's|^[^/]* r.x[^/]*/|{root}/|p' {proc}/maps"
    mapped = device.identify(f"({listing}) | sort -u")
    beginnings = tuple(library_prefixes(planner))
    files = {path: i for path, i in mapped.items() if path == program or PurePosixPath(path).name.startswith(beginnings)}
    return [program], files | (files_of_command(device, planner, [], folders)[1] if folders else {})


def library_prefixes(planner: Planner) -> list[str]:
    """Prefixes of the names of files that may contain an engine's code."""
    return sorted({prefix for engine in planner.engines for prefix in engine.libraries} | planner.named.prefixes())


def folders_beside(programs: Iterable[str], words: Iterable[str]) -> list[str]:
    """The usual folders of programs' libraries: their own, and those in a word `LD_LIBRARY_PATH=`."""
    own = [PurePosixPath(path).parent for path in programs]
    beside = [str(each) for each in own if each.name != "bin"] + [f"{each.parent}/lib" for each in own]
    named = [word.partition("=")[2] for word in words if word.startswith("LD_LIBRARY_PATH=")]
    return list(dict.fromkeys(beside + [each for path in named for each in path.split(":") if each]))
