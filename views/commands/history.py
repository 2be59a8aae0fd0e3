"""Store the results of every build, and show the builds in which metrics changed.

DATASET is a folder or any address that fsspec knows (s3://..., gs://...): hive-partitioned Parquet that other tools read too.
Alternatively a pattern or folder of recordings whose paths contain device=NAME and build=NAME.

examples:
  moescope history results/ --add recordings/run-* --build v1.4
  moescope history results/
  moescope history s3://bucket/moescope --family operator --json
  moescope history 'recordings/*' --pareto --html pareto.html     speed against energy of settings, if power was recorded
  moescope history 's3://bucket/recordings/device=*/build=*/*'

With --pareto each build is a setting (threads, cores, placement, cache); recordings without build=NAME in their path are named by
the words of their command that differ.

exit code: 0 no change for the worse in the newest build, 1 there is one or a recording cannot be read, 2 wrong use.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.commands._show import map_recordings
from analyzer.compare.history import add_runs, build_changes, build_medians, of_results, read_runs, unjudged_text
from analyzer.compare.results import of_place, read_all
from analyzer.compare.settings import named_settings, setting_points
from analyzer.tables.recording_folders import Failure, recording_folders
from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from moescope.terminal import console, counted, grid, words
from views.pareto import write_settings

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
        help="family of metrics: speed, tail, phase, operator, expert, npu, memory, energy, power ... (default: speed)",
    )
    parser.add_argument("--pareto", action="store_true", help="speed against energy per token of each build's runs, in decode")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the page of --pareto")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Add results, or show the history."""
    if args.add:
        written = add_runs(args.dataset, read_all(args.add), args.build, args.device)
        if not print_if_json(args, {"added": written}, "added"):
            print_plain(f"{counted(len(written), 'run')} added to {args.dataset}")
        return 0
    if args.pareto or args.html:
        return show_settings(args)
    (frame,), failures = results_from(args, args.family)
    builds, changed, reason = build_medians(frame), build_changes(frame), unjudged_text(frame)
    newest = frame.sort_values("recorded", na_position="first").groupby("device")["build"].last()
    worse = [row for row in changed.to_dict("records") if is_worse(row) and row["build"] == newest[row["device"]]]
    if not print_if_json(args, {"builds": builds, "changes": changed, "unjudged": reason}):
        print_history(builds, changed, reason)
    return int(bool(worse or failures))


def show_settings(args: argparse.Namespace) -> int:
    """Print speed against energy of each setting, and write the page."""
    (speed, energy), failures = results_from(args, "speed", "energy")
    points = setting_points(speed, energy)
    if args.html:
        write_settings(points, args.html)
    if not print_if_json(args, {"settings": points}, "pareto"):
        table = grid("device", "power rail", "setting", "tokens/s", "J/token", "tokens/J", "runs", "", left=3)
        for row in points.to_dict("records"):
            figures = (row["tokens_per_s"], row["j_per_token"], 1 / row["j_per_token"])
            names = (str(row[name]) for name in ("device", "rail", "setting"))
            table.add_row(*names, *(f"{value:,.4g}" for value in figures), str(row["runs"]), "*" if row["pareto"] else "")
        console().print(table)
        print_plain(
            "decode, medians over the runs of each setting; * no other is as fast for less energy, or faster for as little"
        )
    return int(bool(failures))


def results_from(args: argparse.Namespace, *families: str) -> tuple[list[pd.DataFrame], list[Failure]]:
    """(for each family the runs of a dataset or of recordings, unreadable recordings)."""
    some = recording_folders(args.dataset, must=False)
    if not some:
        return [read_runs(args.dataset, family, args.device) for family in families], []
    results, failures = map_recordings(of_place, some)
    named = named_settings(results) if args.pareto or args.html else results
    return [of_results(named, family, args.device) for family in families], failures


def is_worse(change: dict[str, Any]) -> bool:
    """Whether a change is a worsening."""
    return (float(change["ratio"]) > 1) == (change["better"] == "lower")


def print_history(builds: pd.DataFrame, changed: pd.DataFrame, reason: str) -> None:
    """Print builds and changes; `reason`: why some builds are not judged."""
    screen, table = console(), grid("device", "metric", "build", "median", "lowest", "highest", "runs", left=3)
    for row in builds.tail(SHOWN).to_dict("records"):
        figures = (f"{row[name]:,.4g} {row['unit']}" for name in ("median", "low", "high"))
        metric = " ".join(filter(None, (row["metric"], row["type"], row["phase"])))
        table.add_row(row["device"], metric, row["build"], *figures, str(row["runs"]))
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
