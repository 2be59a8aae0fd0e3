"""Attaches to a running program, records briefly, detaches, and counts what is left behind."""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tracer import session as session_module
from tracer.engines import choose
from tracer.kernel.libbpf import ProgramInfo
from tracer.probes.calibration import measure
from tracer.recording.format import Recording
from tracer.session import Options, Session
from tracer.target.process import Followed
from workloads.compiling import WITH_SITES, compiled

SETTLE_SECONDS = 5.0  # the kernel frees programs and maps after a grace period
MOMENT = 0.05
LEVELS = "token,graph,operator,expert"


@dataclass(frozen=True)
class Cycle:
    """One attach and detach; times in seconds."""

    load_s: float
    attach_s: float
    detach_s: float
    probes: int
    records: int
    lost: int
    changed_sites: int
    descriptors: int
    left_in_kernel: int
    resident_bytes: int


class Ids:
    """BPF programs and maps by their kernel ids."""

    def __init__(self, session: Session):
        self.lib = session.kernel.lib
        programs = [session.loader.program_fd(name) for name in session.probes.programs()]
        maps = [session.loader.map_fd(name) for name in ("events", "details", "threads", "lost", "calls", "described")]
        self.programs, self.maps = [self._id(fd) for fd in programs], [self._id(fd) for fd in maps]

    def _id(self, fd: int) -> int:
        """The kernel id of a descriptor's object: both info structs begin with type and id."""
        info = ProgramInfo()
        size = ctypes.c_uint32(ctypes.sizeof(info))
        if self.lib.bpf_obj_get_info_by_fd(fd, ctypes.byref(info), ctypes.byref(size)):
            raise OSError("BPF_OBJ_GET_INFO_BY_FD failed")
        return int(info.id)

    def left(self) -> int:
        """The number of these that the kernel still has after a grace period."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (count := self._count()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return count

    def _count(self) -> int:
        descriptors = [self.lib.bpf_prog_get_fd_by_id(number) for number in self.programs]
        descriptors += [self.lib.bpf_map_get_fd_by_id(number) for number in self.maps]
        alive = [fd for fd in descriptors if fd >= 0]
        for fd in alive:
            os.close(fd)
        return len(alive)


def resident_bytes() -> int:
    """The resident size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_cycle(pid: int, folder: Path, engine: str, levels: str) -> Cycle:
    """Load, attach to a running process, record briefly, detach, close."""
    folder.mkdir()
    engines = choose(engine.split(","))
    options = Options(folder, engines, set(levels.split(",")), ring_bytes=1 << 20, duration_s=MOMENT)
    marks = [time.monotonic()]
    with Session(options) as session:
        session.load()
        marks.append(time.monotonic())
        session.follow(Followed(pid))
        marks.append(time.monotonic())
        session.run(lambda _: None)
        ids = Ids(session)
        marks.append(time.monotonic())
        session.finish()
        marks.append(time.monotonic())
    recording = Recording(folder)
    manifest = recording.manifest
    return Cycle(
        load_s=marks[1] - marks[0],
        attach_s=marks[2] - marks[1],
        detach_s=marks[4] - marks[3],
        probes=len(manifest["probes"]),
        records=sum(manifest["records"].values()),
        lost=sum(manifest["lost"].values()),
        changed_sites=changed_sites(pid, manifest),
        descriptors=len(os.listdir("/proc/self/fd")),
        left_in_kernel=ids.left(),
        resident_bytes=resident_bytes(),
    )


def run_cycles(
    pid: int, count: int, engine: str = "moescope", levels: str = LEVELS, progress: Callable[[int], object] | None = None
) -> list[Cycle]:
    """`count` cycles on one process; `progress` is called after each with the number done."""
    folder, plain = Path(tempfile.mkdtemp()), session_module.measure
    session_module.measure = cache(lambda _: measure(_))  # type: ignore[assignment]
    cycles: list[Cycle] = []
    try:
        for number in range(count):
            cycles.append(run_cycle(pid, folder / str(number), engine, levels))
            shutil.rmtree(folder / str(number))
            if progress:
                progress(number + 1)
    finally:
        session_module.measure = plain
        shutil.rmtree(folder, ignore_errors=True)
    return cycles


def start_steady(folder: Path) -> subprocess.Popen[str]:
    """Start the program that checks its own work."""
    program = compiled(folder / "steady", "steady.c", flags=WITH_SITES)
    return subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)


def end_steady(program: subprocess.Popen[str]) -> dict[str, int]:
    """End the program; returns its report on its work, with its exit code."""
    program.terminate()
    printed = program.communicate(timeout=30)[0]
    return {**json.loads(printed), "exit_code": program.returncode}


def changed_sites(pid: int, manifest: dict[str, Any]) -> int:
    """The number of engine probes at which the target's memory differs from the file."""
    changed = 0
    maps = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for probe in manifest["probes"]:
            for row in maps:
                start, end = (int(part, 16) for part in row[0].split("-"))
                address = start + probe["offset"] - int(row[2], 16)
                if len(row) == 6 and row[5] == probe["library"] and "x" in row[1] and start <= address < end:
                    memory.seek(address)
                    with open(probe["library"], "rb") as file:
                        file.seek(probe["offset"])
                        changed += memory.read(5) != file.read(5)
    return changed
