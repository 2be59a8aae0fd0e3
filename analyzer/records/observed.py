"""When each level was recorded: the overhead guard switches levels off and on, and the tracer drops the records of fast steps.

A span with an inferred end must not extend across a time in which its level was not recorded.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from analyzer.records.manifest import listed_items
from analyzer.records.rows import Rows
from analyzer.records.spans import EVER, pair_spans

LEVELS = {"token": "token", "graph": "graph", "op": "operator", "expert": "expert", "load": "expert"}
LEVELS |= {"qnn_execute": "qnn", "qnn_call": "qnn", "qnn_stage": "qnn"}
SPAN = ("begin_ns", "end_ns")
Gaps = tuple[np.ndarray, np.ndarray]


def known_changes(changes: Any) -> list[dict[str, Any]]:
    """The manifest's `level_changes`; damaged rows omitted."""
    return [row for row in listed_items(changes, dict) if isinstance(row.get("ts_ns"), int)]


def level_gaps(changes: Any, level: str) -> Gaps:
    """(begins, ends) of the times in which a level was switched off, from the manifest's `level_changes`."""
    begins: list[int] = []
    ends: list[int] = []
    for row in (row for row in known_changes(changes) if row.get("level") == level):
        if row.get("on") and len(ends) < len(begins):
            ends.append(int(row.get("done_ns") or row["ts_ns"]))
        elif not row.get("on") and len(ends) == len(begins):
            begins.append(int(row["ts_ns"]))
    return np.array(begins, np.int64), np.array(ends + [EVER] * (len(begins) - len(ends)), np.int64)


def disturbed_spans(rows: Any, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Which spans overlap one of the manifest's `disturbances`: times in which the tracer placed or learnt probes."""
    known = [(row["begin_ns"], row["end_ns"]) for row in listed_items(rows, dict) if {int} == {type(row.get(n)) for n in SPAN}]
    since, until = np.array(sorted(known), np.int64).reshape(-1, 2).T
    until = np.maximum.accumulate(until)
    first = np.searchsorted(until, begin, "right")
    return np.append(since, EVER)[first] < end


def token_gaps(begin: Rows, end: Rows, last_ns: int) -> Gaps:
    """(begins, ends) of the times outside the steps of these records; a step without an end lasts until `last_ns`."""
    matched = pair_spans(begin.marks(), end.marks()).end
    until = np.where(matched >= 0, end["ts"][matched], last_ns) if len(end) else np.full(len(begin), last_ns)
    order = np.argsort(begin["ts"], kind="stable")
    opened, closed = begin["ts"][order], np.maximum.accumulate(until[order])
    first = np.append(True, opened[1:] > closed[:-1])[: len(opened)]
    last = np.append(first[1:], True)[: len(opened)]
    return np.append(0, closed[last]), np.append(opened[first], EVER)


def clip_at_gaps(begin: np.ndarray, end: np.ndarray, gaps: Iterable[Gaps]) -> np.ndarray:
    """The ends of spans, limited to the start of the first gap after each begin."""
    for starts, ends in gaps:
        if len(starts):
            first = np.append(starts, EVER)[np.searchsorted(ends, begin, "right")]
            end = np.minimum(end, np.maximum(begin, first))
    return end
