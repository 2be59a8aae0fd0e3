"""A thousand recordings in a folder and in an object store: tables by two Dask workers, then one query over all.

sudo python -m benchmarks.many_recordings [--count 1000] [--recording RUN] [--stores folder s3]

The recordings are copies of one (default: the demo's, 8 tokens) with times stretched by up to 3 %, for ten devices and
ten builds. One has a truncated manifest, and a worker is killed while working: neither may affect the others. Memory is
the maximum sum over all processes of a command (proportional set sizes), sampled every 0.2 s. The store is moto's, in memory on
this machine: its times do not include a network.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.lib.models import demo_model
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from tracer.recording.format import RING_HEADER_BYTES, STREAMS, write_manifest
from workloads import ROOT
from workloads.object_store import object_store

DEVICES = BUILDS = 10
STRETCH, PERIOD_S, AT_WORK_S = 0.03, 0.2, 5.0
BUCKET = "recordings"
SQL = "select device, build, count(*) steps, avg(duration_ns) / 1e6 ms from tokens join recordings using (recording) group by all"


@dataclass
class Spent:
    """A command's costs and output."""

    seconds: float
    peak_bytes: int
    code: int
    out: str
    err: str
    killed: int = 0


def record_demo(folder: Path) -> Path:
    """Record the demo."""
    demo = ["-m", "moescope", "generate", str(demo_model()), "--prompt", "A cache", "--max-new-tokens", "8", "--ignore-end"]
    command = [sys.executable, "-m", "tracer", "run", "--no-views", "-o", str(folder), "--", sys.executable, *demo]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def make_copies(source: Path, root: Path, count: int) -> None:
    """Make the recordings; the last one's manifest is truncated."""
    rng, manifest = np.random.default_rng(0), json.loads((source / "manifest.json").read_text())
    slots = {name: np.fromfile(source / f"{name}.bin", np.uint8).reshape(-1, width) for name, width in STREAMS.items()}
    manifest.pop("checksums", None)
    for number in range(count):
        device, build = number % DEVICES, number // DEVICES % BUILDS
        folder = root / f"device=board-{device}" / f"build=v{build}" / f"run-{number:04}"
        folder.mkdir(parents=True)
        manifest["clocks"] = [{**clock, "realtime_ns": (1_700_000_000 + number) * 10**9} for clock in manifest["clocks"]]
        write_manifest(folder, manifest)
        for name, rows in slots.items():
            (folder / f"{name}.bin").write_bytes(stretched_slots(rows, 1 + rng.uniform(-STRETCH, STRETCH)).tobytes())
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def stretched_slots(slots: np.ndarray, factor: float) -> np.ndarray:
    """The slots with times stretched relative to the first record."""
    answer = slots.copy()
    ts = answer[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].view(np.uint64)[:, 0]
    known = ts > 0
    first = ts[known].min() if known.any() else 0
    ts[known] = first + ((ts[known] - first) * factor).astype(np.uint64)
    return answer


def run_analyzer(env: dict[str, str], *words: str, kill: bool = False) -> Spent:
    """Run the analyzer; with `kill`, its busiest worker is killed once after AT_WORK_S of CPU time."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "moescope", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err)
        peak, killed = 0, 0
        while process.poll() is None:
            family = list(process_tree(process.pid))
            peak = max(peak, sum(memory_of(each) for each in family))
            if kill and not killed:
                killed = lose_worker(family[1:])
            time.sleep(PERIOD_S)
        seconds = time.perf_counter() - begin
        out.seek(0), err.seek(0)
        return Spent(seconds, peak, process.returncode, out.read(), err.read(), killed)


def process_tree(pid: int) -> Iterator[psutil.Process]:
    """A process and all its descendants."""
    try:
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def memory_of(process: psutil.Process) -> int:
    """Its proportional set size; 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def lose_worker(family: list[psutil.Process]) -> int:
    """Kill a worker that has worked long enough; returns the number killed."""
    for process in family:
        try:
            spent = process.cpu_times()
            if spent.user + spent.system > AT_WORK_S:
                os.kill(process.pid, signal.SIGKILL)
                return 1
        except (psutil.Error, ProcessLookupError):
            continue
    return 0


@contextmanager
def copy_to_store(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(address, environment) of the recordings, copied to a store of this kind."""
    if kind == "folder":
        target = folder.with_name("stored")
        shutil.copytree(folder, target)
        yield str(target), dict(os.environ)
        return
    import s3fs

    with object_store(BUCKET) as env:
        remote = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=env["AWS_ENDPOINT_URL"], skip_instance_cache=True)
        remote.put(str(folder), f"{BUCKET}/all", recursive=True)
        yield f"s3://{BUCKET}/all", env


def measure_series(kind: str, folder: Path, count: int, report: Report) -> None:
    """Conversion, query and history over one store."""
    with copy_to_store(kind, folder) as (address, env):
        made = run_analyzer(env, "query", address, "--dask", "2", "--json", kill=True)
        answer = json.loads(made.out)
        assert (made.code, answer["recordings"], len(answer["failed"])) == (1, count - 1, 1), made.err
        asked = run_analyzer(env, "query", address, SQL, "--json")
        rows = json.loads(asked.out)["rows"]
        assert asked.code == 1 and len(rows) == min(count - 1, DEVICES * BUILDS)
        past = run_analyzer(env, "history", address, "--json")
        assert sum(row["runs"] for row in json.loads(past.out)["builds"] if row["metric"] == "TPOT, median") == count - 1, (
            past.err
        )
    for name, spent in (("tables by 2 workers", made), ("query", asked), ("history", past)):
        report.add(f"{kind}: {name}", "s", single(spent.seconds, count))
        report.add(f"{kind}: {name}, peak memory", "MiB", single(spent.peak_bytes / 2**20, count))
    report.add(f"{kind}: workers lost", "", single(made.killed))
    report.add(f"{kind}: recordings named as unreadable", "", single(len(answer["failed"]), count))


def main(args: Namespace, report: Report) -> None:
    """Measure each store."""
    with tempfile.TemporaryDirectory() as name:
        source = args.recording or record_demo(Path(name) / "source")
        make_copies(source, Path(name) / "all", args.count)
        size_kib = sum(path.stat().st_size for path in source.glob("*.bin")) / 1024
        report.note(f"{args.count} recordings of {size_kib:,.0f} KiB, {DEVICES} devices, {BUILDS} builds")
        for kind in args.stores:
            measure_series(kind, Path(name) / "all", args.count, report)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="recordings (default: %(default)s)")
    parser.add_argument("--recording", type=Path, metavar="RUN", help="what is copied (default: the demo is recorded)")
    parser.add_argument("--stores", nargs="+", choices=("folder", "s3"), default=["folder", "s3"], help="default: both")
    words = parser.parse_args()
    kept = Report("many_recordings", words)
    main(words, kept)
    kept.finish()
