"""The answers on docs/results.md, as benchmarks/headlines.toml declares them, from the newest results of each machine."""

import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.lib.report import number
from benchmarks.lib.results import Figure, Result

DECLARED = Path(__file__).resolve().parent.parent / "headlines.toml"
PLAIN = {"", "ratio", "count", "x"}
"""Units that a column's name says already."""
SHOWN = ("emulator", "stand-in", "loaded machine")
"""Labels without which a figure would be taken for another one."""
WIDTH, DIGITS = 120, 3


@dataclass(frozen=True)
class Claim:
    """An answer: `row` matches figures, its later groups are their label; columns: (word, name of a figure, fold).

    Figures of rows with one label are folded: sum, max, or their range. first: it stands above the others.
    """

    title: str
    benchmark: str
    row: str
    columns: list[list[str]]
    text: str = ""
    first: bool = False


def claims() -> list[Claim]:
    """All claims, in the order of the page."""
    return [Claim(**entry) for entry in tomllib.loads(DECLARED.read_text(encoding="utf-8"))["claim"]]


def name_with_peer(figure: Figure) -> str:
    """A figure's name, with its peer."""
    return f"{figure.name} (against {figure.against})" if figure.against else figure.name


def median_text(median: float, unit: str) -> str:
    """A median with its unit."""
    return number(median, DIGITS) if unit in PLAIN else f"{number(median, DIGITS)} {unit}"


def folded_text(figures: list[Figure], fold: str) -> str:
    """The medians of figures of one label as one text; sum: with the total of n, if that is how many of how many."""
    medians = [figure.median for figure in figures if figure.median is not None]
    if not medians:
        return "none" if fold == "sum" else ""
    if fold == "sum":
        total = sum(figure.n or 0 for figure in figures)
        return number(sum(medians), DIGITS) + (f" of {total:,}" if total == sum(medians) else "")
    highest = [figure.high for figure in figures if figure.high is not None] if fold == "max" else []
    low, high = min(medians), max([*medians, *highest])
    unit = figures[0].unit
    return median_text(high, unit) if fold == "max" or low == high else f"{number(low, DIGITS)} to {median_text(high, unit)}"


def claim_answers(claim: Claim, figures: list[Figure]) -> Iterator[tuple[str, int]]:
    """(what a machine's figures say of one label, their n)."""
    named = {(name_with_peer(figure), *figure.labels): figure for figure in figures}
    rows: dict[str, dict[str, Figure]] = {}
    for (name, *_), figure in named.items():
        if match := re.fullmatch(claim.row, name):
            label = " ".join(group for group in match.groups()[1:] if group) or match[1] * (match.re.groups == 1)
            rows.setdefault("".join([label, *(f" *{word}*" for word in figure.labels if word in SHOWN)]), {})[match[1]] = figure
    for label, its in rows.items():
        texts = []
        for head, column, *fold in claim.columns:
            there = [named[key] for row, one in its.items() if (key := (column.format(row=row), *one.labels)) in named]
            if text := folded_text(there, *fold or ["range"]):
                texts.append(f"{head} {text}".strip())
        colon = f"{label}{' ' if len(texts) == 1 else ': '}" * bool(label)
        yield colon + ", ".join(texts), max(one.n or 1 for one in its.values())


def claim_line(claim: Claim, results: list[Result]) -> str:
    """A claim as an item of a list: its title, and for each machine its figures and their n; empty if nothing was measured."""
    mine = sorted((result for result in results if result.benchmark == claim.benchmark), key=lambda one: one.machine.name())
    machines = []
    for machine, group in groupby(mine, key=lambda one: one.machine.name()):
        figures = [figure for result in group for figure in result.figures]
        if said := list(claim_answers(claim, figures)):
            counts = sorted({n for _, n in said})
            n = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
            machines.append(f"{machine.partition(',')[0]} (n {n}): {'; '.join(text for text, _ in said)}")
    title = f"**[{claim.title}](results/{claim.benchmark}.md)**" + f", {claim.text}" * bool(claim.text)
    return textwrap.fill(f"- {title}. {'. '.join(machines)}.", WIDTH, subsequent_indent="  ") if machines else ""
