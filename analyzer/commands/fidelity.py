"""Compare measured times with a reference: accuracy alpha in %, and scaled error ε* in µs of error per ms (lm-Meter's figures).

Without --truth, phases are compared with our runtime's own log (RUN/runtime.json). Kernels need a
reference from duplicated operators: benchmarks/fidelity.py produces one for our runtime.

examples:
  python -m analyzer fidelity RUN
  python -m analyzer fidelity RUN --truth truth.json --json
"""

import argparse
from pathlib import Path

from analyzer.commands._show import printed, show
from analyzer.questions import fidelity
from analyzer.tables.store import load
from moescope.arguments import add_json, add_run


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument(
        "--truth", metavar="FILE", type=Path, help='reference times as JSON: {"phases": {name: ms per step}, "kernels": {...}}'
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print both figures for each phase and kernel."""
    tables = load(args.run_dir, ("tokens", "operators", "graphs"))
    truth = fidelity.read_truth(args.truth) if args.truth else {"phases": fidelity.log_truth(args.run_dir / "runtime.json")}
    report = fidelity.report(tables, truth)
    if printed(args, report):
        return 0
    for part, result in report.items():
        middle = result["accuracy_percent"]
        show(result["rows"], f"{part}: accuracy {middle['mean']:.2f} % mean, {middle['median']:.2f} % median")
    if not report:
        print("the reference contains nothing that was measured")
    return 0
