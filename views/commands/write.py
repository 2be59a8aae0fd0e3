"""Write all views into the recording: trace.pftrace, report.html, profdag.html.

examples:
  python -m views write RUN
  python -m views write recordings/latest --json
"""

import argparse
import json
import sys
from collections.abc import Callable

from analyzer.errors import AnalysisError
from analyzer.questions import ceilings
from analyzer.questions.profdag import DagError
from analyzer.tables.store import load
from moescope.arguments import add_json, add_run
from moescope.plain import print_plain
from moescope.terminal import progress
from views.write_outputs import announce, make_dag, make_report, make_trace


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--ceilings", action="store_true", help="first measure this machine's ceilings for a second, if they are unknown"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write all three; a recording without operators has no ProfDAG, which is reported but no error."""
    written, reason = [], ""
    with progress("reading the recording") as step:
        if args.ceilings:
            measure_ceilings(step)
        tables = load(args.run_dir)
        written.append(make_trace(args.run_dir, None, step, tables=tables))
        written.append(make_report(args.run_dir, None, step, tables))
        try:
            written.append(make_dag(args.run_dir, None, step, tables=tables))
        except DagError as error:
            reason = str(error)
    if args.json:
        print(json.dumps({"files": written, "no_profdag": reason}))
        return 0
    for file in written:
        announce(file, False)
    if reason:
        print_plain(f"no ProfDAG page: {reason}", sys.stderr)
    return 0


def measure_ceilings(step: Callable[[str], None]) -> None:
    """Have this machine's ceilings; where they cannot be measured, the report has no roofline."""
    step("measuring this machine's ceilings")
    try:
        ceilings.kept()
    except (AnalysisError, OSError) as error:
        print_plain(f"no ceilings: {error}", sys.stderr)
