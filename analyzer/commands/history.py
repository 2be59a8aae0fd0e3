"""Store the results of every build, and show the builds in which metrics changed.

DATASET is a folder or any address that fsspec knows (s3://..., gs://...): hive-partitioned Parquet that other tools read too.
Alternatively a pattern or folder of recordings whose paths contain device=NAME and build=NAME.

examples:
  moescope history results/ --add recordings/run-* --build v1.4
  moescope history results/
  moescope history s3://bucket/moescope --family operator --json
  moescope history 's3://bucket/recordings/device=*/build=*/*'

exit code: 0 no change for the worse in the newest build, 1 there is one or a recording cannot be read, 2 wrong use.
"""

import argparse
from typing import Any

import pandas as pd

from analyzer.commands._show import map_recordings
from analyzer.compare.history import add_runs, build_changes, build_medians, of_results, read_runs, unjudged_text
from analyzer.compare.results import of_place, read_all
from analyzer.tables.recording_folders import Failure, recording_folders
from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from moescope.terminal import console, counted, grid, words

SHOWN = 40


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dataset", metavar="DATASET", help="folder or address of the dataset")
    parser.add_argument("--add", metavar="RUN", nargs="+", help="recordings or stored results to add")
    parser.add_argument("--build", default="", help="version or commit of the added runs (default: from their paths)")
    parser.add_argument(
        "--device", default="", help="with --add the name of the device (default: its CPU); without it, show only this device"
    )
    parser.add_argument(
        "--family",
        default="speed",
        help="family of metrics: speed, tail, phase, operator, expert, npu, memory ... (default: speed)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Add results, or show the history."""
    if args.add:
        written = add_runs(args.dataset, read_all(args.add), args.build, args.device)
        if not print_if_json(args, {"added": written}, "added"):
            print_plain(f"{counted(len(written), 'run')} added to {args.dataset}")
        return 0
    frame, failures = results_from(args)
    builds, changed, reason = build_medians(frame), build_changes(frame), unjudged_text(frame)
    newest = frame.sort_values("recorded", na_position="first").groupby("device")["build"].last()
    worse = [row for row in changed.to_dict("records") if is_worse(row) and row["build"] == newest[row["device"]]]
    if not print_if_json(args, {"builds": builds, "changes": changed, "unjudged": reason}):
        print_history(builds, changed, reason)
    return int(bool(worse or failures))


def results_from(args: argparse.Namespace) -> tuple[pd.DataFrame, list[Failure]]:
    """(runs of a dataset or of recordings, unreadable recordings)."""
    some = recording_folders(args.dataset, must=False)
    if not some:
        return read_runs(args.dataset, args.family, args.device), []
    results, failures = map_recordings(of_place, some)
    return of_results(results, args.family, args.device), failures


def is_worse(change: dict[str, Any]) -> bool:
    """Whether a change is a worsening."""
    return (float(change["ratio"]) > 1) == (change["better"] == "lower")


def print_history(builds: pd.DataFrame, changed: pd.DataFrame, reason: str) -> None:
    """Print builds and changes; `reason`: why some builds are not judged."""
    screen, table = console(), grid("device", "metric", "build", "median", "lowest", "highest", "runs", left=3)
    for row in builds.tail(SHOWN).to_dict("records"):
        figures = (f"{row[name]:,.4g} {row['unit']}" for name in ("median", "low", "high"))
        table.add_row(*(str(row[name]) for name in ("device", "metric", "build")), *figures, str(row["runs"]))
    screen.print(table)
    for row in changed.to_dict("records"):
        style = "red" if is_worse(row) else "green"
        text = (
            f"{row['metric']}: {100 * (row['ratio'] - 1):+.1f} % from build {row['before']} to {row['build']} ({row['device']})"
        )
        screen.print(words(("•", style), f" {text}"))
    if not len(changed):
        screen.print("no change found")
    if reason:
        screen.print(reason)
