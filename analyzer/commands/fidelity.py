"""Compare measured times with a reference: accuracy alpha in %, and scaled error ε* in µs of error per ms (lm-Meter's figures).

Without --truth, phases are compared with our runtime's own log (RUN/runtime.json). Of another engine, the measured times and
the reference that they lack are printed. Kernels need a reference from duplicated operators: benchmarks/fidelity.py produces
one for our runtime.

examples:
  moescope predict fidelity RUN
  moescope predict fidelity RUN --truth truth.json --json
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from analyzer.commands._show import print_table
from analyzer.questions import fidelity
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_run
from moescope.plain import print_plain


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--truth", metavar="FILE", type=Path, help='reference times as JSON: {"phases": {name: ms per step}, "kernels": {...}}'
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print both figures for each phase and kernel."""
    tables = load_tables(args.run_dir, ("tokens", "operators", "graphs"))
    log = args.run_dir / "runtime.json"
    if not args.truth and not log.exists():
        return show_need(args, fidelity.measured_phases(tables))
    truth = fidelity.read_truth(args.truth) if args.truth else {"phases": fidelity.log_truth(log)}
    report = fidelity.fidelity_report(tables, truth)
    if print_if_json(args, {"compared": report}):
        return 0
    for part, result in report.items():
        middle = result["accuracy_percent"]
        print_table(result["rows"], f"{part}: accuracy {middle['mean']:.2f} % mean, {middle['median']:.2f} % median")
    if not report:
        print("the reference contains nothing that was measured")
    return 0


def show_need(args: argparse.Namespace, phases: dict[str, float]) -> int:
    """Print what was measured, and the reference that it lacks."""
    example = json.dumps({"phases": {phase: round(ms, 3) for phase, ms in phases.items()} or {"decode": 20.0}})
    need = f"give --truth FILE with ms per step by the engine's own clock, in the form {example}"
    if print_if_json(args, {"measured": {"phases": phases}, "needs": need}, "need"):
        return 0
    print_table(pd.DataFrame({"name": [*phases], "measured_ms": [*phases.values()]}), "phases: mean of the recorded steps")
    print_plain(f"no reference to compare with: {need}")
    return 0
