"""The tables of the claims, as benchmarks/headlines.toml declares them, from the newest results of each machine."""

import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.report import number
from benchmarks.lib.results import Figure, Machine, Result

DECLARED = Path(__file__).resolve().parent.parent / "headlines.toml"
SHOWN = ("avx512_vnni", "avx_vnni", "avx2", "i8mm", "asimddp")
"""Instruction sets that decide how fast a kernel is, the best first; the first that a machine has is shown."""
PLAIN = {"", "ratio", "count", "x"}
"""Units that the head of a column says already."""
WIDTH = 120
FOLDS = {"sum": sum, "max": max}


@dataclass(frozen=True)
class Claim:
    """One table: rows are figures with names that match `row`; columns are (head, name of a figure, way to combine matches)."""

    title: str
    benchmark: str
    text: str
    row: str
    columns: list[list[str]]
    fold: str = ""


def claims() -> list[Claim]:
    """All claims, in the order of the page."""
    return [Claim(**entry) for entry in tomllib.loads(DECLARED.read_text(encoding="utf-8"))["claim"]]


def machine_name(machine: Machine) -> str:
    """A machine in one line; builds of one kernel version are the same machine."""
    best = [name for name in SHOWN if name in machine.features][:1]
    kernel = ".".join(machine.kernel.split(".")[:2])
    return ", ".join([machine.cpu_model, f"{machine.cpus} CPUs", *best, f"Linux {kernel}"])


def short_name(machine: Machine) -> str:
    """A machine's name in table cells."""
    best = [name for name in SHOWN if name in machine.features][:1]
    return ", ".join([machine.cpu_model.replace("(R)", "").replace(" Processor", ""), *best])


RENAMED = {
    "cannot tell": "inconclusive",
    "others accused": "others reported",
    "in drawn pairs": "in random pairs",
    "by turns": "alternately",
    "all tables anew": "all tables rebuilt",
    "whose prize is right": "whose estimated saving is right",
    "tokens equal, of .+": "tokens equal",
}
"""Parts of figures' names in older results, as patterns → those of today, so that a newer figure replaces its older one."""


def full_name(figure: Figure) -> str:
    """A figure's current name, with its peer."""
    name = figure.name
    for old, new in RENAMED.items():
        name = re.sub(old, new, name)
    return f"{name} (against {figure.against})" if figure.against else name


def split(results: list[Result]) -> Iterator[tuple[Result, list[Figure], list[Figure]]]:
    """(result, its figures without a later measurement on the same machine, its other figures)."""
    latest: dict[tuple[str, str, str], str] = {}
    for result in results:
        for figure in result.figures:
            key = (result.benchmark, machine_name(result.machine), full_name(figure))
            latest[key] = max(latest.get(key, ""), result.date)
    for result in results:
        newest = [
            latest[result.benchmark, machine_name(result.machine), full_name(figure)] == result.date for figure in result.figures
        ]
        yield (
            result,
            [figure for figure, new in zip(result.figures, newest, strict=True) if new],
            [figure for figure, new in zip(result.figures, newest, strict=True) if not new],
        )


def cell(figures: list[Figure], known: set[str]) -> str:
    """The figures of one name as a cell: median, interval, and labels not in `known`."""
    texts = []
    for figure in figures:
        bounds = f"{number(figure.low)} to {number(figure.high)}" if figure.low is not None else ""
        median = number(figure.median) if figure.median is not None else bounds
        unit = "" if figure.unit in PLAIN else f" {figure.unit}"
        spread = f" ({bounds})" if bounds and figure.median is not None else ""
        texts.append(median + unit + spread + marked(label for label in figure.labels if label not in known))
    return "; ".join(texts)


def marked(labels: Iterable[str]) -> str:
    """Labels as text after a figure."""
    return "".join(f" *{label}*" for label in labels)


def folded(figures: list[Figure], fold: str) -> str:
    """The figures of all rows combined: the sum of counts with their total, or the largest of all values."""
    values = [figure.median for figure in figures if figure.median is not None]
    if not values:
        return "0" if fold == "sum" else ""
    if fold == "max":
        values += [figure.high for figure in figures if figure.high is not None]
    total = sum(figure.n or 0 for figure in figures)
    return number(FOLDS[fold](values)) + (f" of {total:,}" if fold == "sum" and total == sum(values) else "")


def named(figures: Iterable[Figure], name: str) -> list[Figure]:
    """The figures with a name; a star at its end matches any rest."""
    if name.endswith("*"):
        return [figure for figure in figures if full_name(figure).startswith(name[:-1])]
    return [figure for figure in figures if full_name(figure) == name]


def rows(claim: Claim, results: list[Result]) -> Iterator[list[str]]:
    """The cells of a claim's table, machine by machine: row, columns, n, machine, date and commit."""
    mine = sorted((result for result in results if result.benchmark == claim.benchmark), key=lambda one: short_name(one.machine))
    for result, figures, _ in split(mine):
        matches = (re.fullmatch(claim.row, full_name(figure)) for figure in figures)
        names = list(dict.fromkeys(match[1] for match in matches if match))
        where = [short_name(result.machine), f"{result.date}, {result.commit}"]
        if claim.fold and names:
            yield [claim.fold, *folded_columns(claim, figures, names), "", *where]
        else:
            for name in names:
                yield [*row(claim, figures, name), *where]


def folded_columns(claim: Claim, figures: list[Figure], names: list[str]) -> Iterator[str]:
    """The cells of the single row for all names."""
    for _, column, fold in claim.columns:
        yield folded([figure for name in names for figure in named(figures, column.format(row=name))], fold)


def row(claim: Claim, figures: list[Figure], name: str) -> list[str]:
    """One row: its name with the labels common to its figures, its columns, n."""
    columns = [named(figures, column.format(row=name)) for _, column in claim.columns]
    there = [figure for column in columns for figure in column]
    common = [label for label in there[0].labels if all(label in figure.labels for figure in there)]
    n = next((f"{figure.n:,}" for figure in there if figure.n is not None), "")
    return [name + marked(common), *(cell(column, set(common)) for column in columns), n]


def table(claim: Claim, results: list[Result]) -> str:
    """A claim as Markdown: title, meaning, table; empty if nothing was measured."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows(claim, results)]
    heads = ["", *(column[0] for column in claim.columns), "n", "machine", "measured"]
    title, text = f"## [{claim.title}](results/{claim.benchmark}.md)", textwrap.fill(claim.text, WIDTH)
    head = [title, text, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*head, *lines]) if lines else ""
