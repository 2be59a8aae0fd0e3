"""Imports profiles in CSV from ONNX Runtime's QNN provider and Qualcomm's profile viewer, which use the same column names.

A level's name encodes its depth: SUB-EVENT is below ROOT, SUB-SUB-EVENT below that. The resources that a linting profile lists
for a node (HVX, HMX, DMA) are converted to QNN's mask. Below an overlap, an event without a time names the other node. Rates
(EXECUTE IPS) and events that the viewer itself does not know have no value to keep, and are passed over.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from analyzer.imports.viewer_text import is_viewer_text, rows_of_text
from analyzer.records.schema import conform
from analyzer.tables.qnn.enums import CSV_TYPES, EVENT_TYPES, RESOURCES
from tracer.recording.format import RecordingError

COLUMNS = ("Msg Timestamp", "Message", "Time", "Unit of Measurement", "Timing Source", "Event Level", "Event Identifier")
PREAMBLE_LINES = 64  # the viewer may write the source of the log before the header
GENERIC_TYPES = {name: number for number, name in EVENT_TYPES.items() if number < 1000}
UNITS = {"US": "us", "MICROSEC": "us", "CYCLES": "cycles", "BYTES": "bytes", "COUNT": "count", "OBJECT": "object"}
UNKNOWN, NOT_AN_EXECUTE = -1, -1
RATE, UNKNOWN_TYPE = re.compile(r"EXECUTE IPS|IPS", re.IGNORECASE), "Unknown event type"
PARTNER_DEPTH = 3
GRAPH_TITLE = r"Graph (?=\d+: )"
"""Depth of the names of nodes that overlap another."""
GZIP, MOST_BYTES = b"\x1f\x8b", 1 << 30
MOST_VALUE, MOST_TIME = (1 << 64) - 1, (1 << 63) - 1
LEVEL = re.compile(r"ROOT|((?:SUB-)+)EVENT")
OTHER_WORK = re.compile(r"(INIT|FINALIZE|DE-?INIT|COMPOSE|LIB|PREPARE).*|EXECUTE \(.*", re.IGNORECASE)
NAMES_OF_OTHER_WORK = ("(load binary)", "(finalize)", "(deinit)", "(compose", "(init)")  # the backend's parts of it
RESOURCE_BITS = {name: bit for bit, name in RESOURCES.items()}


@dataclass
class Imported:
    """A file's events as a table (schema `qnn_imported`), and its defects as text."""

    events: pd.DataFrame
    complaints: list[str] = field(default_factory=list)


def type_of(message: str, name: str) -> int:
    """QNN's number of an event; -1 for unknown names."""
    return CSV_TYPES.get(name.strip(), GENERIC_TYPES.get(message, UNKNOWN))


def text_of(path: Path) -> str:
    """A file's text, with or without a byte order mark, or compressed by gzip."""
    raw = path.read_bytes()
    if raw[:2] != GZIP:
        return decode_text(raw)
    try:
        with gzip.open(path) as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path} is compressed, and damaged: {error}") from None
    if len(raw) > MOST_BYTES:
        raise RecordingError(f"{path} holds more than {MOST_BYTES >> 30} GiB when decompressed")
    return decode_text(raw)


def decode_text(raw: bytes) -> str:
    """Bytes as text, with or without a byte order mark."""
    return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors="replace")


def cells_of(line: str) -> list[str]:
    """The cells of one line; empty if a quote is left open, which must not consume the following lines."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def in_columns(cells: list[str], header: list[str]) -> list[str]:
    """The cells of a line with unquoted commas merged: of its time (a list of resources) up to the unit, else of its name."""
    more, time, name = len(cells) - len(header), header.index("Time"), header.index("Event Identifier")
    if more <= 0:
        return cells
    unit = next((i for i in range(time + 1, time + more + 2) if cells[i].strip() in UNITS), time + 1)
    in_time = min(unit - time - 1, more)
    cells = [*cells[:time], ",".join(cells[time : time + in_time + 1]), *cells[time + in_time + 1 :]]
    in_name = more - in_time
    return [*cells[:name], ",".join(cells[name : name + in_name + 1]), *cells[name + in_name + 1 :]]


def value_of(text: str, name: str) -> int:
    """A 64-bit number, or the mask of a node's resources. Raises ValueError for other values."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    value = sum(RESOURCE_BITS[each] for each in names) if name == "Resources" and set(names) <= set(RESOURCE_BITS) else int(text)
    if not 0 <= value <= MOST_VALUE:
        raise ValueError(text)
    return value


