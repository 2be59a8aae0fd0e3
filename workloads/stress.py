"""Traces a program that hits the cheapest kind of site in a loop, and compares the counts of its hits."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracer.recording.format import STREAMS
from workloads.compiling import WITH_SITES, compile_c
from workloads.raw_records import RawRecording

KIND = "evict"
LEVEL = ["--engine", "moescope", "--levels", "expert"]
TRACER = [sys.executable, "-m", "tracer"]


@dataclass(frozen=True)
class Result:
    """One run; `hits` is the program's count, `records` the file's, `lost` the kernel side's."""

    threads: int
    ring_bytes: int
    seconds: float
    hits: int
    records: int
    lost: int
    tracer_cpu_s: float
    bpf_s: float
    bytes_per_record: float
    resident_bytes: int

    @property
    def exact(self) -> bool:
        """Whether every hit is accounted for."""
        return self.hits == self.records + self.lost


def build_program(folder: Path) -> Path:
    """Compile the program."""
    return compile_c(folder / "stress", "stress.c", flags=WITH_SITES)


def record_stress(program: Path, seconds: float, threads: int, ring_mib: int, buffer: str = "ring") -> Result:
    """Record the program once, and return the counts; the recording is removed."""
    folder = Path(tempfile.mkdtemp(dir=program.parent))
    command = [*TRACER, "run", "--no-views", *LEVEL, "--buffer", buffer, "--ring-mib", str(ring_mib), "-o", str(folder / "run")]
    command += ["--", str(program), str(seconds), str(threads)]
    printed, resident_bytes = run_recorder(command)
    recording = RawRecording(folder / "run")
    records = int(np.count_nonzero(recording.kinds("events") == recording.layouts[KIND][0]))
    written = sum((folder / "run" / f"{stream}.bin").stat().st_size for stream in STREAMS)
    manifest = recording.manifest
    del recording
    shutil.rmtree(folder)
    return Result(
        threads=threads,
        ring_bytes=ring_mib << 20,
        seconds=printed["ns"] / 1e9,
        hits=printed["hits"],
        records=records,
        lost=manifest["lost"].get(KIND, 0),
        tracer_cpu_s=manifest["cost"]["tracer_cpu_ns"] / 1e9,
        bpf_s=manifest["cost"]["bpf_ns"] / 1e9,
        bytes_per_record=written / max(1, records),
        resident_bytes=resident_bytes,
    )


def run_recorder(command: list[str]) -> tuple[dict[str, int], int]:
    """(the program's output, the recorder's maximum resident set in bytes); raises RuntimeError if nothing was recorded."""
    most = 0
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=printed, stderr=said)
        while process.poll() is None:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                most = int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
            time.sleep(0.1)
        for file in (printed, said):
            file.seek(0)
        if process.returncode not in (0, 1):  # 1: something was lost
            raise RuntimeError(said.read())
        return json.loads(printed.read().splitlines()[-1]), most << 10
