"""Writes imported or simulated tables as a folder that verbs and views read like a recording."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.records.schema import TABLES, empty_table, fill_missing
from analyzer.records.stamps import INPUTS
from analyzer.tables.store import UNRECORDED, input_fingerprint, write_tables
from tracer.recording.format import write_manifest


@dataclass
class Run:
    """The contents of a file: known columns of tables by name, and remarks on what it lacks."""

    engine: str
    tables: dict[str, pd.DataFrame]
    warnings: list[str] = field(default_factory=list)


def write_run(folder: Path, run: Run, program: str, command: list[str], **more: Any) -> None:
    """Write the folder. `more` replaces keys of the manifest; unknown values are empty there and in the tables."""
    tables = {name: fill_missing(name, frame) for name, frame in run.tables.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(
        folder, json.loads(json.dumps(untraced_manifest(run, tables) | {"program": program, "command": command} | more))
    )
    for name in INPUTS[1:]:
        (folder / name).write_bytes(b"")
    write_tables({name: empty_table(name) for name in TABLES} | tables, folder / "tables", input_fingerprint(folder))


def untraced_manifest(run: Run, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The manifest of an untraced run: no probes, no losses, no cost, and an unknown machine."""
    spans = [frame for frame in tables.values() if len(frame) and "end_ns" in frame]
    last, first = max((f["end_ns"].max() for f in spans), default=0), min((f["begin_ns"].min() for f in spans), default=0)
    levels = {"token": "tokens", "graph": "graphs", "operator": "operators", "expert": "experts"}
    return {
        "schema_version": 1,
        "state": "complete",
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "duration_ns": int(last - first),
        "machine": {},
        "loader": UNRECORDED,
        "levels": [level for level, table in levels.items() if len(tables.get(table, ()))],
        "engines": {run.engine: {"id": 1, "operators": [], "graphs": [], "libraries": []}},
        "threads": tables["threads"].to_dict("records") if "threads" in tables else [],
        "warnings": run.warnings,
        "layouts": {},
        "records": {},
        "lost": {},
        "cost": {},
    }
