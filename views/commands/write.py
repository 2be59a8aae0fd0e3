"""Write everything there is to look at into the recording: trace.pftrace, report.html, profdag.html.

examples:
  python -m views write RUN
  python -m views write recordings/latest --json
"""

import argparse
import json
import sys
from pathlib import Path

from analyzer.questions.profdag import DagError
from analyzer.tables.store import load
from views.write_outputs import announce, make_dag, make_report, make_trace, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write all three; a recording without operators has no ProfDAG, which is said and is no error."""
    made, reason = [], ""
    with progress() as step:
        tables = load(args.run_dir)
        made.append(make_trace(args.run_dir, None, step, tables=tables))
        made.append(make_report(args.run_dir, None, step, tables))
        try:
            made.append(make_dag(args.run_dir, None, step, tables=tables))
        except DagError as error:
            reason = str(error)
    if args.json:
        print(json.dumps({"files": made, "no_profdag": reason}))
        return 0
    for one in made:
        announce(one, False)
    if reason:
        print(f"no ProfDAG page: {reason}", file=sys.stderr)
    return 0
