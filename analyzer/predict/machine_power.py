"""Watts of this machine while it is idle, computes, moves bytes and reads storage, as the recorder reads its power sensors.

python -m analyzer.predict.machine_power LOG FOLDER     the loads; LOG gets a line of JSON with the times of each
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from analyzer.errors import PredictError
from analyzer.predict.machine import flops_work, memory_work
from analyzer.questions.energy import energy_between, idle_floor, wide_first
from analyzer.questions.energy_readings import rail_readings
from analyzer.tables.power import POWER
from analyzer.tables.store import load_tables

LOAD_NS, SETTLED_NS, PAUSE_S = 4_000_000_000, 1_000_000_000, 0.5
"""How long each load lasts, and after which time a sensor has seen it."""
HZ = "50"
FILE_BYTES = 64 << 20


def measure_watts(folder: Path | None = None, sysfs: str = "/sys") -> dict[str, float | str]:
    """`idle`, `compute`, `memory`, `storage` in watts, and `rail`. Raises PredictError if no sensor is read often enough."""
    with tempfile.TemporaryDirectory() as scratch:
        recording, log = Path(scratch) / "recording", Path(scratch) / "log"
        loads = [sys.executable, "-m", __name__, str(log), str(folder or scratch)]
        words = ["run", "--levels", "token", "--power", HZ, "--sysfs", sysfs, "--no-views", "-o", str(recording), "--", *loads]
        done = subprocess.run([sys.executable, "-m", "moescope", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PredictError(f"no watts: the loads could not be recorded: {(done.stderr or done.stdout).strip()[-300:]}")
        windows = {row["load"]: (row["begin_ns"], row["end_ns"]) for row in map(json.loads, log.read_text().splitlines())}
        return watts_of(recording, windows)


def watts_of(recording: Path, windows: dict[str, tuple[int, int]]) -> dict[str, float | str]:
    """Mean watts of the loads by the rail that covers most, of those that were read often enough."""
    tables = load_tables(recording, ("rails", "power"))
    for rail in wide_first(tables["rails"]).to_dict("records"):
        readings = rail_readings(tables["power"][tables["power"]["rail_id"] == rail["rail_id"]], rail["kind"] != POWER)
        floor = idle_floor(readings, (rail["floor_begin_ns"], rail["floor_end_ns"]), 0.0) if len(readings.end) > 1 else None
        begin, end = (np.array([span[side] for span in windows.values()]) for side in (0, 1))
        begin += SETTLED_NS
        watts = energy_between(readings, begin, end) / ((end - begin) * 1e-9) if floor else np.array([np.nan])
        if floor and np.isfinite(watts).all():
            loads = dict(zip(windows, watts.tolist(), strict=True))
            return {"idle": floor[0], **loads, "rail": f"{rail['rail']} ({rail['source']})"}
    names = ", ".join(tables["rails"]["rail"]) or "none"
    raise PredictError(f"no watts: no power sensor is read often enough (found: {names}); moescope doctor says what there is")


def storage_work(folder: Path) -> Iterator[None]:
    """Read a file past the page cache, a piece at each step."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            while os.read(file.fileno(), 4 << 20):
                yield


def run_load(work: Callable[[], object]) -> dict[str, int]:
    """Repeat the work for LOAD_NS; returns when."""
    begin = time.monotonic_ns()
    while time.monotonic_ns() < begin + LOAD_NS:
        work()
    return {"begin_ns": begin, "end_ns": time.monotonic_ns()}


def main() -> None:
    """Run the loads."""
    log, reads = Path(sys.argv[1]), storage_work(Path(sys.argv[2]))
    works = {"compute": flops_work(), "memory": memory_work(), "storage": lambda: next(reads)}
    rows = []
    for name, work in works.items():
        rows.append({"load": name, **run_load(work)})
        time.sleep(PAUSE_S)
    log.write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
