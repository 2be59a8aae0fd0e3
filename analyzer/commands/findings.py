"""List the main costs and how much time each remedy would save, with the query that shows the evidence.

examples:
  moescope findings RUN
  moescope findings RUN --queries            the SQL behind each, for: moescope query RUN
  moescope findings RUN --json
"""

import argparse
import sys

from analyzer.commands._show import print_origin
from analyzer.questions import ceilings
from analyzer.questions.findings import findings
from analyzer.questions.programs import has_only_threads
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_ceilings, add_json, add_run
from moescope.terminal import console
from tracer.recording.format import Recording


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_ceilings(parser)
    parser.add_argument("--queries", action="store_true", help="print the query behind each finding")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    manifest = Recording(args.run_dir).manifest
    roof = ceilings.ceilings_for(manifest, args.ceilings)
    tables = load_tables(args.run_dir)
    ranked = findings(tables, roof)
    if print_if_json(args, {"findings": ranked}):
        return 0
    print_origin(tables)
    screen = console(soft_wrap=not sys.stdout.isatty())
    if ranked and has_only_threads(tables):
        screen.print("no steps: of the life of the program's main thread")
    for rank, finding in enumerate(ranked, 1):
        screen.print(f"{rank}. {finding.text} ({finding.ms:,.1f} ms, {finding.share:.0%})")
        if args.queries:
            screen.print(f"   {finding.query}", soft_wrap=True)
    if not ranked:
        message = "no cost of 1 % or more of the steps' time was detected"
        print(message if len(tables["tokens"]) else "this recording has no steps, so their costs are unknown")
    return 0
