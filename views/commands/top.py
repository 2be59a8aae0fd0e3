"""Show live figures of a recording in progress: decode speed, phases, top operators, expert hits, probes' cost.

examples:
  moescope top                       the newest recording under recordings/
  moescope top RUN --every 2
  moescope top RUN --once            one picture, for scripts and finished recordings
"""

import argparse
import time
from pathlib import Path

from rich.console import Group
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from analyzer.questions.figures import hit_rate
from analyzer.questions.live import LiveTables, Snapshot
from moescope.arguments import add_run
from moescope.terminal import console, counted, grid, words
from tracer.recording.cost import probes_lately
from tracer.recording.format import RecordingError
from views.errors import ViewError

MOST_NAMED, LEAST = 4, 0.005


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, newest=True)
    parser.add_argument("--every", metavar="S", type=float, default=5.0, help="seconds between two updates (default: 5)")
    parser.add_argument(
        "--window", metavar="S", type=float, default=10.0, help="seconds that the figures cover, up to now (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="show the figures once and exit")


def newest_recording(folder: Path) -> Path:
    """The newest recording of a folder."""
    recordings = [path.parent for path in folder.glob("*/manifest.json")]
    if not recordings:
        raise ViewError(f"no recording under {folder}/: give one, or start one with: sudo moescope run -- COMMAND")
    return max(recordings, key=lambda path: (path / "manifest.json").stat().st_mtime)


def heading_lines(now: Snapshot, before: Snapshot | None, run_dir: Path) -> Text:
    """Speed, hits, losses and cost in two lines."""
    steps = now.tokens
    speed, tpot = steps.get("decode_tokens_per_s"), (steps.get("tpot_ms") or {}).get("mean")
    parts = [
        f"decode {speed:,.1f} tok/s" if speed else "no decode steps yet" if now.state == "recording" else "no decode steps",
        f"TPOT {tpot:,.2f} ms" if tpot else "",
    ]
    hits = hit_rate(now.hits, now.misses)
    if hits is not None:
        parts.append(f"expert hits {hits:.1%} of {now.hits + now.misses:,}")
    base = before if before and now.duration_ns > before.duration_ns else None
    spent, lasted = now.probe_ns - (base.probe_ns if base else 0), now.duration_ns - (base.duration_ns if base else 0)
    parts.append(probes_lately(spent, lasted / 1e9) if lasted else "")
    second = [counted(now.records, "record"), f"{now.lost:,} lost", f"last {now.seconds:,.1f} s", now.state, str(run_dir)]
    if now.off:
        second.append(f"off: {', '.join(now.off)}")
    first = "   ".join(part for part in parts if part)
    return words((first, "bold")) + Text("\n") + words((" | ".join(second), "dim"))


def time_table(now: Snapshot) -> Table:
    """A mean step of each phase by cause and by part."""
    table = grid("phase", "ms a step", "by cause", "by part", left=("phase", "by cause", "by part"))
    for phase, step in now.time.get("phases", {}).items():
        total = max(step["ms"], 1e-9)
        texts = (
            ", ".join(f"{name} {ms / total:.0%}" for name, ms in list(step[by].items())[:MOST_NAMED] if ms >= LEAST * total)
            for by in ("cause_ms", "part_ms")
        )
        table.add_row(phase or "unknown", f"{total:,.2f}", *texts)
    return table


def operator_table(now: Snapshot) -> Table:
    """The costliest operator types."""
    table = grid("operator", "runs", "ms", "share", "mean µs", "waiting")
    for row in now.operators:
        figures = (
            f"{row['count']:,}",
            f"{row['ms']:,.1f}",
            f"{row['share']:.1%}",
            f"{row['mean_us']:,.1f}",
            f"{row['wait_share']:.0%}",
        )
        table.add_row(row["type"], *figures)
    return table


def draw_screen(now: Snapshot, before: Snapshot | None, run_dir: Path) -> Group:
    """The whole screen."""
    tables = [table for table in (time_table(now), operator_table(now)) if table.row_count]
    return Group(heading_lines(now, before, run_dir), *(part for table in tables for part in (Text(), table)))


def run(args: argparse.Namespace) -> int:
    """Update the screen until the recording is complete, or print it once."""
    run_dir = args.run_dir or newest_recording(Path("recordings"))
    recording = LiveTables(run_dir, args.window)
    if args.once:
        console().print(draw_screen(recording.snapshot(), None, run_dir))
        return 0
    before: Snapshot | None = None
    with Screen(console=console(), auto_refresh=False) as screen:
        while before is None or before.state == "recording":
            try:
                now = recording.snapshot()
            except RecordingError as error:
                screen.update(words(f"waiting: {error}"), refresh=True)
            else:
                screen.update(draw_screen(now, before, run_dir), refresh=True)
                before = now
            if before is None or before.state == "recording":
                time.sleep(args.every)
    return 0
