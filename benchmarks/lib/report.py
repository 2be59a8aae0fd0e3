"""A benchmark's command line and report: figures are printed immediately and stored in the common format."""

import argparse
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lib import results
from benchmarks.lib.machine import machine
from benchmarks.lib.spread import Spread
from workloads import ROOT


def arguments(description: str | None, rounds: int | None = None, help_rounds: str = "repetitions") -> argparse.ArgumentParser:
    """A parser with the common options: --json, and --rounds if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"{help_rounds} (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def commit() -> str:
    """The checked-out commit, with a plus if files differ from it; empty outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--match="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


class Report:
    """The figures of one run of a benchmark."""

    def __init__(self, benchmark: str, args: argparse.Namespace):
        self.benchmark, self.path = benchmark, args.json
        self.rounds: int | None = getattr(args, "rounds", None)
        self.figures: list[results.Figure] = []
        self.notes: list[str] = []

    def add(self, name: str, unit: str, spread: Spread, against: str = "", labels: tuple[str, ...] = ()) -> None:
        """Store and print a figure."""
        figure = results.figure(name, unit, spread, against, labels)
        self.figures.append(figure)
        print(line(figure), flush=True)

    def note(self, text: str) -> None:
        """Store and print a sentence."""
        self.notes.append(text)
        print(text, flush=True)

    def finish(self) -> None:
        """Write the file given by --json."""
        if self.path:
            results.write(self.result(), self.path)

    def result(self) -> results.Result:
        """The result so far."""
        own = sys.argv[1:]
        if "--json" in own:  # the destination, not a setting
            del own[own.index("--json") : own.index("--json") + 2]
        words = shlex.join(["python", "-m", f"benchmarks.{self.benchmark}", *own])
        described: Any = (datetime.now(UTC).date().isoformat(), commit(), machine(), words, self.rounds, self.figures)
        return results.Result(self.benchmark, *described, notes="\n".join(self.notes))


def line(figure: results.Figure) -> str:
    """A figure as text."""
    bounds = f" ({number(figure.low)} to {number(figure.high)}, {figure.interval})" if figure.low is not None else ""
    against = f" against {figure.against}" if figure.against else ""
    labels = f" [{', '.join(figure.labels)}]" if figure.labels else ""
    return f"{figure.name:<56} {number(figure.median):>10} {figure.unit}{bounds}{against}, n {figure.n}{labels}"


def number(value: float | None) -> str:
    """A number with four significant digits; integers in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
