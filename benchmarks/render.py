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

from benchmarks.lib.headlines import WIDTH, claims, full_name, machine_name, marked, split, table
from benchmarks.lib.report import number
from benchmarks.lib.results import FOLDER as KEPT
from benchmarks.lib.results import Figure, Result, ResultError, kept, read
from workloads import ROOT

DOCS = ROOT / "docs"
FRONT, FOLDER = "results.md", "results"
HEAD = """# Results

What the claims of this project rest on: for each machine the newest measurement, median and (interval). A title
leads to every figure of its benchmark, and from there to older measurements. *emulator*: on Qualcomm's HTP emulator,
whose times are those of the host; *stand-in*: on a program that imitates the device. n: of how many values or draws. A
plus behind a commit: files differed from it. `make results` writes these pages from `benchmarks/results/*.json`, to
which `python -m benchmarks.NAME --json benchmarks/results/NAME-DATE-COMMIT.json` adds;
`benchmarks/headlines.toml` declares the tables below.
"""
MORE = "Figures that do not fit into a table stand in [earlier.md](../benchmarks/results/earlier.md)."
MEANING = """Figures that no later day measured again on the same machine. A plus behind a commit: files differed from it; an \
asterisk: the figure was kept in a document before, and that commit added it there. n: of how many values or draws."""
COLUMNS = ("figure", "median", "interval", "n")
SHEET = 285
"""Lines of figures that a page holds at most."""


def purpose(benchmark: str) -> str:
    """The first line of a benchmark's description."""
    source = ROOT / "benchmarks" / f"{benchmark}.py"
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) if source.exists() else ""
    return (text or "").partition("\n")[0]


def row(figure: Figure) -> str:
    """A figure as a line of the table."""
    bounds = f"{number(figure.low)} to {number(figure.high)}, {figure.interval}" if figure.low is not None else ""
    median = f"{number(figure.median)} {figure.unit}".strip() if figure.median is not None else ""
    n = "" if figure.n is None else f"{figure.n:,}"
    return "| " + " | ".join([full_name(figure) + marked(figure.labels), median, bounds, n]) + " |"


def part(result: Result, figures: list[Figure]) -> str:
    """A result: date and machine, figures, notes."""
    commit = result.commit + "\\*" * bool(result.source)
    head = f"## {result.date}, {commit}: {machine_name(result.machine)}"
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|--:|---|--:|", *map(row, figures)]
    notes = [f"- {line}" for line in dict.fromkeys(result.notes.splitlines())]
    return "\n\n".join(filter(None, [head, "\n".join(lines), "\n".join(notes)]))


def pages(results: list[Result], docs: Path) -> dict[Path, str]:
    """Every page and its text."""
    by_benchmark = groupby(sorted(results, key=lambda result: result.benchmark), key=lambda result: result.benchmark)
    found = {}
    for benchmark, group in by_benchmark:
        parts = list(split(list(group)))[::-1]
        newest = [part(result, new) for result, new, _ in parts if new]
        earlier = [part(result, old) for result, _, old in parts if old]
        first, *more = sheets(newest)
        names = [f"{benchmark}-{number}.md" for number in range(2, len(more) + 2)]
        found[docs / FOLDER / f"{benchmark}.md"] = benchmark_page(benchmark, first, names, bool(earlier))
        for name, sheet in zip(names, more, strict=True):
            text = f"Continues [{benchmark}.md]({benchmark}.md)."
            found[docs / FOLDER / name] = joined([f"# {benchmark}, continued", text, *sheet])
        if earlier:
            text = f"What [later days measured again]({benchmark}.md)."
            found[docs / FOLDER / f"{benchmark}-earlier.md"] = joined([f"# {benchmark}: earlier measurements", text, *earlier])
    return {docs / FRONT: front(results), **found}


def sheets(parts: list[str]) -> list[list[str]]:
    """Results in pages of at most SHEET lines; one that is longer has a page of its own."""
    answer: list[list[str]] = [[]]
    for text in parts:
        if answer[-1] and sum(one.count("\n") + 2 for one in (*answer[-1], text)) > SHEET:
            answer.append([])
        answer[-1].append(text)
    return answer


def benchmark_page(benchmark: str, newest: list[str], more: list[str], older: bool) -> str:
    """A benchmark's newest figures on each machine; `more` pages continue it."""
    links = ["[Headlines](../results.md)", *(f"[continued]({name})" for name in more)]
    links = ", ".join([*links, *([f"[earlier measurements]({benchmark}-earlier.md)"] if older else [])]) + "."
    return joined([f"# {benchmark}", *(textwrap.fill(text, WIDTH) for text in (purpose(benchmark), MEANING, links)), *newest])


def front(results: list[Result]) -> str:
    """The page of the claims."""
    tables = [text for claim in claims() if (text := table(claim, results))]
    shown = {claim.benchmark for claim in claims()}
    others = sorted({result.benchmark for result in results} - shown)
    more = "Also measured: " + ", ".join(f"[{name}](results/{name}.md)" for name in others) + f". {MORE}"
    machines = sorted({machine_name(result.machine) for result in results})
    used = "Machines: " + "; ".join(machines) + "."
    return joined([HEAD.rstrip(), textwrap.fill(used, WIDTH), *tables, "## More", textwrap.fill(more, WIDTH)])


def joined(parts: list[str]) -> str:
    """Paragraphs as a page."""
    return "\n\n".join(filter(None, parts)) + "\n"


def differing(wanted: dict[Path, str], docs: Path) -> list[Path]:
    """Pages that are outdated or should not exist."""
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return stale + [path for path in (docs / FOLDER).glob("*.md") if path not in wanted]


def write(wanted: dict[Path, str], docs: Path) -> None:
    """Write all pages and remove those without results."""
    (docs / FOLDER).mkdir(exist_ok=True)
    for path in differing(wanted, docs):
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
        results = [read(path) for path in args.files] or kept(args.source)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    if args.files:
        print(joined([part(result, result.figures) for result in results]), end="")
        return 0
    wanted = pages(results, args.to)
    if not args.check:
        write(wanted, args.to)
    elif stale := differing(wanted, args.to):
        print(f"{stale[0]} is not what {args.source} gives: run make results", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
