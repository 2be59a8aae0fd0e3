"""Profiles that others wrote as CSV: ONNX Runtime's QNN provider and Qualcomm's profile viewer name their columns alike."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from analyzer.records.schema import conform
from analyzer.tables.qnn.enums import EVENT_TYPES, NAMES
from tracer.recording.format import RecordingError

COLUMNS = ("Msg Timestamp", "Message", "Time", "Unit of Measurement", "Timing Source", "Event Level", "Event Identifier")
PREAMBLE_LINES = 64  # the viewer may say where the log came from before the header
HTP_TYPES = {name: number for number, name in NAMES["csv_names"].items()}
GENERIC_TYPES = {name: number for number, name in EVENT_TYPES.items() if number < 1000}
UNITS = {"US": "us", "MICROSEC": "us", "CYCLES": "cycles", "BYTES": "bytes", "COUNT": "count", "OBJECT": "object"}
UNKNOWN, NOT_AN_EXECUTE = -1, -1
BEGINS_OTHER_WORK = ("INIT", "FINALIZE", "DEINIT")
NAMES_OF_OTHER_WORK = ("(load binary)", "(finalize)", "(deinit)")  # the backend's own parts of it


@dataclass
class Imported:
    """A file's events as a table (schema `qnn_imported`), and what was wrong with it, in words."""

    path: Path
    events: pd.DataFrame
    complaints: list[str] = field(default_factory=list)


def type_of(message: str, name: str) -> int:
    """QNN's number of an event; -1 where its name has none."""
    return HTP_TYPES.get(name.strip(), GENERIC_TYPES.get(message, UNKNOWN))


def cells_of(line: str) -> list[str]:
    """The cells of one line; none where a quote is left open: it must not swallow the lines that follow."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def rows_of(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) behind the header. Raises RecordingError where no line is the header."""
    lines = text.splitlines(keepends=True)
    for skipped, line in enumerate(lines[:PREAMBLE_LINES]):
        header = [cell.strip() for cell in cells_of(line)]
        if set(COLUMNS) <= set(header):
            for number, row in enumerate(lines[skipped + 1 :], skipped + 2):
                if row.strip():
                    yield number, dict(zip(header, cells_of(row), strict=False))
            return
    raise RecordingError(f"{path} is no profile of QNN: no line holds the columns {', '.join(COLUMNS)}")


@dataclass
class Sequence:
    """Which execution each event belongs to: a root event that the present one has already begins the next."""

    execute: int = NOT_AN_EXECUTE
    seen: set[str] = field(default_factory=set)
    is_execute: bool = False

    def place(self, message: str, level: str, name: str) -> int:
        """The number of the execution that this event belongs to; -1 for other work."""
        if level == "ROOT":
            if message in BEGINS_OTHER_WORK or any(part in name for part in NAMES_OF_OTHER_WORK):
                self.seen, self.is_execute = set(), False
            elif not self.is_execute or name in self.seen:
                self.seen, self.is_execute = set(), True
                self.execute += 1
            self.seen.add(name)
        return self.execute if self.is_execute else NOT_AN_EXECUTE


def read_csv(path: Path) -> Imported:
    """Read a profile; a damaged line is left out and counted. Raises RecordingError where the file is none."""
    text = path.read_text(errors="replace")
    if "\0" in text:
        raise RecordingError(f"{path} is no CSV but QNN's serialized log, or damaged: make it a CSV with qnn-profile-viewer")
    complete_lines = text[: text.rfind("\n") + 1]
    rows, bad, sequence = [], [], Sequence()
    for line, cells in rows_of(path, complete_lines):
        message, level, name = (str(cells.get(column, "")).strip() for column in COLUMNS[1:2] + COLUMNS[5:7])
        try:
            value, stamp = int(cells["Time"]), int(cells["Msg Timestamp"])
            if level not in ("ROOT", "SUB-EVENT") or value < 0 or "Event Identifier" not in cells:
                raise ValueError(level)
        except (ValueError, KeyError, TypeError):
            bad.append(line)
            continue
        unit = str(cells["Unit of Measurement"]).strip()
        of = sequence.place(message, level, name)
        depth = int(level != "ROOT")
        rows.append(
            (of, type_of(message, name), message, UNITS.get(unit, unit), value, name, depth, cells["Timing Source"], stamp)
        )
    names = ["execute", "type", "message", "unit", "value", "name", "depth", "source", "timestamp"]
    frame = pd.DataFrame(rows, columns=names)
    complaints = [f"{path}: {len(bad)} damaged lines are left out, the first is line {bad[0]}"] if bad else []
    if complete_lines != text:
        complaints.append(f"{path}: the last line has no end and is left out: the file was cut off")
    return Imported(path, conform("qnn_imported", frame.assign(file=path.name, row=np.arange(len(frame)))), complaints)


def join(imported: pd.DataFrame, events: pd.DataFrame) -> np.ndarray:
    """execute_id of a recording for each imported event, by what both say; -1 where no execution said exactly the same.

    Executions are compared as a whole: unit, value and name of every event, in order. Equal ones are taken in order.
    """
    by_signature: dict[tuple, list[int]] = {}
    for execute_id, rows in events[events["execute_id"] >= 0].groupby("execute_id"):
        by_signature.setdefault(signature(rows), []).append(int(execute_id))
    answer = pd.Series(-1, imported.index)
    for _, rows in imported[imported["execute"] >= 0].groupby("execute"):
        waiting = by_signature.get(signature(rows))
        if waiting:
            answer[rows.index] = waiting.pop(0)
    return answer.to_numpy(np.int64)


def signature(rows: pd.DataFrame) -> tuple:
    """What an execution's events say."""
    return tuple(zip(rows["unit"], rows["value"].astype(np.uint64), rows["name"].str.strip(), strict=True))
