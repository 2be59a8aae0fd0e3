"""Write the timeline of a recording as a native Perfetto trace: cpus, threads, NPU, counters.

examples:
  python -m views trace RUN                 RUN/trace.pftrace
  python -m views trace RUN --out a.pftrace
"""

import argparse

from views.making import add_arguments, announce, make_trace, progress


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write it."""
    with progress() as step:
        made = make_trace(args.run_dir, args.out, step)
    announce(made, args.json)
    return 0
