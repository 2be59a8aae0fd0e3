"""A program that hits the cheapest kind of site in a loop, traced once, with the accounts of its hits."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracer.recording.format import STREAMS
from workloads.compiling import WITH_SITES, compiled
from workloads.raw_records import RawRecording

KIND = "evict"


@dataclass(frozen=True)
class Result:
    """One run; `hits` are the program's, `records` stand in the file, `lost` is the kernel side's count."""

    threads: int
    ring_bytes: int
    seconds: float
    hits: int
    records: int
    lost: int
    tracer_cpu_s: float
    bpf_s: float
    bytes_per_record: float

    @property
    def exact(self) -> bool:
        """Whether no hit is unaccounted for."""
        return self.hits == self.records + self.lost


def build(folder: Path) -> Path:
    """The program, compiled."""
    return compiled(folder / "stress", "stress.c", flags=WITH_SITES)


def stress(program: Path, seconds: float, threads: int, ring_mib: int, buffer: str = "ring") -> Result:
    """Trace the program once and take the accounts; its recording is removed."""
    folder = Path(tempfile.mkdtemp(dir=program.parent))
    options = [
        "--no-views",
        "--engine",
        "moescope",
        "--levels",
        "expert",
        "--ring-mib",
        str(ring_mib),
        "--buffer",
        buffer,
        "-o",
        str(folder / "run"),
    ]
    command = [sys.executable, "-m", "tracer", "run", *options, "--", str(program), str(seconds), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: something was lost
        raise RuntimeError(done.stderr)
    printed = json.loads(done.stdout.splitlines()[-1])
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
    )
