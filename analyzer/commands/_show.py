"""How the verbs show tables: aligned columns on a terminal, or JSON without NaN."""

import json
import sys
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

LINES = 20
PLAIN_WIDTH = 160
"""Columns where the output is no terminal."""


def plain(value: Any) -> Any:
    """Something JSON can hold: tables as lists of rows, NumPy scalars as Python's, NaN as null."""
    if isinstance(value, pd.DataFrame):
        return [plain(row) for row in value.to_dict("records")]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_json(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(plain(value))


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
