"""Show the threads: their states within operators, their load balance, and which threads took a CPU from them at what cost.

examples:
  moescope time threads RUN
  moescope time threads RUN --json
"""

import argparse

from analyzer.commands._show import print_origin, print_table
from analyzer.questions import displacement, threads
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_run_and_json

prepare_parser = add_run_and_json


def run(args: argparse.Namespace) -> int:
    """Print states by operator, the threads' shares, and the threads that displaced them."""
    tables = load_tables(args.run_dir)
    states, shares = threads.operator_states(tables), threads.thread_balance(tables)
    lost = displacement.displacements(tables)
    displacers = displacement.displaced_by(tables, lost)
    summary = threads.thread_summary(tables, lost)
    if print_if_json(args, {"summary": summary, "operators": states, "threads": shares, "displaced_by": displacers}):
        return 0
    print_origin(tables)
    if len(tables["thread_states"]) == 0:
        print("no scheduling in this recording: record at level sched")
    print_table(states, "busy time of operators by state of the thread, shares", 15)
    print_table(shares, "threads that ran operators")
    if len(displacers):
        print_table(displacers, "threads that ran while a thread of a step was ready; cost: extra time of the step", 8)
    return 0
