"""QNN: every profile event against ONNX Runtime's own CSV over many executions, and the cost of the probes.

    sudo python -m benchmarks.qnn truth [--executes 10000]
    sudo python -m benchmarks.qnn overhead [--levels off,detailed] [--rows 8,64,512] [--rounds 12] [--seconds 0.5] [--hits]

`truth` traces a plain onnxruntime-qnn program of two sessions at detailed level and compares the recording with its CSVs, row
by row. `overhead` measures like `benchmarks.overhead`: for each level and size one process executes continuously, and the
tracer attaches to it and leaves it in every round. A round's change is the ratio of the median run with probes to that of the
windows before and after it; the figure is the median over the rounds with its 95 % bootstrap interval, and the same for windows
without probes among each other, which shows the noise of a comparison. The same is given for the CPU time of the executing
thread: all probes are hit there, and neighbours affect it less than wall time. `--hits` adds the hits of each probe per
execution. On x86-64 the NPU is Qualcomm's emulator: its executions take the time of the host.
"""

import argparse
import contextlib
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.tables.store import load_tables
from benchmarks.lib.decoding import Engine
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import quartiles, single
from benchmarks.lib.windows import Block, Window, alternate_windows, measure_slowdown, token_times
from workloads import PROGRAMS, ROOT

PROGRAM = str(PROGRAMS / "plain_qnn.py")
LABELS = ("emulator",) if platform.machine() == "x86_64" else ()
UNITS = {"US": "us", "CYCLES": "cycles", "COUNT": "count", "BYTES": "bytes"}
WARM_UP_RUNS, WARM_UP_S = 20, 1.0
Row = tuple[str, int, str, int]


def csv_rows(path: Path) -> list[Row]:
    """(unit, value, name, depth) of a CSV's events, in order."""
    with path.open(newline="") as file:
        return [
            (UNITS[row["Unit of Measurement"]], int(row["Time"]), row["Event Identifier"], int(row["Event Level"] != "ROOT"))
            for row in csv.DictReader(file)
        ]


def compare_with_csv(args: argparse.Namespace, report: Report) -> int:
    """Compare the recording with the CSVs; returns 1 if a row differs, is lost or unmatched."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, PROGRAM, name, str(args.executes // 2)]
        subprocess.run(traced_command(folder / "run", command), cwd=name, env=path_env(), check=True, stdout=subprocess.DEVNULL)
        expected = [row for path in sorted(folder.glob("profile*.csv")) for row in csv_rows(path)]
        tables, manifest = load_tables(folder / "run"), json.loads((folder / "run" / "manifest.json").read_text())
        events, executes = tables["qnn_events"], tables["qnn_executes"]
        rows = list(zip(events["unit"], (int(v) for v in events["value"]), events["name"], events["depth"], strict=True))
        differing = sum(a != b for a, b in zip(rows, expected, strict=False)) + abs(len(rows) - len(expected))
        unjoined = int(((events["execute_id"] < 0) & (events["call_id"] < 0)).sum())
        lost = sum(manifest["lost"].values())
    counts = {"executions": len(executes), "rows of CSV": len(expected), "events recorded": len(rows)}
    counts |= {"rows that differ": differing, "records lost": lost, "events unjoined": unjoined}
    for name, count in (counts | {"relations broken": len(tables["qnn_findings"])}).items():
        report.add(name, "count", single(count, len(executes)), labels=LABELS)
    return int(bool(differing or lost or unjoined or len(executes) != 2 * (args.executes // 2)))


def path_env() -> dict[str, str]:
    """The environment in which our modules are imported from this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def traced_command(run: Path, command: list[str]) -> list[str]:
    """The command under the tracer, at level qnn."""
    return [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", "qnn", "-o", str(run), "--", *command]


def measure_overhead(args: argparse.Namespace, report: Report) -> int:
    """Measure one process for each level and size."""
    for level, rows in product(args.levels.split(","), args.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            measure_process(level, rows, args, Path(folder), report)
    return 0


def measure_process(level: str, rows: str, args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Measure a process's runs with probes alternately on and off."""
    command = [sys.executable, "-m", "benchmarks.programs.execute_qnn", str(folder), level, rows]
    with contextlib.closing(Engine(command, folder / "runs.bin", 1)) as engine:
        engine.wait_for_tokens(WARM_UP_RUNS)
        time.sleep(WARM_UP_S)
        windows, manifests = alternate_windows(engine, "--levels qnn", args.rounds, args.seconds, folder / "run")
        engine.close()
        runs, used = engine.tokens(), np.fromfile(folder / "cpu.bin", "<u8").astype(np.int64)
    name = f"profiling {level}, {rows} rows"
    add_change(report, f"{name}, by the clock", windows, runs)
    add_change(report, f"{name}, by CPU time", windows, np.column_stack((runs[:, 1] - used[: len(runs)], runs[:, 1])))
    add_account(report, name, manifests, args.hits)


def add_change(report: Report, name: str, windows: list[Window], runs: np.ndarray) -> None:
    """Add the run without probes, its change with them, and differences among windows without them."""
    without = windows[::2]
    report.add(f"{name}: a run", "us", quartiles(token_times(runs, *without) / 1e3), labels=LABELS)
    cost = measure_slowdown([Block(windows)], runs)
    report.add(f"{name}: change by probes", "%", cost.spread.scaled(100), against="no probes", labels=LABELS)
    if len(without) > 2:
        noise = measure_slowdown([Block(without[: (len(without) - 1) // 2 * 2 + 1])], runs)
        report.add(f"{name}: noise alone", "%", noise.spread.scaled(100), against="no probes", labels=LABELS)


def add_account(report: Report, name: str, manifests: list[dict[str, Any]], every_probe: bool) -> None:
    """Add hits per execution, and losses, of all recordings of a process."""
    executes = max(1, sum(manifest["records"].get("qnn_execute_begin", 0) for manifest in manifests))
    hits: Counter[str] = Counter()
    for manifest in manifests:
        hits.update({row["program"]: row["hits"] for row in manifest["probes"] if row["level"] == "qnn"})
    report.add(f"{name}: hits per execution", "count", single(hits.total() / executes, executes))
    for program, count in hits.most_common() if every_probe else ():
        report.add(f"{name}: hits of {program} per execution", "count", single(count / executes, executes))
    report.add(f"{name}: records lost", "count", single(sum(sum(manifest["lost"].values()) for manifest in manifests)))


def main() -> int:
    """Parse and run."""
    parser = make_parser(__doc__, rounds=12)
    parser.add_argument("what", choices=("truth", "overhead"))
    parser.add_argument("--executes", type=int, default=10_000)
    parser.add_argument("--levels", default="off,detailed")
    parser.add_argument("--rows", default="8,64,512", help="sizes of the input")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of each window")
    parser.add_argument("--hits", action="store_true", help="the hits of each probe")
    args = parser.parse_args()
    report = Report("qnn", args)
    status = {"truth": compare_with_csv, "overhead": measure_overhead}[args.what](args, report)
    report.finish()
    return status


if __name__ == "__main__":
    sys.exit(main())
