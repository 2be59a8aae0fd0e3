"""Show the threads: their states within operators, their load balance, and which threads took a CPU from them at what cost.

examples:
  python -m analyzer threads RUN
  python -m analyzer threads RUN --json
"""

import argparse

from analyzer.commands._show import printed, show
from analyzer.questions import displacement, threads
from analyzer.tables.store import load
from moescope.arguments import add_run_and_json

prepare_parser = add_run_and_json


def run(args: argparse.Namespace) -> int:
    """Print states by operator, the threads' shares, and the threads that displaced them."""
    tables = load(args.run_dir)
    states, shares = threads.operator_states(tables), threads.balance(tables)
    lost = displacement.displacements(tables)
    displacers = displacement.displaced_by(tables, lost)
    summary = threads.summary(tables, lost)
    if printed(args, {"summary": summary, "operators": states, "threads": shares, "displaced_by": displacers}):
        return 0
    if len(tables["thread_states"]) == 0:
        print("no scheduling in this recording: record at level sched")
    show(states, "busy time of operators by state of the thread, shares", 15)
    show(shares, "threads that ran operators")
    if len(displacers):
        show(displacers, "threads that ran while a thread of a step was ready; cost: extra time of the step", 8)
    return 0
