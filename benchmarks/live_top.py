"""What a turn of `views top` costs while a recording grows: `python -m benchmarks.live_top [--events N] [--json]`.

A synthetic decode (300 operators a step on two threads, scheduling) grows to N events in pieces of one size. After each piece one
turn is timed, in CPU seconds of this process: of `Live`, which reads what is new, and, now and then, of the tables of the whole
recording made anew. A step has 1,300 records and lasts 9 ms: 140,000 a second, as of a busy engine.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analyzer.questions.live import Live
from analyzer.questions.phases import phase_shares
from analyzer.tables.store import build
from benchmarks.analyzer import synthetic
from tracer.recording.format import RING_HEADER_BYTES, STREAMS, Recording

STRETCH = 30
"""Times the synthetic recording's own 1 µs per operator."""


def spent(action: Callable[[], Any]) -> float:
    """CPU seconds of one call, all threads."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def stretched(folder: Path) -> None:
    """Make all of a recording's times STRETCH times as long."""
    for stream, width in STREAMS.items():
        slots = np.memmap(folder / f"{stream}.bin", np.uint8, "r+").reshape(-1, width)
        slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + 8].view("<u8")[:] *= np.uint64(STRETCH)


def turns(source: Path, folder: Path, piece: int, whole_every: int) -> list[dict[str, float]]:
    """Copy a recording's events to another piece by piece; per piece `events` so far, `live_s` and now and then `whole_s`."""
    shutil.copy(source / "manifest.json", folder)
    shutil.copy(source / "details.bin", folder)
    rows, live = [], Live(folder)
    with (source / "events.bin").open("rb") as events, (folder / "events.bin").open("wb", buffering=0) as out:
        live.snapshot()
        while data := events.read(piece * STREAMS["events"]):
            out.write(data)
            row = {"events": out.tell() // STREAMS["events"], "live_s": spent(live.snapshot)}
            if len(rows) % whole_every == whole_every - 1:
                row["whole_s"] = spent(lambda: phase_shares(build(Recording(folder))))
            rows.append(row)
    return rows


def figures(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Median, least and greatest seconds of a turn in each quarter of the growth; and of the whole recording's tables."""
    size = max(1, len(rows) // 4)
    quarters = [rows[begin : begin + size] for begin in range(0, 4 * size, size)]
    spread = [
        {
            "events": [part[0]["events"], part[-1]["events"]],
            "live_s": [median(r["live_s"] for r in part), min(r["live_s"] for r in part), max(r["live_s"] for r in part)],
            "whole_s": median([r["whole_s"] for r in part if "whole_s" in r] or [float("nan")]),
        }
        for part in quarters
        if part
    ]
    return {"turns": len(rows), "quarters": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="records in the end (default %(default)s)")
    parser.add_argument("--pieces", type=int, nargs="+", default=[10_000, 40_000, 160_000], help="records between two turns")
    parser.add_argument("--json", action="store_true", help="print every turn as JSON")
    args = parser.parse_args()
    answer = {}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        synthetic(source, args.events)
        stretched(source)
        for piece in args.pieces:
            folder = Path(name) / str(piece)
            folder.mkdir()
            answer[piece] = turns(source, folder, piece, max(1, args.events // piece // 8))
            shutil.rmtree(folder)
    if args.json:
        print(json.dumps({str(piece): {**figures(rows), "rows": rows} for piece, rows in answer.items()}))
        return
    for piece, rows in answer.items():
        for part in figures(rows)["quarters"]:
            low, high = part["events"]
            middle, least, most = (1e3 * s for s in part["live_s"])
            print(
                f"{piece:,} new of {low:,} to {high:,}: a turn {middle:.0f} ms ({least:.0f} to {most:.0f}), "
                f"the whole anew {1e3 * part['whole_s']:.0f} ms"
            )


if __name__ == "__main__":
    main()
