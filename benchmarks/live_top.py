"""Cost of an update of `views top` while a recording grows: `python -m benchmarks.live_top [--events N] [--json FILE]`.

A synthetic decode (300 operators per step on two threads, scheduling) grows to N events in equal pieces. After each piece one
turn is timed, in CPU seconds of this process: of `Live`, which reads new records, and sometimes of rebuilding the tables of the
whole recording. A step has 1,300 records and lasts 9 ms: 140,000 per second, like a busy engine.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.questions.live import LiveTables, by_step
from analyzer.tables.store import build_tables
from benchmarks.analyzer import write_recording
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes
from tracer.recording.format import RING_HEADER_BYTES, STREAMS, Recording

STRETCH = 30
"""Times the synthetic recording's own 1 µs per operator."""


def cpu_seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def stretch_times(folder: Path) -> None:
    """Multiply all of a recording's times by STRETCH."""
    for stream, width in STREAMS.items():
        slots = np.memmap(folder / f"{stream}.bin", np.uint8, "r+").reshape(-1, width)
        slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].view("<u8")[:] *= np.uint64(STRETCH)


def replay_pieces(source: Path, folder: Path, piece: int, whole_every: int) -> list[dict[str, float]]:
    """Copy a recording's events to another piece by piece; per piece, `events` so far, `live_s` and sometimes `whole_s`."""
    shutil.copy(source / "manifest.json", folder)
    shutil.copy(source / "details.bin", folder)
    live = LiveTables(folder)
    rows: list[Any] = []
    with (source / "events.bin").open("rb") as events, (folder / "events.bin").open("wb", buffering=0) as out:
        live.snapshot()
        while data := events.read(piece * STREAMS["events"]):
            out.write(data)
            row = {"events": out.tell() // STREAMS["events"], "live_s": cpu_seconds(live.snapshot)}
            if len(rows) % whole_every == whole_every - 1:
                row["whole_s"] = cpu_seconds(lambda: by_step(build_tables(Recording(folder))))
            rows.append(row)
    return rows


def report_quarters(report: Report, piece: int, rows: list[dict[str, float]]) -> None:
    """Report ms of a turn in each quarter of the growth, and of rebuilding the whole recording's tables."""
    size = max(1, len(rows) // 4)
    for begin in range(0, min(4 * size, len(rows)), size):
        part = rows[begin : begin + size]
        name = f"{piece:,} new records of {part[0]['events']:,} to {part[-1]['events']:,}"
        report.add(f"{name}: a turn, CPU", "ms", extremes([1e3 * row["live_s"] for row in part]))
        whole = [1e3 * row["whole_s"] for row in part if "whole_s" in row]
        if whole:
            report.add(f"{name}: all tables rebuilt, CPU", "ms", extremes(whole))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="records in the end (default: %(default)s)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[10_000, 40_000, 160_000], help="records between two turns")
    args = parser.parse_args()
    report = Report("live_top", args)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_recording(source, args.events)
        stretch_times(source)
        for piece in args.pieces:
            folder = Path(name) / str(piece)
            folder.mkdir()
            report_quarters(report, piece, replay_pieces(source, folder, piece, max(1, args.events // piece // 8)))
            shutil.rmtree(folder)
    report.finish()


if __name__ == "__main__":
    main()
