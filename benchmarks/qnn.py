"""QNN: every profile event against ONNX Runtime's own CSV over many executions, and what the probes cost.

    sudo python -m benchmarks.qnn truth [--executes 10000]
    sudo python -m benchmarks.qnn overhead [--levels off,detailed] [--rows 8,64,512] [--rounds 12] [--seconds 0.5] [--hits]

`truth` traces a plain onnxruntime-qnn program of two sessions at detailed level and compares what was recorded with its CSVs,
row by row. `overhead` measures as benchmarks/overhead.py does: for each level and size one process executes without end, and the
probes on it go on and off. A round's change is the ratio of the median run with probes to that of the windows before and behind
it; the table gives the median over the rounds with its 95 % bootstrap interval, and the same of windows without probes among
each other: what the noise alone makes of a comparison. The same follows for the CPU time of the thread that executes: all probes
are hit there, and neighbours touch it less than the clock. `--hits` tells how often each probe is hit per execution.
The tracer's own CPU time is a share of one core while probes stand.
On x86-64 the NPU is Qualcomm's emulator: its executions take the time of the host.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.tables.store import load
from benchmarks.overhead import Block, Engine, Window, recording, summarize, times, window

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "workloads" / "programs" / "plain_qnn.py")
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


def truth(args: argparse.Namespace) -> int:
    """Compare the recording with the CSVs; 1 where a row differs, is lost or joined nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, PROGRAM, name, str(args.executes // 2)]
        subprocess.run(traced(folder / "run", command), cwd=name, env=path_env(), check=True, stdout=subprocess.DEVNULL)
        expected = [row for path in sorted(folder.glob("profile*.csv")) for row in csv_rows(path)]
        tables, manifest = load(folder / "run"), json.loads((folder / "run" / "manifest.json").read_text())
        events, executes = tables["qnn_events"], tables["qnn_executes"]
        found = list(zip(events["unit"], (int(v) for v in events["value"]), events["name"], events["depth"], strict=True))
        differing = sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))
        unjoined = int(((events["execute_id"] < 0) & (events["call_id"] < 0)).sum())
        lost = sum(manifest["lost"].values())
    print(f"{len(executes):,} executes, {len(expected):,} rows of CSV, {len(found):,} events recorded")
    print(f"rows that differ: {differing}, records lost: {lost}, events unjoined: {unjoined}")
    print(f"relations broken: {len(tables['qnn_findings'])}")
    return int(bool(differing or lost or unjoined or len(executes) != 2 * (args.executes // 2)))


def path_env() -> dict[str, str]:
    """The environment in which our modules are those beside this file."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def traced(run: Path, command: list[str]) -> list[str]:
    """The command under the tracer, at level qnn."""
    return [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", "qnn", "-o", str(run), "--", *command]


def overhead(args: argparse.Namespace) -> int:
    """One process for each level and size."""
    compared_to = f"{'change':>8} {'95 % interval':>18} {'noise alone':>18}"
    print(f"{'level':9} {'rows':>5} {'us per run':>11} {compared_to} | {'CPU us':>8} {compared_to} | hits, lost, own CPU")
    for level in args.levels.split(","):
        for rows in args.rows.split(","):
            with tempfile.TemporaryDirectory() as name:
                show(level, rows, measure(level, rows, args, Path(name)), args.hits)
    return 0


def measure(level: str, rows: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A process's runs with probes on and off by turns."""
    command = [sys.executable, "-m", "benchmarks.programs.execute_qnn", str(folder), level, rows]
    with contextlib.closing(Engine(command, folder / "runs.bin", 1)) as engine:
        with recording(engine, "--levels qnn", folder / "run") as session:
            assert engine.process.stdin is not None  # a pipe
            engine.process.stdin.write(b"\n")
            engine.process.stdin.flush()
            engine.wait_for_tokens(WARM_UP_RUNS)
            time.sleep(WARM_UP_S)
            windows = []
            for number in range(2 * args.rounds + 1):
                (session.probes.restore if number % 2 else session.probes.shed)(["qnn"])
                windows.append(window(args.seconds))
        engine.close()
        runs, used = engine.tokens(), np.fromfile(folder / "cpu.bin", "<u8").astype(np.int64)
    cpu = np.column_stack((runs[:, 1] - used[: len(runs)], runs[:, 1]))
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    executes = max(1, manifest["records"].get("qnn_execute_begin", 0))
    hits = {row["program"]: row["hits"] / executes for row in manifest["probes"] if row["level"] == "qnn"}
    return {
        "measures": [compared(windows, runs), compared(windows, cpu)],
        "hits": {program: count for program, count in hits.items() if count > 0.01},
        "lost": sum(manifest["lost"].values()),
    }


def compared(windows: list[Window], runs: np.ndarray) -> dict[str, Any]:
    """The median run without probes, us, how it changes with them, and how windows without them differ among each other."""
    without = windows[::2]
    probes, noise = (summarize("", [Block(each)], runs) for each in (windows, without[: (len(without) - 1) // 2 * 2 + 1]))
    return {"us": float(np.median(times(runs, *without))) / 1e3, "probes": probes, "noise": noise}


def bounds(row: dict[str, Any]) -> str:
    """An interval in percent."""
    return f"{100 * row['low']:+.1f} .. {100 * row['high']:+.1f}"


def show(level: str, rows: str, found: dict[str, Any], every_probe: bool) -> None:
    """Print a row of the table, and where asked for the hits of each probe."""
    cells = []
    for measure, width in zip(found["measures"], (11, 8), strict=True):
        change = f"{100 * measure['probes']['slowdown']:+7.1f}%"
        cells.append(f"{measure['us']:{width},.0f} {change} {bounds(measure['probes']):>18} {bounds(measure['noise']):>18}")
    rest = f"{sum(found['hits'].values()):.1f}, {found['lost']}, {found['measures'][0]['probes']['tracer_cpu']:.2%}"
    print(f"{level:9} {rows:>5} {' | '.join(cells)} | {rest}", flush=True)
    for program, count in sorted(found["hits"].items(), key=lambda each: -each[1]) if every_probe else ():
        print(f"{'':15} {program:32} {count:8.2f} per execute")


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("truth", "overhead"))
    parser.add_argument("--executes", type=int, default=10_000)
    parser.add_argument("--levels", default="off,detailed")
    parser.add_argument("--rows", default="8,64,512", help="sizes of the input")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of each window")
    parser.add_argument("--hits", action="store_true")
    args = parser.parse_args()
    return {"truth": truth, "overhead": overhead}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
