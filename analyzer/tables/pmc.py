"""Performance counters: the count of each event within an operator, for each thread.

An operator made from a share has one reading, at the end of the thread's share: it counts from the thread's previous reading,
including the wait for other threads in between.
"""

import numpy as np
import pyarrow

from analyzer.records.manifest import listed_items, section
from analyzer.records.reading import Source
from analyzer.records.rows import Rows
from analyzer.records.schema import arrow_table, text_array
from analyzer.records.spans import NONE, equal_rows, first_rows, next_in_group
from analyzer.tables.operators import OperatorThreads

UNREAD = np.uint64(2**64 - 1)


def counter_names(source: Source) -> list[str]:
    """Names of the counted events, in the order of a reading's values."""
    return [str(row.get("name", "")) for row in listed_items(section(source.manifest, "pmc").get("events"), dict)]


def readings_before(rows: Rows, last: np.ndarray) -> np.ndarray:
    """The thread's previous reading before each reading; -1 for none."""
    before = np.full(len(rows) + 1, NONE, np.int64)
    after = next_in_group(rows["tid"], rows["ts"])
    before[after[after >= 0]] = np.flatnonzero(after >= 0)
    before[-1] = NONE
    return before[last]


class CounterReadings:
    """The readings of consecutive time ranges, each preceded by every thread's last reading before it."""

    def __init__(self) -> None:
        self.last: Rows | None = None

    def of(self, source: Source) -> Rows:
        """The readings of the next time range, preceded by each thread's last reading before it."""
        rows = source.rows("pmc")
        if self.last is not None and len(self.last):
            slots, position = (np.concatenate((getattr(self.last, name), getattr(rows, name))) for name in ("slots", "position"))
            rows = Rows(slots, rows.dtype, position)
        _, from_back = first_rows(rows["tid"][::-1])
        self.last = rows.where(np.sort(len(rows) - 1 - from_back))
        return rows


def build_pmc(source: Source, rows: Rows, operators: OperatorThreads, op_id: np.ndarray) -> pyarrow.Table:
    """The table `pmc`: counts from an operator's begin on a thread to the begin of the thread's wait, or to its end.

    `rows` are the readings of the time range.
    """
    names = counter_names(source)
    if not source.count().get("pmc") or not names or "values" not in (rows.dtype.names or ()):
        return arrow_table("pmc", {})
    # A reading has exactly the time of the operator record that precedes it.
    first, last = (equal_rows((rows["tid"], rows["ts"]), (operators.rows["tid"], ts)) for ts in (operators.begin, operators.wait))
    first = np.where(operators.rows["done_ns"] > 0, readings_before(rows, last), first)
    values = rows.records["values"].astype(np.uint64)[:, : len(names)]
    values = np.concatenate((values, np.full((1, len(names)), UNREAD)))
    before, after = values[first], values[last]
    readable = (first >= 0)[:, None] & (last >= 0)[:, None] & (before != UNREAD) & (after != UNREAD)
    delta = np.where(readable, (after - before).astype(np.float64), np.nan)
    n = len(names)
    return arrow_table(
        "pmc",
        {
            "op_id": np.repeat(op_id, n),
            "tid": np.repeat(operators.rows["tid"], n),
            "event": text_array(np.tile(np.arange(n), len(op_id)), names),
            "value": delta.reshape(-1),
        },
    )
