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
from views.write_outputs import announce, make_dag, make_report, make_trace, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write all three; a recording without operators has no ProfDAG, which is said and is no error."""
    made, reason = [], ""
    with progress() as step:
        made.append(make_trace(args.run_dir, None, step))
        made.append(make_report(args.run_dir, None, step))
        try:
            made.append(make_dag(args.run_dir, None, step))
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
