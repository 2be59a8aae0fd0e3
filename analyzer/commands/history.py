"""Keep the results of every build, and see in which build something changed.

DATASET is a folder or any address that fsspec knows (s3://..., gs://...): hive-partitioned Parquet that other tools read too.

examples:
  python -m analyzer history results/ --add recordings/run-* --build v1.4
  python -m analyzer history results/
  python -m analyzer history s3://bucket/moescope --family operator --engine dask --json

exit code: 0 no change for the worse in the newest build, 1 there is one, 2 wrong use.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analyzer.compare.history import ENGINES, add, changes, medians, read, unjudged
from analyzer.compare.results import CompareError, read_all

SHOWN = 40


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dataset", metavar="DATASET", help="folder or address of the dataset")
    parser.add_argument("--add", metavar="RUN", type=Path, nargs="+", help="recordings or stored results to add")
    parser.add_argument("--build", default="", help="what the added runs are runs of: a version, a commit")
    parser.add_argument("--device", default="", help="with --add: name of the device (default: its CPU); else: only this one")
    parser.add_argument(
        "--family", default="speed", help="speed, tail, phase, operator, expert, npu, memory ... (default: speed)"
    )
    parser.add_argument("--engine", choices=ENGINES, default="duckdb", help="what reads the dataset (default: duckdb)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Add, or show."""
    if args.add:
        if not args.build:
            raise CompareError("--add needs --build: say which version or commit these runs are of")
        written = add(args.dataset, read_all(args.add), args.build, args.device)
        print(json.dumps(written) if args.json else f"{len(written)} runs added to {args.dataset}")
        return 0
    frame = read(args.dataset, args.family, args.engine, args.device)
    table, found, reason = medians(frame), changes(frame), unjudged(frame)
    newest = frame.groupby("device").apply(lambda rows: rows.loc[rows["recorded"].idxmax(), "build"], include_groups=False)
    worse = [row for row in found.to_dict("records") if worsened(row) and row["build"] == newest[row["device"]]]
    if args.json:
        print(json.dumps({"builds": table.to_dict("records"), "changes": found.to_dict("records"), "unjudged": reason}))
    else:
        show(table, found, reason)
    return int(bool(worse))


def worsened(change: dict[str, Any]) -> bool:
    """Whether a change is one for the worse."""
    return (float(change["ratio"]) > 1) == (change["better"] == "lower")


def show(table: pd.DataFrame, found: pd.DataFrame, reason: str) -> None:
    """Builds and changes on the terminal; `reason`: why some builds are not judged."""
    console = Console(highlight=False)
    shown = Table("device", "metric", "build", box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in ("median", "least", "most", "runs"):
        shown.add_column(name, justify="right")
    for row in table.tail(SHOWN).to_dict("records"):
        figures = (f"{row[name]:,.4g} {row['unit']}" for name in ("median", "low", "high"))
        shown.add_row(*(escape(str(row[name])) for name in ("device", "metric", "build")), *figures, str(row["runs"]))
    console.print(shown)
    for row in found.to_dict("records"):
        style = "red" if worsened(row) else "green"
        text = (
            f"{row['metric']}: {100 * (row['ratio'] - 1):+.1f} % from build {row['before']} to {row['build']} ({row['device']})"
        )
        console.print(f"[{style}]•[/] {escape(text)}")
    if not len(found):
        console.print("no change found")
    if reason:
        console.print(escape(reason))
