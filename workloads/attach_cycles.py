"""Attaches to a running program, records briefly, detaches, and counts what is left behind."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.recording.format import Recording
from workloads import ROOT
from workloads.compiling import WITH_SITES, compile_c
from workloads.kernel_objects import Held, held_in_kernel, recorder_of, still_in_kernel

SETTLE_SECONDS = 5.0  # the kernel frees programs and maps after a grace period
MOMENT = 0.05
LEVELS = "token,graph,operator,expert"


@dataclass(frozen=True)
class Cycle:
    """One attach and detach; `resident_bytes` is the recorder's largest."""

    seconds: float
    probes: int
    records: int
    lost: int
    changed_sites: int
    left_in_kernel: int
    resident_bytes: int


def left_after_a_while(held: Held) -> int:
    """The number of these that the kernel still has after a grace period."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (count := len(still_in_kernel(held))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return count


def resident_bytes(pid: int) -> int:
    """The resident size of a process in bytes; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run_cycle(pid: int, folder: Path, engine: str, levels: str) -> Cycle:
    """Attach to a running process, record briefly, detach; raises RuntimeError with the tracer's words if it fails."""
    options = ["--no-views", "--engine", engine, "--levels", levels, "--ring-mib", "1", "--duration", str(MOMENT)]
    began, held, resident = time.monotonic(), set(), 0
    command = [sys.executable, "-m", "tracer", "attach", *options, "--pid", str(pid), "-o", str(folder)]
    with tempfile.TemporaryFile("w+") as printed, subprocess.Popen(command, cwd=ROOT, stderr=printed, text=True) as tracer:
        while tracer.poll() is None:
            recorder = recorder_of(tracer)
            held |= held_in_kernel(recorder)
            resident = max(resident, resident_bytes(recorder))
            time.sleep(0.01)
        if tracer.returncode:
            printed.seek(0)
            raise RuntimeError(printed.read())
    ended, manifest = time.monotonic(), Recording(folder).manifest
    return Cycle(
        seconds=ended - began,
        probes=len(manifest["probes"]),
        records=sum(manifest["records"].values()),
        lost=sum(manifest["lost"].values()),
        changed_sites=changed_sites(pid, manifest),
        left_in_kernel=left_after_a_while(held),
        resident_bytes=resident,
    )


def run_cycles(
    pid: int, count: int, engine: str = "moescope", levels: str = LEVELS, progress: Callable[[int], object] | None = None
) -> list[Cycle]:
    """`count` cycles on one process; `progress` is called after each with the number done."""
    folder = Path(tempfile.mkdtemp())
    cycles: list[Cycle] = []
    try:
        for number in range(count):
            cycles.append(run_cycle(pid, folder / str(number), engine, levels))
            shutil.rmtree(folder / str(number))
            if progress:
                progress(number + 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cycles


def start_steady(folder: Path) -> subprocess.Popen[str]:
    """Start the program that checks its own work."""
    program = compile_c(folder / "steady", "steady.c", flags=WITH_SITES)
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
