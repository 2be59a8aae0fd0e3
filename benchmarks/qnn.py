"""QNN: every profile event against ONNX Runtime's own CSV over many executions, and what the probes cost.

    sudo python -m benchmarks.qnn truth [--executes 10000]
    sudo python -m benchmarks.qnn overhead [--pairs 5] [--executes 200]

`truth` traces a plain onnxruntime-qnn program of two sessions at detailed level and compares what was recorded with its CSVs,
row by row. `overhead` runs it untraced and traced in turn, with profiling off and detailed, on three sizes of input; noise of
single pairs is told as their quartiles. On x86-64 the NPU is Qualcomm's emulator: its executions take the time of the host.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from analyzer.tables import load

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "tests" / "programs" / "plain_qnn.py")
UNITS = {"US": "us", "CYCLES": "cycles", "COUNT": "count", "BYTES": "bytes"}
SIZES = ("8", "64", "512")
TOLD = "us per run: "
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
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def traced(run: Path, command: list[str]) -> list[str]:
    """The command under the tracer, at level qnn."""
    return [sys.executable, "-m", "tracer", "run", "--no-views", "--levels", "qnn", "-o", str(run), "--", *command]


def us_per_run(command: list[str], folder: str) -> float:
    """What the program says of its second session."""
    done = subprocess.run(command, cwd=folder, env=path_env(), capture_output=True, text=True, check=True)
    return float(next(line for line in reversed(done.stdout.splitlines()) if line.startswith(TOLD)).removeprefix(TOLD))


def overhead(args: argparse.Namespace) -> int:
    """Paired, interleaved runs; the pair's order changes from pair to pair."""
    print("level      rows   untraced us   traced us   change (median, quartiles of the pairs)")
    for level in ("off", "detailed"):
        for rows in SIZES:
            pairs = [pair(level, rows, args.executes, number) for number in range(args.pairs)]
            change = [100 * (b / a - 1) for a, b in pairs]
            low, middle, high = statistics.quantiles(change, n=4) if len(change) > 1 else change * 3
            plain, probed = (statistics.median(column) for column in zip(*pairs, strict=True))
            spread = f"{middle:+.1f} % ({low:+.1f} to {high:+.1f}), n {len(pairs)}"
            print(f"{level:9s} {rows:>5s} {plain:13,.0f} {probed:11,.0f}   {spread}")
    return 0


def pair(level: str, rows: str, executes: int, number: int) -> tuple[float, float]:
    """µs per run (untraced, traced)."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, PROGRAM, name, str(executes), level, rows]
        both = {"plain": command, "traced": traced(Path(name) / "run", command)}
        order = list(both) if number % 2 else list(reversed(both))
        told = {which: us_per_run(both[which], name) for which in order}
    return told["plain"], told["traced"]


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("truth", "overhead"))
    parser.add_argument("--executes", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    return {"truth": truth, "overhead": overhead}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
