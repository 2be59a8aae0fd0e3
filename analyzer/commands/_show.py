"""Output of values and tables for the verbs, and their handling of many recordings."""

import sys
from collections.abc import Callable
from typing import Any

import pandas as pd

from analyzer.questions.step_origin import step_origin
from analyzer.records.schema import Tables
from analyzer.tables.recording_folders import Failure, RecordingFolder, map_folders
from moescope.answers import json_value
from moescope.plain import one_line
from moescope.terminal import console, grid, progress

LINES = 20


def cell_text(value: Any) -> str:
    """A value in a few characters; "-" if unknown."""
    item = json_value(value)
    if item is None:
        return "-"
    if isinstance(item, float):
        return f"{item:,.0f}" if abs(item) >= 1000 else f"{item:.3g}"
    return f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else str(item)


def number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """A number with its unit; "-" if unknown."""
    return "-" if value is None or value != value else f"{value:{form}}{unit}"


def shorten_name(name: str, width: int = 48) -> str:
    """A name, with the middle of long ones omitted."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"


def print_table(rows: pd.DataFrame, title: str = "", limit: int = LINES) -> None:
    """Print the first rows, texts left-aligned, numbers right-aligned."""
    texts = tuple(str(name) for name in rows.columns if any(isinstance(value, str) for value in rows[name]))
    cells = (map(cell_text, row) for row in rows.iloc[:limit].itertuples(index=False))
    screen = console(wide=True)
    screen.print(grid(*map(str, rows.columns), left=texts, title=title, rows=cells))
    if len(rows) > limit:
        screen.print(f"{len(rows) - limit} more rows: --json shows all")


def print_origin(tables: Tables) -> None:
    """Say where steps come from that no engine declared."""
    if text := step_origin(tables):
        console(soft_wrap=not sys.stdout.isatty()).print(text)


def map_recordings(
    task: Callable[[RecordingFolder], Any], some: list[RecordingFolder], dask: str = ""
) -> tuple[list[Any], list[Failure]]:
    """(answers in the order of the recordings, failures); failures are also printed to standard error."""
    found: dict[RecordingFolder, Any] = {}
    with progress("reading") as step:
        for place, answer in map_folders(task, some, dask):
            found[place] = answer
            step(f"{len(found):,} of {len(some):,} recordings")
    failures = [answer for answer in found.values() if isinstance(answer, Failure)]
    for failure in failures:
        print(one_line(failure.reason), file=sys.stderr)
    return [found[place] for place in some if not isinstance(found[place], Failure)], failures
