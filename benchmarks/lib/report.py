"""A benchmark's command line, and its report: figures are printed as they come and kept in the one form."""

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
    """A parser with what all benchmarks take: --json, and --rounds where there is a default for it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"{help_rounds} (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser


def commit() -> str:
    """The commit that is checked out, with a plus where files differ from it; empty outside a checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--match="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


class Report:
    """The figures of one run of a benchmark, which begin with its name."""

    def __init__(self, benchmark: str, args: argparse.Namespace):
        self.benchmark, self.path = benchmark, args.json
        self.rounds: int | None = getattr(args, "rounds", None)
        self.figures: list[results.Figure] = []
        self.notes: list[str] = []

    def add(self, name: str, unit: str, spread: Spread, against: str = "", labels: tuple[str, ...] = ()) -> None:
        """Keep a figure and print it."""
        figure = results.figure(name, unit, spread, against, labels)
        self.figures.append(figure)
        print(line(figure), flush=True)

    def note(self, text: str) -> None:
        """Keep a sentence and print it."""
        self.notes.append(text)
        print(text, flush=True)

    def finish(self) -> None:
        """Write the file that was asked for."""
        if self.path:
            results.write(self.result(), self.path)

    def result(self) -> results.Result:
        """What was measured so far."""
        own = sys.argv[1:]
        if "--json" in own:  # says where, not what
            del own[own.index("--json") : own.index("--json") + 2]
        words = shlex.join(["python", "-m", f"benchmarks.{self.benchmark}", *own])
        described: Any = (datetime.now(UTC).date().isoformat(), commit(), machine(), words, self.rounds, self.figures)
        return results.Result(self.benchmark, *described, notes="\n".join(self.notes))


def line(figure: results.Figure) -> str:
    """A figure as people read it."""
    bounds = f" ({number(figure.low)} to {number(figure.high)}, {figure.interval})" if figure.low is not None else ""
    against = f" against {figure.against}" if figure.against else ""
    labels = f" [{', '.join(figure.labels)}]" if figure.labels else ""
    return f"{figure.name:<56} {number(figure.median):>10} {figure.unit}{bounds}{against}, n {figure.n}{labels}"


def number(value: float | None) -> str:
    """Four digits that count; whole numbers in full."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
