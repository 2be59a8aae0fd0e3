"""Compare runs before and after a change: did it become slower, where, and how sure is that?

A side is any number of recordings, stored results (--save) or folders of them; every recording is one run. With exactly two
paths the first is the base and the second the candidate; with more, --vs stands between the sides. Five runs per side tell most.

examples:
  python -m analyzer compare before/ after/ -o regression.html
  python -m analyzer compare base-1 base-2 base-3 base-4 base-5 --vs cand-1 cand-2 cand-3 cand-4 cand-5
  python -m analyzer compare main/ branch/ --fail-on slower:5% --junit junit.xml --markdown summary.md

exit code: 0 nothing that --fail-on names, 1 something it names, 2 wrong use.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analyzer.compare.document import compare, document
from analyzer.compare.limits import broken, parse_limit
from analyzer.compare.results import CompareError, read_all, save
from analyzer.compare.verdict_text import junit, markdown, table
from analyzer.compare.verdicts import Rules

SHOWN, METRIC_WIDTH = 16, 16
STYLE = {"bad": "bold red", "good": "bold green", "warn": "yellow", "info": ""}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("base", metavar="BASE", type=Path, nargs="+", help="runs of the base (and, without --vs, the candidate)")
    parser.add_argument("--vs", dest="cand", metavar="CAND", type=Path, nargs="+", default=[], help="runs of the candidate")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the report: one HTML file that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write a summary in Markdown")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write JUnit XML")
    parser.add_argument("--save", metavar="DIR", type=Path, help="store each run's result there, small, for later comparisons")
    text = "what makes the exit code 1: slower[:P%%], operator[:P%%], structure, unlike, cannot-tell, nothing (default: slower)"
    parser.add_argument("--fail-on", metavar="WHAT", type=parse_limit, action="append", default=[], help=f"{text}; repeatable")
    parser.add_argument(
        "--threshold", metavar="PERCENT", type=percentage, default=0.02, help="least change that matters (default: 2%%)"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="chance of a false alarm in a family of metrics (default: 0.05)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling (default: 0)")


def percentage(text: str) -> float:
    """2, 2% → 0.02."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; write 5%")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare and say so."""
    base, cand = args.base, args.cand
    if not cand:
        if len(base) != 2:
            raise CompareError(f"{len(base)} paths without --vs; give BASE CAND, or BASE... --vs CAND...")
        base, cand = base[:1], base[1:]
    if not 0 < args.alpha < 1:
        raise CompareError(f"--alpha {args.alpha} is no probability")
    with Console(stderr=True).status("reading") as status:
        sides = read_all(base, status.update), read_all(cand, status.update)
        shown = document(compare(*sides, Rules(args.alpha, args.threshold, args.seed), status.update))
    for side, runs in zip(("base", "cand"), sides, strict=True) if args.save else ():
        (args.save / side).mkdir(parents=True, exist_ok=True)
        for i, result in enumerate(runs):
            save(result, args.save / side / f"{i:03}-{result.name}.parquet")
    failures = broken(shown, args.fail_on or [parse_limit("slower")])
    shown["failures"] = failures
    write_files(args, shown)
    if args.json:
        print(json.dumps(shown))
    else:
        show(shown)
    return int(bool(failures))


def write_files(args: argparse.Namespace, shown: dict[str, Any]) -> None:
    """Report, Markdown, JUnit, as asked for."""
    if args.markdown:
        args.markdown.write_text(markdown(shown), encoding="utf-8")
    if args.junit:
        args.junit.write_text(junit(shown, shown["failures"]), encoding="utf-8")
    if args.output:
        with tempfile.TemporaryDirectory() as folder:
            handed = Path(folder) / "comparison.json"
            handed.write_text(json.dumps(shown))
            command = [sys.executable, "-m", "views", "regression", str(handed), "--out", str(args.output)]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise CompareError(f"the report could not be written to {args.output}; see the line above")


def show(shown: dict[str, Any]) -> None:
    """The comparison on the terminal."""
    console = Console(highlight=False)
    for one in shown["words"]:
        console.print(f"[{STYLE[one['level']]}]•[/] {escape(one['text'])}" if STYLE[one["level"]] else f"• {escape(one['text'])}")
    (first, *names), rows = table(shown, SHOWN)
    grid = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    grid.add_column(first, min_width=METRIC_WIDTH, overflow="fold")
    for name in names:
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(*map(escape, row))
    console.print(grid)
    if "at the base's pace" in names:
        console.print(
            "at the base's pace: without what made all operators of a run faster or slower alike; interval and verdict are of it"
        )
    counts = ", ".join(f"{n:,} {name}" for name, n in shown["verdicts"].items())
    console.print(f"{shown['metrics_total']:,} metrics: {counts}")
    for failure in shown["failures"]:
        console.print(f"[bold red]limit broken[/] {escape(failure)}")