def rows_of(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, cells by column) of the lines after the header. Raises RecordingError if there is no header."""
    lines = text.splitlines(keepends=True)
    for skipped, line in enumerate(lines[:PREAMBLE_LINES]):
        header = [cell.strip() for cell in cells_of(line)]
        if set(COLUMNS) <= set(header):
            for number, row in enumerate(lines[skipped + 1 :], skipped + 2):
                if row.strip():
                    yield number, dict(zip(header, in_columns(cells_of(row), header), strict=False))
            return
    if is_viewer_text(text):
        yield from rows_of_text(text)
        return
    raise RecordingError(f"{path} is not a QNN profile: no line has the columns {', '.join(COLUMNS)}")


@dataclass
class ExecutionSplitter:
    """Assigns events to executions: a root event or title of a graph that the current one already has begins the next."""

    execute: int = NOT_AN_EXECUTE
    seen: set[str] = field(default_factory=set)
    is_execute: bool = False

    def place(self, message: str, level: str, name: str) -> int:
        """The number of the execution that this event belongs to; -1 for other work."""
        if level == "ROOT":
            name = title[0] if (title := re.match(GRAPH_TITLE, name)) else name
            if OTHER_WORK.fullmatch(message) or any(part in name.lower() for part in NAMES_OF_OTHER_WORK):
                self.seen, self.is_execute = set(), False
            elif not self.is_execute or name in self.seen:
                self.seen, self.is_execute = set(), True
                self.execute += 1
            self.seen.add(name)
        return self.execute if self.is_execute else NOT_AN_EXECUTE


def read_csv(path: Path) -> Imported:
    """Read a profile or the viewer's text; damaged lines are omitted and counted. Raises RecordingError for other files."""
    text = text_of(path)
    if "\0" in text:
        raise RecordingError(f"{path} is not CSV: it is damaged, or QNN's serialized log; convert it with qnn-profile-viewer")
    complete_lines = text[: text.rfind("\n") + 1]
    rows, bad, sequence = [], [], ExecutionSplitter()
    for line, cells in rows_of(path, complete_lines):
        message, level, name = (str(cells.get(column, "")).strip() for column in COLUMNS[1:2] + COLUMNS[5:7])
        if RATE.fullmatch(message) or any(str(cell).startswith(UNKNOWN_TYPE) for cell in cells.values()):
            continue
        try:
            place = LEVEL.fullmatch(level)
            partner = place is not None and (place[1] or "").count("SUB-") >= PARTNER_DEPTH and not str(cells["Time"]).strip()
            value, stamp = 0 if partner else value_of(cells["Time"], name), int(cells["Msg Timestamp"])
            if place is None or abs(stamp) > MOST_TIME or "Event Identifier" not in cells:
                raise ValueError(level)
        except (ValueError, KeyError, TypeError):
            bad.append(line)
            continue
        unit = str(cells["Unit of Measurement"]).strip()
        of = sequence.place(message, level, name)
        depth = len(place[1] or "") // len("SUB-")
        rows.append(
            (of, type_of(message, name), message, UNITS.get(unit, unit), value, name, depth, cells["Timing Source"], stamp)
        )
    names = ["execute", "type", "message", "unit", "value", "name", "depth", "source", "timestamp"]
    frame = pd.DataFrame(rows, columns=names)
    complaints = [f"{path}: damaged lines omitted: {len(bad)}, the first is line {bad[0]}"] if bad else []
    if complete_lines != text:
        complaints.append(f"{path}: the last line is incomplete and omitted: the file is truncated")
    frame = frame.assign(file=path.name, row=np.arange(len(frame)), graph=graphs_of(frame))
    return Imported(conform("qnn_imported", frame), complaints)


def graphs_of(frame: pd.DataFrame) -> np.ndarray:
    """The graph of each event's execution: executions of one title and nodes of the same names, in order of the first; -1 for
    other work.

    A last execution that ends early belongs to the graph whose nodes begin as its own do.
    """
    titles = (frame["depth"] == 0) & frame["name"].str.match(GRAPH_TITLE)
    telling = frame[(frame["execute"] >= 0) & ((frame["depth"] == 1) | titles)]
    named = telling.sort_values("depth", kind="stable").groupby("execute")["name"].agg(tuple)
    nodes = {execute: named.get(execute, ()) for execute in np.unique(frame.loc[frame["execute"] >= 0, "execute"]).tolist()}
    numbers: dict[tuple[str, ...], int] = {}
    of_execute = {NOT_AN_EXECUTE: -1}
    for execute, names in nodes.items():
        longer = (known for known in numbers if execute == max(nodes) and known[: len(names)] == names)
        of_execute[execute] = numbers.setdefault(next(longer, names), len(numbers))
    return frame["execute"].map(of_execute).to_numpy(np.int64)


def match_executions(imported: pd.DataFrame, events: pd.DataFrame) -> np.ndarray:
    """execute_id of a recording for each imported event, matched by content; -1 if no execution has exactly the same events.

    Executions are compared as a whole: unit, value and name of every event, in order. Equal ones are taken in order.
    """
    by_signature: dict[tuple, list[int]] = {}
    for execute_id, rows in events[events["execute_id"] >= 0].groupby("execute_id"):
        by_signature.setdefault(event_signature(rows), []).append(int(execute_id))
    answer = pd.Series(-1, imported.index)
    for _, rows in imported[imported["execute"] >= 0].groupby("execute"):
        waiting = by_signature.get(event_signature(rows))
        if waiting:
            answer[rows.index] = waiting.pop(0)
    return answer.to_numpy(np.int64)


def event_signature(rows: pd.DataFrame) -> tuple:
    """The content of an execution's events, for comparison."""
    return tuple(zip(rows["unit"], rows["value"].astype(np.uint64), rows["name"].str.strip(), strict=True))
