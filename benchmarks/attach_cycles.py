"""Attach to a living program, record for a moment, detach: over and over, with the accounts of what is left behind.

    sudo python -m benchmarks.attach_cycles [--cycles 200] [--pid PID --engine auto] [--levels token,graph,...] [--json FILE]

Without --pid a program is started that checks its own work all the time. After each cycle nothing of the tracer may be left:
no descriptor of ours, no BPF program or map that we loaded, no changed byte in the target's code. What a probe
costs is measured once, not in every cycle. Most of the time goes into grace periods of the kernel, one for each probe.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
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
from workloads.attach_cycles import changed_sites
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
    """BPF programs and maps by the kernel's own numbers."""

    def __init__(self, session: Session):
        self.lib = session.kernel.lib
        programs = [session.loader.program_fd(name) for name in session.probes.programs()]
        maps = [session.loader.map_fd(name) for name in ("events", "details", "threads", "lost", "calls", "described")]
        self.programs, self.maps = [self._id(fd) for fd in programs], [self._id(fd) for fd in maps]

    def _id(self, fd: int) -> int:
        """The number behind a descriptor: both info structs begin with type and id."""
        info = ProgramInfo()
        size = ctypes.c_uint32(ctypes.sizeof(info))
        if self.lib.bpf_obj_get_info_by_fd(fd, ctypes.byref(info), ctypes.byref(size)):
            raise OSError("BPF_OBJ_GET_INFO_BY_FD failed")
        return int(info.id)

    def left(self) -> int:
        """How many of them the kernel still has, a grace period later."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (count := self._count()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return count

    def _count(self) -> int:
        found = [self.lib.bpf_prog_get_fd_by_id(number) for number in self.programs]
        found += [self.lib.bpf_map_get_fd_by_id(number) for number in self.maps]
        alive = [fd for fd in found if fd >= 0]
        for fd in alive:
            os.close(fd)
        return len(alive)


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_cycle(pid: int, folder: Path, engine: str, levels: str) -> Cycle:
    """Load, attach to a living process, record for a moment, detach, close."""
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


def run_cycles(pid: int, count: int, engine: str = "moescope", levels: str = LEVELS, told: Any = None) -> list[Cycle]:
    """`count` cycles on one process; `told` is called after each."""
    folder, plain = Path(tempfile.mkdtemp()), session_module.measure
    session_module.measure = cache(lambda _: measure(_))  # type: ignore[assignment]
    found: list[Cycle] = []
    try:
        for number in range(count):
            found.append(run_cycle(pid, folder / str(number), engine, levels))
            shutil.rmtree(folder / str(number))
            if told:
                told(number, found[-1])
    finally:
        session_module.measure = plain
        shutil.rmtree(folder, ignore_errors=True)
    return found


def start_steady(folder: Path) -> subprocess.Popen[str]:
    """The program that checks its own work, running."""
    program = compiled(folder / "steady", "steady.c", flags=WITH_SITES)
    return subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)


def end_steady(program: subprocess.Popen[str]) -> dict[str, int]:
    """Ends it; what it says of its work, with its exit code."""
    program.terminate()
    told = program.communicate(timeout=30)[0]
    return {**json.loads(told), "exit_code": program.returncode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--pid", type=int, help="a process that runs an engine (default: a program of ours)")
    parser.add_argument("--engine", default="moescope", help="as of `tracer attach` (default: moescope)")
    parser.add_argument("--levels", default=LEVELS, help=f"default: {LEVELS}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    program = None if args.pid else start_steady(folder)
    time.sleep(0.2)
    pid = program.pid if program else args.pid
    began = time.monotonic()
    found = run_cycles(pid, args.cycles, args.engine, args.levels, lambda n, _: print(f"\r{n + 1}", end="", file=sys.stderr))
    print(f"\r{len(found)} cycles in {time.monotonic() - began:.0f} s", file=sys.stderr)
    told = end_steady(program) if program else {}
    if args.json:
        args.json.write_text(json.dumps({"cycles": [asdict(cycle) for cycle in found], "target": told}, indent=1))
    shutil.rmtree(folder)
    return report(found, told)


def report(found: list[Cycle], told: dict[str, int]) -> int:
    """Say what was seen; 1 where something was left behind."""
    for name in ("load_s", "attach_s", "detach_s"):
        times = [getattr(cycle, name) for cycle in found]
        print(f"{name[:-2]:8} median {1000 * statistics.median(times):7.1f} ms, longest {1000 * max(times):7.1f} ms")
    first, last = found[min(1, len(found) - 1)], found[-1]
    records, lost = sum(cycle.records for cycle in found), sum(cycle.lost for cycle in found)
    left, changed = sum(cycle.left_in_kernel for cycle in found), sum(cycle.changed_sites for cycle in found)
    print(f"probes {last.probes}, records {records:,}, lost {lost:,}")
    print(f"descriptors {first.descriptors} -> {last.descriptors}")
    print(f"resident {first.resident_bytes >> 20} -> {last.resident_bytes >> 20} MiB")
    print(f"BPF programs and maps left behind {left}, probe sites left changed {changed}")
    if told:
        longest = told["longest_ns"] / 1e6
        print(f"target: {told['rounds']:,} rounds, {told['wrong']} wrong, longest {longest:.1f} ms, exit {told['exit_code']}")
    return 1 if left or changed or last.descriptors > first.descriptors or told.get("exit_code") else 0


if __name__ == "__main__":
    sys.exit(main())
