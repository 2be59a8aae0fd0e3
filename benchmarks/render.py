"""Renders results as Markdown: stored ones to docs/results.md and docs/results/, given ones to standard output.

python -m benchmarks.render [--check]      --check: writes nothing; exit code 1 if a page is outdated
python -m benchmarks.render FILE...
python -m benchmarks.render --from FOLDER --to FOLDER      other results, other pages
"""

import argparse
import ast
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from statistics import mode

from benchmarks.lib.headlines import PLAIN, WIDTH, claim_line, claims
from benchmarks.lib.report import number
from benchmarks.lib.results import FOLDER as KEPT
from benchmarks.lib.results import Figure, Result, ResultError, read_results, stored_results
from workloads import ROOT

DOCS = ROOT / "docs"
FRONT, FOLDER = "results.md", "results"
HEAD = """# Results

Newest medians of each machine; a title leads to all figures, with intervals, commits and commands. n: values or draws.
*emulator*: Qualcomm's HTP emulator, with its host's times; *stand-in*: a program that imitates the device. `make
results` writes these pages from what `python -m benchmarks.NAME --json` keeps.
"""
MEANING = """Median (interval), where there is one; n: number of values or draws. `+` after a commit: the tree had uncommitted \
changes."""


def benchmark_purpose(benchmark: str) -> str:
    """The first line of a benchmark's description."""
    source = ROOT / "benchmarks" / f"{benchmark}.py"
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) if source.exists() else ""
    return (text or "").partition("\n")[0]


def figure_cell(figure: Figure, usual: int | None) -> str:
    """A figure's median, interval, and n unless it is the usual one of its row."""
    bounds = [f"{number(figure.low)} to {number(figure.high)}"] if figure.low is not None and figure.low != figure.high else []
    text = number(figure.median) or "".join(bounds[:1])
    bounds = bounds if figure.median is not None else []
    inside = [*bounds, *([f"n {figure.n:,}"] if figure.n not in (usual, None) else [])]
    return text + f" ({', '.join(inside)})" * bool(inside)


def column_head(figure: Figure) -> str:
    """What a column of figures holds: quantity, unit, peer, kind of interval."""
    quantity = figure.name.rpartition(": ")[2] if ": " in figure.name else "value"
    unit = [figure.unit] if figure.unit not in PLAIN else []
    against = [f"against {figure.against}"] if figure.against else []
    return ", ".join([quantity, *unit, *against, *([figure.interval] if figure.interval else [])])


def figure_table(figures: list[Figure]) -> str:
    """Figures named "ROW: QUANTITY", or only ROW; labels belong to the row."""
    rows: dict[str, dict[str, list[Figure]]] = {}
    for figure in figures:
        name, _, rest = figure.name.rpartition(": ")
        row = (name or rest) + "".join(f" *{label}*" for label in figure.labels)
        rows.setdefault(row, {}).setdefault(column_head(figure), []).append(figure)
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    lines = [f"|  | {' | '.join(heads)} | n |", "|---" * (len(heads) + 2) + "|"]
    for row, there in rows.items():
        usual = mode(figure.n for its in there.values() for figure in its)
        cells = ["; ".join(figure_cell(figure, usual) for figure in there.get(head, [])) for head in heads]
        lines.append(f"| {' | '.join([row, *cells, '' if usual is None else f'{usual:,}'])} |")
    return "\n".join(lines) if figures else ""


def result_text(result: Result, figures: list[Figure]) -> str:
    """A result: commit and date, figures, command, notes."""
    kernel = ".".join(result.machine.kernel.split(".")[:2])
    tables = [figure_table([figure for figure in figures if (": " in figure.name) == named]) for named in (True, False)]
    command = f"`{result.command}`" if result.command else ""
    notes = [f"- {text}" for text in dict.fromkeys([command, *result.notes.splitlines()]) if text]
    return join_paragraphs([f"{result.date}, {result.commit}, Linux {kernel}", *tables, "\n".join(notes)]).rstrip()


def all_pages(results: list[Result], docs: Path) -> dict[Path, str]:
    """Every page and its text."""
    found = {docs / FRONT: front_page(results)}
    for benchmark, group in groupby(results, key=lambda result: result.benchmark):
        texts = [f"# {benchmark}", *(textwrap.fill(text, WIDTH) for text in (benchmark_purpose(benchmark), MEANING))]
        for machine, its in groupby(group, key=lambda result: result.machine.name()):
            texts += [f"## {machine}", *(result_text(result, result.figures) for result in its)]
        found[docs / FOLDER / f"{benchmark}.md"] = join_paragraphs(texts)
    return found


def front_page(results: list[Result]) -> str:
    """The page of the claims."""
    lines = [(claim.first, claim_line(claim, results)) for claim in claims()]
    first, others = ("\n".join(text for at_top, text in lines if text and at_top == wanted) for wanted in (True, False))
    rest = sorted({result.benchmark for result in results} - {claim.benchmark for claim in claims()})
    more = "Also measured: " + ", ".join(f"[{name}](results/{name}.md)" for name in rest) + "."
    used = "Machines: " + "; ".join(sorted({result.machine.name() for result in results})) + "."
    return join_paragraphs([HEAD.rstrip(), first, others, textwrap.fill(f"{more} {used}", WIDTH)])


def join_paragraphs(parts: list[str]) -> str:
    """Paragraphs as a page."""
    return "\n\n".join(filter(None, parts)) + "\n"


def outdated_pages(wanted: dict[Path, str], docs: Path) -> list[Path]:
    """Pages that are outdated or should not exist."""
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return stale + [path for path in (docs / FOLDER).glob("*.md") if path not in wanted]


def write_pages(wanted: dict[Path, str], docs: Path) -> None:
    """Write all pages and remove those without results."""
    (docs / FOLDER).mkdir(exist_ok=True)
    for path in outdated_pages(wanted, docs):
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--from", type=Path, default=KEPT, dest="source", metavar="FOLDER")
    parser.add_argument("--to", type=Path, default=DOCS, metavar="FOLDER")
    args = parser.parse_args()
    try:
        results = [result for path in args.files for result in read_results(path)] or stored_results(args.source)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    if args.files:
        print(join_paragraphs([result_text(result, result.figures) for result in results]), end="")
        return 0
    wanted = all_pages(results, args.to)
    if not args.check:
        write_pages(wanted, args.to)
    elif stale := outdated_pages(wanted, args.to):
        print(f"{stale[0]} is not what {args.source} gives: run make results", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
