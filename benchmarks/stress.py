"""How many records a second the tracer takes, and whether it counts exactly what it loses.

    sudo python -m benchmarks.stress [--seconds 30] [--threads 1,2] [--ring-mib 32] [--buffer perf] [--json FILE]

A C program hits the cheapest kind of site (a 5-byte nop in front of a USDT site) in a loop, one record per hit, and counts its
hits. Every hit must be a record in the file or a loss that the kernel side counted: the sums are compared exactly. The
tracer's CPU time is that beyond a run of no length (loading, calibrating), as a share of one core; time in the BPF program
is per hit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tracer.recording.format import STREAMS, Recording
from workloads.compiling import WITH_SITES, compiled

KIND = "evict"
HEAD = "threads ring MiB  seconds         hits    records/s       lost  tracer CPU %  BPF ns/hit  B/record"


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
    told = json.loads(done.stdout.splitlines()[-1])
    recording = Recording(folder / "run")
    records = int(np.count_nonzero(recording.kinds("events") == recording.layouts[KIND][0]))
    written = sum((folder / "run" / f"{stream}.bin").stat().st_size for stream in STREAMS)
    manifest = recording.manifest
    del recording
    shutil.rmtree(folder)
    return Result(
        threads=threads,
        ring_bytes=ring_mib << 20,
        seconds=told["ns"] / 1e9,
        hits=told["hits"],
        records=records,
        lost=manifest["lost"].get(KIND, 0),
        tracer_cpu_s=manifest["cost"]["tracer_cpu_ns"] / 1e9,
        bpf_s=manifest["cost"]["bpf_ns"] / 1e9,
        bytes_per_record=written / max(1, records),
    )


def line(result: Result, idle_cpu_s: float) -> str:
    """One line of the report."""
    rate, share = result.records / result.seconds, (result.tracer_cpu_s - idle_cpu_s) / result.seconds
    exact = "hits = records + lost" if result.exact else f"{result.hits - result.records - result.lost} hits unaccounted for"
    return (
        f"{result.threads:7} {result.ring_bytes >> 20:8} {result.seconds:8.1f} {result.hits:12,} {rate:12,.0f} {result.lost:10,} "
        f"{100 * share:13.1f} {1e9 * result.bpf_s / result.hits:11.0f} {result.bytes_per_record:9.2f}  {exact}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", default="1,2", help="numbers of threads that hit, one run each (default: 1,2)")
    parser.add_argument("--ring-mib", type=int, default=32)
    parser.add_argument("--buffer", choices=("ring", "perf"), default="ring")
    parser.add_argument("--folder", type=Path, help="where recordings go while they are made (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    program = build(folder)
    print(HEAD)
    idle = stress(program, 0, 1, args.ring_mib, args.buffer).tracer_cpu_s
    results = []
    for threads in map(int, args.threads.split(",")):
        results.append(stress(program, args.seconds, threads, args.ring_mib, args.buffer))
        print(line(results[-1], idle), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    shutil.rmtree(folder)
    return 0 if all(result.exact for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
