"""The table `calls`: each call of the functions that the user named, with arguments; frames distinguish recursive calls."""

import json
import math
from typing import Any

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.rows import RecordSpans, Rows, decode_texts, map_distinct
from analyzer.records.schema import Columns
from analyzer.records.spans import NONE, SpanMarks, equal_rows, latest, pair_spans, shared_codes, stack_depth
from analyzer.tables.steps import Steps

FORMATS = {f"{sign}{bits}": f"<{kind}{bits // 8}" for sign, kind in (("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)}
FORMATS |= {"ptr": "<u8", "f32": "<f4", "f64": "<f8"}
DECLARED = {"function": "name", "library": "library", "at": "at"}
"""Column → key of the manifest's functions."""


def build_calls(source: Source, steps: Steps) -> Columns:
    """The columns of `calls`: every call, in order of begin."""
    functions = {int(row["probe"]): row for row in source.manifest.get("functions") or []}
    begin, end = source.rows("call_begin"), source.rows("call_end")
    if not len(begin) + len(end):
        return {}
    only_end = of_way(functions, end, "return")
    closing = end.where(~only_end)
    spans = match_calls(source, begin, closing, of_way(functions, begin, "entry"))
    written = ArgumentDecoder(source, functions)
    entry, leaving = written.of(begin, at_return=False), written.of(closing, at_return=True)
    args = [{**a, **(leaving[e] if e >= 0 else {})} for a, e in zip(entry, spans.end.tolist(), strict=True)]
    points = end.where(only_end)
    records = [begin, points]
    instants = RecordSpans(np.full(len(points), NONE), points["ts"], points["ts"], np.ones(len(points), bool))
    columns = {name: np.concatenate([part.columns()[name] for part in (spans, instants)]) for name in spans.columns()}
    columns |= {name: np.concatenate([rows[name] for rows in records]) for name in ("pid", "tid", "probe")}
    columns["token_id"] = np.concatenate([steps.of(rows) for rows in records])
    columns["args"] = as_json(args + written.of(points, at_return=True))
    columns["depth"] = call_depths(columns["tid"], columns["begin_ns"], columns["end_ns"])
    columns |= {column: declared_texts(functions, columns["probe"], key) for column, key in DECLARED.items()}
    order = np.argsort(columns["begin_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    return {"call_id": np.arange(len(order)), **columns}


def declared_texts(functions: dict[int, dict[str, Any]], probe: np.ndarray, key: str) -> np.ndarray:
    """A text of each probe's function as the manifest declares it; "" for none."""
    return map_distinct(probe, lambda number: str(functions.get(number, {}).get(key, "")))


def of_way(functions: dict[int, dict[str, Any]], rows: Rows, way: str) -> np.ndarray:
    """Which records belong to functions probed only at `way`."""
    return np.isin(rows["probe"], [number for number, row in functions.items() if row.get("at") == way])


def match_calls(source: Source, begin: Rows, end: Rows, entry_only: np.ndarray) -> RecordSpans:
    """Pair begins with ends of the same function, thread and frame; a call probed only at its entry is an instant."""
    threads = shared_codes(*((rows["tid"], rows["probe"]) for rows in (begin, end)))
    marks = [
        SpanMarks(key, rows["ts"], rows.position, rows["frame"], np.ones(len(rows), bool))
        for rows, key in zip((begin, end), threads, strict=True)
    ]
    pairs = pair_spans(*marks)
    source.leave_unpaired("call", end.where(pairs.unpaired))
    spans = source.close(begin, pairs.end, end["ts"], "")
    end_ns = np.where(entry_only, spans.begin_ns, spans.end_ns)
    return RecordSpans(spans.end, spans.begin_ns, end_ns, spans.complete | entry_only)


def call_depths(tid: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The number of calls open on the thread when each began."""
    lasting = np.flatnonzero(end > begin)
    answer = np.zeros(len(tid), np.int64)
    ts, thread = np.concatenate((begin[lasting], end[lasting])), np.concatenate((tid[lasting], tid[lasting]))
    step = np.repeat([1, -1], len(lasting))
    outer = np.concatenate((-end[lasting], -begin[lasting]))
    order = np.lexsort((outer, step, ts, thread))
    if len(order):
        depth, _ = stack_depth(thread[order], step[order])
        opening = order < len(lasting)
        answer[lasting[order[opening]]] = depth[opening] - 1
        instant = np.flatnonzero(end <= begin)
        inside = latest(thread[order], ts[order], tid[instant], begin[instant])
        answer[instant] = np.where(inside >= 0, depth[inside], 0)
    return answer


class ArgumentDecoder:
    """Decodes argument values of records by the types that the manifest declares."""

    def __init__(self, source: Source, functions: dict[int, dict[str, Any]]):
        self.functions = functions
        self.more = source.rows("call_text")

    def of(self, rows: Rows, at_return: bool) -> list[dict[str, Any]]:
        """Name → value for each record; None if memory could not be read or the detail record was lost."""
        answer: list[dict[str, Any]] = [{} for _ in range(len(rows))]
        for number in np.unique(rows["probe"]).tolist():
            of_function = np.flatnonzero(rows["probe"] == number)
            declared = self.functions.get(number, {}).get("return" if at_return else "entry") or {}
            for name, values in self._columns(rows.where(of_function), declared, at_return):
                for i, value in zip(of_function.tolist(), values, strict=True):
                    answer[i][name] = value
        return answer

    def _columns(self, rows: Rows, declared: dict[str, Any], at_return: bool) -> list[tuple[str, list[Any]]]:
        parts: dict[int, tuple[Rows, np.ndarray]] = {0: (rows, np.arange(len(rows)))}
        width = rows.records["values"].shape[1]

        def part(number: int) -> tuple[Rows, np.ndarray]:
            if number not in parts:
                parts[number] = self._part(rows, number, at_return)
            return parts[number]

        columns: list[tuple[str, list[Any]]] = []
        for i, (name, kind) in enumerate(declared.get("numbers") or []):
            carriers, row_of = part(i // width)
            columns.append((name, number_column(carriers, row_of, i % width, kind)))
        for i, name in enumerate(declared.get("texts") or []):
            carriers, row_of = part(i + 1)
            unread = carriers["unread"] >> width & 1
            values = [None if failed else text for text, failed in zip(decode_texts(carriers["text"]), unread, strict=True)] + [
                None
            ]
            columns.append((name, [values[j] for j in row_of.tolist()]))
        return columns

    def _part(self, rows: Rows, number: int, at_return: bool) -> tuple[Rows, np.ndarray]:
        """(detail records of one part, the row for each call, -1 if lost), matched by function, thread and time."""
        more = self.more
        more = more.where((more["part"] == number) & (more["at_return"] == at_return) & np.isin(more["probe"], rows["probe"]))
        return more, equal_rows(*([part[field] for field in ("probe", "tid", "ts")] for part in (more, rows)))


def number_column(rows: Rows, row_of: np.ndarray, column: int, kind: str) -> list[Any]:
    """One column of values, converted to their type; addresses as hexadecimal text."""
    raw = np.ascontiguousarray(rows.records["values"][:, column].astype("<u8"))
    dtype = np.dtype(FORMATS.get(kind, "<u8"))
    typed = raw.view(dtype)[:: 8 // dtype.itemsize].tolist()
    if kind == "ptr":
        typed = [hex(value) for value in typed]
    elif kind in ("f32", "f64"):
        typed = [value if math.isfinite(value) else str(value) for value in typed]
    failed = (rows["unread"] >> column & 1).tolist()
    values = [None if bad else value for value, bad in zip(typed, failed, strict=True)] + [None]
    return [values[i] for i in row_of.tolist()]


def as_json(rows: list[dict[str, Any]]) -> np.ndarray:
    """Each row as JSON text; "" for functions without arguments."""
    return np.array([*(json.dumps(row) if row else "" for row in rows), ""], object)[:-1]
