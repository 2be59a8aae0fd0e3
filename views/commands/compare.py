"""Compare runs before and after a change: did it become slower, where, and with what confidence?

A side is any number of recordings, stored results (--save) or folders of them, or a pattern over recordings anywhere
('s3://bucket/device=*/build=v1/*'); every recording is one run. Of exactly two paths the first is the base and the
second the candidate; with more, put :: between the sides. Record at least five runs per side (four show large changes), or let
`compare -- COMMAND :: COMMAND` record them alternately (`moescope compare --help --` shows the options of this form).

examples:
  moescope compare before/ after/ --html regression.html
  moescope compare base-1 base-2 base-3 base-4 base-5 :: cand-1 cand-2 cand-3 cand-4 cand-5
  sudo moescope compare --budget 600 -- ./old -m model.gguf :: ./new -m model.gguf
  moescope compare before/ after/ --flame flame.html  which functions grew, of runs with --stacks
  moescope compare RUN OTHER_RUN --graphs            how the graphs of two models differ
  moescope compare main/ branch/ --fail-on slower:5% --junit junit.xml --markdown summary.md

Seals distinguish recordings: a copy, a link or a repeat of one is refused, as it would count as another run.

exit code: 0 no condition of --fail-on holds, 1 at least one holds, 2 wrong usage.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.commands._show import print_table as show_frame
from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.limits import parse_limit, violations
from analyzer.compare.results import CompareError, read_all, refuse_repeats, save_result
from analyzer.compare.verdict_text import junit, markdown, metric_table
from analyzer.compare.verdicts import Rules
from analyzer.questions import structure
from analyzer.questions.profdag import build_profdag, middle_step
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.terminal import console, grid, progress, words
from views.flame.change import write_change
from views.regression import write_regression

SEPARATOR = "::"
SHOWN, METRIC_WIDTH, WIDE = 16, 16, 120
STYLE = {"bad": "bold red", "good": "bold green", "warn": "yellow", "info": ""}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="BASE CAND, or BASE... :: CAND...")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report: one self-contained HTML file")
    parser.add_argument("--graphs", action="store_true", help="compare the operators of the middle decode step instead")
    parser.add_argument(
        "--flame", metavar="FILE", type=Path, help="write the flame graph of changed stacks, recorded with --stacks"
    )
    add_json(parser)
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write a summary in Markdown")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write JUnit XML")
    parser.add_argument(
        "--save", metavar="DIR", type=Path, help="store each run's metrics (a small file) in this folder, for later comparisons"
    )
    kinds = "slower[:P%%], operator[:P%%], energy[:P%%], structure, unlike, inconclusive, nothing"
    text = f"findings that make the exit code 1: {kinds} (default: slower)"
    parser.add_argument("--fail-on", metavar="WHAT", type=parse_limit, action="append", default=[], help=f"{text}; repeatable")
    parser.add_argument(
        "--threshold", metavar="PERCENT", type=parse_percentage, default=0.02, help="smallest change that matters (default: 2%%)"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="probability of a false alarm in a family of metrics (default: 0.05)"
    )


def parse_percentage(text: str) -> float:
    """2, 2% → 0.02."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage; write 5%")
    return value


def sides_of(paths: list[str]) -> tuple[list[str], list[str]]:
    """(base, candidate). Raises CompareError unless there are two sides."""
    if SEPARATOR not in paths and len(paths) == 2:
        return paths[:1], paths[1:]
    middle = paths.index(SEPARATOR) if paths.count(SEPARATOR) == 1 else 0
    if not paths[:middle] or not paths[middle + 1 :]:
        raise CompareError(f"not two sides: {' '.join(paths)}; give BASE CAND, or BASE... {SEPARATOR} CAND...")
    return paths[:middle], paths[middle + 1 :]


def run(args: argparse.Namespace) -> int:
    """Compare and print the result."""
    base, cand = sides_of(args.runs)
    if args.graphs:
        return compare_graphs(args, base, cand)
    if not 0 < args.alpha < 1:
        raise CompareError(f"--alpha {args.alpha} is not a probability")
    with progress("reading") as step:
        sides = read_all(base, step), read_all(cand, step)
        refuse_repeats(*sides)
        comparison = as_document(compare_runs(*sides, Rules(args.alpha, args.threshold), step))
    for side, runs in zip(("base", "cand"), sides, strict=True) if args.save else ():
        (args.save / side).mkdir(parents=True, exist_ok=True)
        for i, result in enumerate(runs):
            save_result(result, args.save / side / f"{i:03}-{result.name}.parquet")
    failures = violations(comparison, args.fail_on or [parse_limit("slower")])
    comparison["failures"] = failures
    write_files(args, comparison)
    if not print_if_json(args, comparison):
        print_comparison(comparison)
    return int(bool(failures))


def write_files(args: argparse.Namespace, comparison: dict[str, Any]) -> None:
    """Write the requested page, Markdown and JUnit files."""
    if args.markdown:
        args.markdown.write_text(markdown(comparison), encoding="utf-8")
    if args.junit:
        args.junit.write_text(junit(comparison, comparison["failures"]), encoding="utf-8")
    if args.flame:
        write_change(comparison, args.flame)
    if args.html:
        write_regression(comparison, args.html)


def print_comparison(comparison: dict[str, Any]) -> None:
    """Print the comparison."""
    screen = console()
    for sentence in comparison["words"]:
        screen.print(words(("•", STYLE[sentence["level"]]), f" {sentence['text']}"))
    names, rows = metric_table(comparison, SHOWN)
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


def compare_graphs(args: argparse.Namespace, base: list[str], cand: list[str]) -> int:
    """Print the differences between the ProfDAGs of two recordings."""
    if len(base) != 1 or len(cand) != 1:
        raise CompareError("--graphs takes two recordings")
    first, second = (
        build_profdag(tables, middle_step(tables)) for tables in (load_tables(Path(base[0])), load_tables(Path(cand[0])))
    )
    difference = structure.model_difference(first, second)
    if print_if_json(args, difference, "graphs"):
        return 0
    print(f"layers: {difference['layers'][0]} and {difference['layers'][1]}")
    rows = [vars(row) for row in difference["operators"]]
    if not rows:
        print("the same operators in the same order")
        return 0
    show_frame(pd.DataFrame(rows), "operators in only one of them (-: the first, +: the second)", 60)
    for title in ("layer_types", "edges"):
        if difference[title]:
            pairs = [(name, *counts) for name, counts in difference[title].items()]
            show_frame(pd.DataFrame(pairs, columns=[title.replace("_", " "), "first", "second"]), "", 60)
    return 0
