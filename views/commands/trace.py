"""Write the timeline of a recording as a native Perfetto trace: cpus, threads, NPU, counters.

examples:
  python -m views trace RUN                 RUN/trace.pftrace
  python -m views trace RUN --out a.pftrace
"""

import argparse
from pathlib import Path

from views.making import announce, make_trace, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: inside RUN")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        made = make_trace(args.run_dir, args.out, step)
    announce(made, args.json)
    return 0
