"""The report's data: sections of blocks. Other modules make them from the tables; static/report.js draws them.

A section is a title and a list of blocks. A block is one of
    note      text
    cards     label, value, note: the main figures
    findings  level (good | warn | bad | info) and text, optionally `share` (of step time), `cause`, `query` and `at`,
              a moment
    pairs     label and value, optionally a moment
    table     columns (name, kind: text | cause | number | bar | moment) and rows, sortable; a moment links to
              the timeline
    chart     Plotly traces; `slot` is the number of a theme colour, `cause` the name of a cause with its own (views/colours.py)
    time      bars of a mean step by cause and part (time_bars.py)
    heat      iteration by expert, one matrix per layer
    flame     frames of a flame graph (report/stacks.py)
    graph     cards of operators, coloured by change (views/profdag/change_graph.py)

A chart, heat or table may have the `query` that its data comes from: SQL for `moescope query RUN`. If SQL does not
suffice, it has the `command` that prints its figures.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analyzer.questions.ceilings import Ceilings
from analyzer.records.schema import Tables
from analyzer.tables.store import LazyTables
from views.report.page import write_page

if TYPE_CHECKING:
    from analyzer.questions.sql import Database

Block = dict[str, Any]
MS = 1e6
MAX_POINTS = 1500
MAX_ROWS = 400


@dataclass
class Run:
    """The inputs of the report."""

    manifest: dict[str, Any]
    tables: Tables
    summary: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None

    @cached_property
    def boot_ns(self) -> int:
        """CLOCK_BOOTTIME - CLOCK_MONOTONIC in ns; Perfetto uses the former."""
        clock = (self.manifest.get("clocks") or [{}])[0]
        return int(clock.get("boottime_ns", 0) - clock.get("monotonic_ns", 0))

    @cached_property
    def database(self) -> "Database":
        """SQL over the tables."""
        from analyzer.questions.sql import Database  # other pages of sections ask none, and need no DuckDB

        return Database(LazyTables.of(self.tables))

    def ask(self, sql: str) -> pd.DataFrame:
        """The rows of a statement, for a block that shows both."""
        return self.database.frame(sql)

    def moments(self, frame: pd.DataFrame) -> list[list[int]]:
        """Positions in the timeline of rows with begin_ns and duration_ns: [begin on Perfetto's clock, duration]."""
        begin = (frame["begin_ns"] + self.boot_ns).tolist()
        return [[moment, max(length, 0)] for moment, length in zip(begin, frame["duration_ns"].tolist(), strict=True)]


@dataclass
class Section:
    """One section of the report."""

    name: str
    title: str
    blocks: list[Block]


def write_sections(
    path: Path, title: str, document: dict[str, Any], sections: Iterable[Section | None], stamp: str = "MoEScope"
) -> int:
    """Write a page of sections, without those that are None, below the document's `title` and `lead`; returns its bytes."""
    drawn = [asdict(section) for section in sections if section]
    return write_page(path, "report", f"MoEScope: {title}", document | {"sections": drawn}, {"plotly": plotly_script()}, stamp)


@cache
def plotly_script() -> bytes:
    """Plotly's script from its Python package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def note(text: str) -> Block:
    """A block with a text."""
    return {"kind": "note", "text": text}


def cards(items: list[tuple[str, str, str]]) -> Block:
    """A block of main figures."""
    return {"kind": "cards", "items": [{"label": label, "value": value, "note": remark} for label, value, remark in items]}


def pairs(items: Sequence[tuple[Any, ...]]) -> Block:
    """Labels and values, optionally with a moment as third item."""
    rows = [[label, str(value), *moment] for label, value, *moment in items if value not in (None, "")]
    return {"kind": "pairs", "items": rows}


def is_known(value: Any, kind: str) -> bool:
    """Whether a cell has a value."""
    return bool(value) if kind in ("text", "cause") else value is not None and value is not pd.NA and value == value


def table(columns: str, rows: pd.DataFrame | list[list[Any]], title: str = "", query: str = "", command: str = "") -> Block:
    """A sortable table with `columns` as "kind name, kind name".

    Limited to the first MAX_ROWS rows and to columns with a known value.
    """
    body = rows.to_numpy(object).tolist() if isinstance(rows, pd.DataFrame) else rows
    heads = [column.split(None, 1) for column in columns.split(", ")]
    filled = [i for i, (kind, _) in enumerate(heads) if not body or any(is_known(row[i], kind) for row in body)]
    return {
        "kind": "table",
        "title": title,
        "query": query,
        "command": analyzer_command(command),
        "columns": [{"name": heads[i][1], "kind": heads[i][0]} for i in filled],
        "rows": [[row[i] for i in filled] for row in body[:MAX_ROWS]],
        "total": len(body),
    }


def table_of(run: Run, title: str, query: str, columns: str) -> list[Block]:
    """The table of a query's rows, if there are any; its columns begin_ns and duration_ns become a moment, the last column."""
    rows = run.ask(query)
    if "begin_ns" in rows:
        rows = rows.drop(columns=["begin_ns", "duration_ns"]).assign(moment=run.moments(rows))
    return [table(columns, rows, title, query)] if len(rows) else []


def chart(title: str, traces: list[dict[str, Any]], remark: str = "", height: int = 300, query: str = "", **layout: Any) -> Block:
    """A Plotly chart of the data of `query`."""
    fields = {"title": title, "note": remark, "traces": traces, "layout": layout, "height": height}
    return {"kind": "chart", "query": query, **fields}


def analyzer_command(command: str) -> str:
    """The command line of an analyzer verb with its arguments; "" for none."""
    return command and f"moescope {command}"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """A labelled axis."""
    return {"title": {"text": title}, **more}


def label(text: object, width: int = 48) -> str:
    """A name with Plotly's markup characters escaped, shortened to `width`."""
    full, half = str(text), width // 2
    return html.escape(full if len(full) <= width else f"{full[:half]}…{full[-half:]}", quote=False)


def labels(texts: Iterable[object], width: int = 28) -> list[str]:
    """Distinct labels for distinct names: Plotly sums the bars of equal labels."""
    counts: dict[str, int] = {}
    out = []
    for text in texts:
        short = label(text, width)
        counts[short] = counts.get(short, 0) + 1
        out.append(short if counts[short] == 1 else f"{short} ({counts[short]})")
    return out


def bytes_text(n: float) -> str:
    """Bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def binned(n: int) -> np.ndarray:
    """The bin of each of n points, with at most MAX_POINTS bins."""
    return np.arange(n) // -(-max(n, 1) // MAX_POINTS)


def per_bin(n: int) -> str:
    """A remark on the bins; "" without binning."""
    width = -(-max(n, 1) // MAX_POINTS)
    return f"Each point is the mean of {width} steps." if width > 1 else ""


def finished(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with a recorded end; others have no duration."""
    return frame[frame["complete"]]
