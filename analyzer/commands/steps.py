"""Predict each decode step from the ones before it (context length, experts missed), and say how far off that was.

examples:
  python -m analyzer steps RUN
  python -m analyzer steps RUN --json
"""

import argparse
import json
from pathlib import Path

from analyzer.predict.steps import replay
from analyzer.tables.store import load

FEW = 20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the coefficients and the error."""
    rows, learner = replay(load(args.run_dir))
    error, found = learner.error(), [float(value) for value in learner.coefficients]
    if args.json:
        names = ("seconds", "seconds_per_1000_tokens", "seconds_per_miss")
        told = {key: None if value != value else value for key, value in error.items()}
        print(json.dumps({"coefficients": dict(zip(names, found, strict=True)), "error": told, "steps": rows.to_dict("records")}))
        return 0
    print(f"a decode step: {found[0] * 1e3:.3f} ms + {found[1] * 1e3:.3f} ms per 1000 tokens + {found[2] * 1e3:.3f} ms per miss")
    if error["steps"]:
        sizes = f"median {error['median']:.1%}, p90 {error['p90']:.1%}, bias {error['bias']:+.1%}"
        print(f"predicted before each of {error['steps']:.0f} steps: error {sizes}")
    if len(rows) < FEW:
        print(f"warning: only {len(rows)} decode steps: the coefficients are loose")
    return 0
