"""Renders results as Markdown: those that are kept to docs/results.md, or the given ones to standard output.

python -m benchmarks.render [--check]      --check: writes nothing; exit code 1 where the document is not what would be written
python -m benchmarks.render FILE...
"""

import argparse
import ast
import sys
from itertools import groupby
from pathlib import Path

from benchmarks.lib.report import number
from benchmarks.lib.results import Figure, Machine, Result, ResultError, kept, read
from workloads import ROOT

DOCUMENT = ROOT / "docs" / "results.md"
HEAD = """# Results

What the benchmarks measured. `make results` writes this page from `benchmarks/results/*.json`; `python -m benchmarks.NAME
--json benchmarks/results/NAME-DATE-COMMIT.json` adds a result. A commit is what was measured; a plus means that files differed
from it, an asterisk that the figure was kept in a document before, and that this is the commit which added it there. n: of how
many values or draws. *emulator*: on Qualcomm's HTP emulator, whose times are those of the host.

Earlier series, and figures that do not fit into a table, stand in [earlier.md](../benchmarks/results/earlier.md).
"""
COLUMNS = ("figure", "median", "interval", "n", "commit", "date")
SHOWN = ("avx512_vnni", "avx_vnni", "avx2", "i8mm", "asimddp")
"""Instruction sets that decide how fast a kernel is, the best first; the first that a machine has is shown."""


def purpose(benchmark: str) -> str:
    """The first line of a benchmark's own description."""
    source = ROOT / "benchmarks" / f"{benchmark}.py"
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) if source.exists() else ""
    return (text or "").partition("\n")[0]


def machine_name(machine: Machine) -> str:
    """What to know of a machine, in a line."""
    best = [name for name in SHOWN if name in machine.features][:1]
    return ", ".join([machine.cpu_model, f"{machine.cpus} CPUs", *best, f"Linux {machine.kernel}"])


def row(result: Result, figure: Figure) -> str:
    """A figure as a line of the table."""
    name = f"{figure.name} (against {figure.against})" if figure.against else figure.name
    labels = "".join(f" *{label}*" for label in figure.labels)
    bounds = f"{number(figure.low)} to {number(figure.high)}, {figure.interval}" if figure.low is not None else ""
    where = (result.commit + "\\*" * bool(result.source), result.date)
    median = f"{number(figure.median)} {figure.unit}".strip() if figure.median is not None else ""
    n = "" if figure.n is None else f"{figure.n:,}"
    return "| " + " | ".join([name + labels, median, bounds, n, *where]) + " |"


def section(benchmark: str, results: list[Result]) -> str:
    """A benchmark's tables, one for each machine, and the notes of its results."""
    machines = dict.fromkeys(machine_name(result.machine) for result in results)
    tables = [table(name, [result for result in results if machine_name(result.machine) == name]) for name in machines]
    notes = [f"- {result.commit}: {line}" for result in results for line in result.notes.splitlines()]
    parts = [f"## {benchmark}", purpose(benchmark), *tables, "\n".join(dict.fromkeys(notes))]
    return "\n\n".join(part for part in parts if part)


def table(machine: str, results: list[Result]) -> str:
    """The figures of one machine."""
    rows = [(figure.name, row(result, figure)) for result in results for figure in result.figures]
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    lines = [line for _, line in sorted(rows, key=lambda each: order[each[0]])]
    return "\n".join([f"{machine}:", "", f"| {' | '.join(COLUMNS)} |", "|---|--:|---|--:|---|---|", *lines])


def rendered(results: list[Result]) -> str:
    """Sections of all benchmarks."""
    by_benchmark = groupby(sorted(results, key=lambda result: result.benchmark), key=lambda result: result.benchmark)
    return "\n\n".join(section(name, list(group)) for name, group in by_benchmark) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        page = rendered([read(path) for path in args.files] or kept())
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    if args.files:
        print(page, end="")
    elif not args.check:
        DOCUMENT.write_text(f"{HEAD}\n{page}", encoding="utf-8")
    elif not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != f"{HEAD}\n{page}":
        print("docs/results.md is not what benchmarks/results gives: run make results", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
