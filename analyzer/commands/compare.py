"""Compare runs before and after a change: did it become slower, where, and with what confidence?

A side is any number of recordings, stored results (--save) or folders of them, or a pattern over recordings anywhere
('s3://bucket/device=*/build=v1/*'); every recording is one run. Of exactly two paths the first is the base and the
second the candidate; with more, put --vs between the sides. Record at least five runs per side.

examples:
  python -m analyzer compare before/ after/ -o regression.html
  python -m analyzer compare base-1 base-2 base-3 base-4 base-5 --vs cand-1 cand-2 cand-3 cand-4 cand-5
  python -m analyzer compare main/ branch/ --fail-on slower:5% --junit junit.xml --markdown summary.md

exit code: 0 no condition of --fail-on holds, 1 at least one holds, 2 wrong usage.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from analyzer.commands._show import printed
from analyzer.compare.document import compare, document
from analyzer.compare.limits import broken, parse_limit
from analyzer.compare.results import CompareError, read_all, save
from analyzer.compare.verdict_text import junit, markdown, table
from analyzer.compare.verdicts import Rules
from moescope.arguments import add_json
from moescope.terminal import console, grid, progress, words

SHOWN, METRIC_WIDTH, WIDE = 16, 16, 120
STYLE = {"bad": "bold red", "good": "bold green", "warn": "yellow", "info": ""}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("base", metavar="BASE", nargs="+", help="runs of the base (and, without --vs, the candidate)")
    parser.add_argument("--vs", dest="cand", metavar="CAND", nargs="+", default=[], help="runs of the candidate")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the report: one self-contained HTML file")
    add_json(parser)
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write a summary in Markdown")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write JUnit XML")
    parser.add_argument(
        "--save", metavar="DIR", type=Path, help="store each run's metrics (a small file) in this folder, for later comparisons"
    )
    kinds = "slower[:P%%], operator[:P%%], structure, unlike, inconclusive, nothing"
    text = f"findings that make the exit code 1: {kinds} (default: slower)"
    parser.add_argument("--fail-on", metavar="WHAT", type=parse_limit, action="append", default=[], help=f"{text}; repeatable")
    parser.add_argument(
        "--threshold", metavar="PERCENT", type=percentage, default=0.02, help="smallest change that matters (default: 2%%)"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="probability of a false alarm in a family of metrics (default: 0.05)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the resampling (default: 0)")


def percentage(text: str) -> float:
    """2, 2% → 0.02."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage; write 5%")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare and print the result."""
    base, cand = args.base, args.cand
    if not cand:
        if len(base) != 2:
            raise CompareError(f"{len(base)} paths without --vs; give BASE CAND, or BASE... --vs CAND...")
        base, cand = base[:1], base[1:]
    if not 0 < args.alpha < 1:
        raise CompareError(f"--alpha {args.alpha} is not a probability")
    with progress("reading") as step:
        sides = read_all(base, step), read_all(cand, step)
        comparison = document(compare(*sides, Rules(args.alpha, args.threshold, args.seed), step))
    for side, runs in zip(("base", "cand"), sides, strict=True) if args.save else ():
        (args.save / side).mkdir(parents=True, exist_ok=True)
        for i, result in enumerate(runs):
            save(result, args.save / side / f"{i:03}-{result.name}.parquet")
    failures = broken(comparison, args.fail_on or [parse_limit("slower")])
    comparison["failures"] = failures
    write_files(args, comparison)
    if not printed(args, comparison):
        show(comparison)
    return int(bool(failures))


def write_files(args: argparse.Namespace, comparison: dict[str, Any]) -> None:
    """Write the requested report, Markdown and JUnit files."""
    if args.markdown:
        args.markdown.write_text(markdown(comparison), encoding="utf-8")
    if args.junit:
        args.junit.write_text(junit(comparison, comparison["failures"]), encoding="utf-8")
    if args.output:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "comparison.json"
            file.write_text(json.dumps(comparison))
            command = [sys.executable, "-m", "views", "regression", str(file), "--out", str(args.output)]
            process = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if process.returncode:
            raise CompareError(f"the report could not be written to {args.output}; see the line above")


def show(comparison: dict[str, Any]) -> None:
    """Print the comparison."""
    screen = console()
    for sentence in comparison["words"]:
        screen.print(words(("•", STYLE[sentence["level"]]), f" {sentence['text']}"))
    names, rows = table(comparison, SHOWN)
    metrics_table = grid(*names, rows=rows)
    if screen.width < WIDE:
        metrics_table.columns[0].width = METRIC_WIDTH  # else names leave no room for verdicts
    screen.print(metrics_table)
    if "at the base's pace" in names:
        screen.print(
            "at the base's pace: corrected for the speed common to all operators of a run; interval and verdict refer to it"
        )
    counts = ", ".join(f"{n:,} {name}" for name, n in comparison["verdicts"].items())
    screen.print(f"{comparison['metrics_total']:,} metrics: {counts}")
    for failure in comparison["failures"]:
        screen.print(words(("limit broken", "bold red"), f" {failure}"))
