"""A benchmark's command line and report: figures are printed immediately and stored in the common format."""

import argparse
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.lib import results
from benchmarks.lib.machine import this_machine
from benchmarks.lib.spread import Spread
from workloads import ROOT


def make_parser(description: str | None, rounds: int | None = None, help_rounds: str = "repetitions") -> argparse.ArgumentParser:
    """A parser with the common options: --json, and --rounds if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"{help_rounds} (default: %(default)s)")
    what = "add the figures to this file or folder of results (default: benchmarks/results)"
    parser.add_argument("--json", type=result_destination, nargs="?", const=results.FOLDER, metavar="FILE", help=what)
    return parser


def result_destination(text: str) -> Path:
    """The value of --json; raises ArgumentTypeError for what was probably meant as another argument."""
    path = Path(text)
    if path.suffix != ".json" and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is neither a .json file nor a folder: put --json last, or name such a file")
    return path


def commit_label() -> str:
    """The checked-out commit, with a plus if the tree has uncommitted changes; empty outside a checkout."""
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
        print(figure_line(figure), flush=True)

    def note(self, text: str) -> None:
        """Store and print a sentence."""
        self.notes.append(text)
        print(text, flush=True)

    def finish(self) -> None:
        """Add the result to the file given by --json."""
        if self.path:
            results.store_result(self.result(), self.path)

    def result(self) -> results.Result:
        """The result so far."""
        own = [word for word in sys.argv[1:] if word != "--json" and Path(word) != self.path]  # the destination is no setting
        own = [Path(word).name if word.startswith("/") else word for word in own]  # nor is where this machine keeps its files
        words = shlex.join(["python", "-m", f"benchmarks.{self.benchmark}", *own])
        described = (datetime.now(UTC).date().isoformat(), commit_label(), this_machine(), words)
        return results.Result(self.benchmark, *described, self.rounds, self.figures, "\n".join(self.notes))


def figure_line(figure: results.Figure) -> str:
    """A figure as text."""
    bounds = f" ({number(figure.low)} to {number(figure.high)}, {figure.interval})" if figure.low is not None else ""
    against = f" against {figure.against}" if figure.against else ""
    labels = f" [{', '.join(figure.labels)}]" if figure.labels else ""
    return f"{figure.name:<56} {number(figure.median):>10} {figure.unit}{bounds}{against}, n {figure.n}{labels}"


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; integers in full."""
    if value is None or value == int(value):
        return "" if value is None else f"{value:,.0f}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"
