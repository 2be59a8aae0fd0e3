"""How the verbs show tables: aligned columns on a terminal."""

import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from analyzer.jsonable import plain

LINES = 20
PLAIN_WIDTH = 160
"""Columns where the output is no terminal."""


def cell(value: Any) -> str:
    """A value in a few characters; "-" where it is not known."""
    known = plain(value)
    if known is None:
        return "-"
    if isinstance(known, float):
        return f"{known:,.0f}" if abs(known) >= 1000 else f"{known:.3g}"
    return f"{known:,}" if isinstance(known, int) and not isinstance(known, bool) else str(known)


def show(rows: pd.DataFrame, title: str = "", limit: int = LINES) -> None:
    """Print the first rows; texts to the left, numbers to the right."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="bold",
        pad_edge=False,
        padding=(0, 1),
    )
    for name in rows.columns:
        text = rows[name].map(type).eq(str).any()
        table.add_column(str(name), justify="left" if text else "right", overflow="ellipsis", no_wrap=True)
    for row in rows.iloc[:limit].itertuples(index=False):
        table.add_row(*map(cell, row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(table)
    if len(rows) > limit:
        console.print(f"{len(rows) - limit} more rows: --json has all")
