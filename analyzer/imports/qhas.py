"""Reads the profile viewer's HTP analysis summary of an optrace (QHAS): utilization of each unit, and bytes moved.

The parts read are `htp_overall_summary` with its `htp_resources`, a row per unit and thread, and `qnn_op_instances_nodes`.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.imports.csv import MOST_VALUE, UNKNOWN, Imported
from analyzer.records.schema import conform
from tracer.recording.format import RecordingError

OVERALL = {"time_us": "us", "timeline_cycles": "cycles"}
BYTES = ("dram", "vtcm", "peak_vtcm_alloc")
"""Parts of the names of quantities that are counted in bytes."""


def is_summary(document: Any) -> bool:
    """Whether a JSON document is such a summary."""
    return isinstance(document, dict) and isinstance(document.get("data"), dict) and "htp_overall_summary" in document["data"]


def read_qhas(path: Path, document: dict[str, Any]) -> tuple[Imported, dict[str, Any]]:
    """(figures as events, figures like those of `utilization`: units, bytes, nodes). Raises RecordingError without figures."""
    (overall, *_) = [*rows_under(document["data"], "htp_overall_summary"), {}]
    units = rows_under(overall, "htp_resources")
    events = [(name, unit_of(name), value) for name, value in plausible_numbers(overall).items()]
    answer: dict[str, Any] = {"window_cycles": plausible_numbers(overall).get("timeline_cycles", 0), "units": {}, "nodes": {}}
    for each in units:
        label, of_unit = f"{each.get('type', 'other')} {each.get('tid', '')}".strip(), plausible_numbers(each)
        share = each.get("utilization")
        used = of_unit.get("cycles_used", 0)
        answer["units"][label] = {"cycles": used, "share": share / 100 if isinstance(share, int | float) else float("nan")}
        events += [(f"{label} {name}", unit_of(name), value) for name, value in of_unit.items()]
    for node in rows_under(document["data"], "qnn_op_instances_nodes"):
        name, cycles = str(node.get("qnn_op", "")), plausible_numbers(node).get("cycles", 0)
        answer["nodes"][name] = answer["nodes"].get(name, 0) + cycles
        events.append((name, "cycles", cycles))
    if not events:
        raise RecordingError(f"{path} is a summary without figures: write it again with qnn-profile-viewer")
    answer["bytes"] = {name: value for name, unit, value in events if unit == "bytes"}
    frame = pd.DataFrame(events, columns=["name", "unit", "value"])
    frame = frame.assign(
        file=path.name,
        row=range(len(frame)),
        execute=0,
        graph=0,
        type=UNKNOWN,
        message="QHAS",
        depth=0,
        source="BACKEND",
        timestamp=0,
    )
    return Imported(conform("qnn_imported", frame)), answer


def rows_under(holder: Any, key: str) -> list[dict[str, Any]]:
    """The objects of the list under `key`, which has the form {"data": [...]}."""
    table = holder.get(key)
    data = table.get("data") if isinstance(table, dict) else table
    return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []


def plausible_numbers(row: dict[str, Any]) -> dict[str, int]:
    """Cycles, times and bytes of a row that are integers within QNN's 64 bits."""
    wanted = {name: value for name, value in row.items() if unit_of(name) and isinstance(value, int | float)}
    return {name: int(value) for name, value in wanted.items() if 0 <= value <= MOST_VALUE}


def unit_of(name: str) -> str:
    """us, cycles or bytes, "" for any other unit."""
    return OVERALL.get(name) or ("bytes" if any(part in name for part in BYTES) else "cycles" if "cycles" in name else "")
