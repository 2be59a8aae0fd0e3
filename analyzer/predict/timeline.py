"""A simulated run as a folder that the views read like a recording: tables of the schema, a manifest marked as simulated."""

import json
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.predict.simulator import Outcome, Span
from analyzer.records.schema import TABLES, empty, filled
from analyzer.tables.store import INPUTS, fingerprint, write
from tracer.recording.format import write_manifest

ENGINE, PID = "simulation", 1
UNITS = ("cpu", "npu", "storage")
RECORDING_BACKEND = {"cpu": "cpu", "npu": "htp"}


def write_run(folder: Path, outcome: Outcome, source: str) -> None:
    """Write RUN: `python -m views trace RUN` then draws it. `source`: where the costs come from."""
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, manifest(outcome, source))
    for name in INPUTS[1:]:
        (folder / name).write_bytes(b"")
    write(tables(outcome), folder / "tables", fingerprint(folder))


def manifest(outcome: Outcome, source: str) -> dict[str, Any]:
    """What a recording would say of itself; the machine is not this one, and nothing was lost or probed."""
    engine = {"id": 1, "operators": [], "graphs": [], "libraries": []}
    return {
        "schema_version": 1,
        "program": f"moescope simulation: {source}",
        "state": "complete",
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "duration_ns": _ns(max((end for _, _, _, end in outcome.steps), default=0.0)),
        "machine": {"arch": "simulated", "kernel": "-", "os": "-", "cpu_model": source, "cpus": 1, "memory_bytes": 0},
        "command": ["simulated", json.dumps(outcome.summary())],
        "target": {"pid": PID, "uid": 0, "exit_code": 0},
        "loader": "none",
        "levels": ["token", "operator", "expert"],
        "engines": {ENGINE: engine},
        "qnn": None,
        "probes": [],
        "clocks": [],
        "threads": [{"tid": tid, "pid": PID, "name": f"simulated {name}"} for name, tid in threads(outcome).items()],
        "records": {},
        "layouts": {},
        "lost": {},
        "cost": {"trap_ns": 0, "bpf_ns": 0, "tracer_cpu_ns": 0, "target_cpu_ns": 0},
    }


def tables(outcome: Outcome) -> dict[str, pd.DataFrame]:
    """Every table of the schema: tokens, operators, experts, loads and threads from the simulation, the others empty."""
    spans = outcome.spans
    runs = [span for span in spans if span.kind not in ("load", "prefetch")]
    frames = {name: empty(name) for name in TABLES}
    tids = threads(outcome)
    simulated = {"tokens": _tokens(outcome), "operators": _operators(runs, tids), "experts": _experts(runs, tids)}
    simulated["loads"] = _loads(outcome, tids)
    named = [{"tid": tid, "pid": PID, "name": f"simulated {name}", "target": True} for name, tid in tids.items()]
    simulated["threads"] = pd.DataFrame(named)
    return frames | {name: filled(name, frame) for name, frame in simulated.items()}


def threads(outcome: Outcome) -> dict[str, int]:
    """Thread ids by unit."""
    units = dict.fromkeys((*UNITS, *sorted({span.unit for span in outcome.spans})))
    return {unit: number for number, unit in enumerate(units, 1)}


def _tokens(outcome: Outcome) -> pd.DataFrame:
    rows = pd.DataFrame(outcome.steps, columns=["phase", "n_tokens", "begin", "end"])
    position = rows["n_tokens"].cumsum() - rows["n_tokens"]
    thread = {"engine": ENGINE, "pid": PID, "tid": 1, "maj_flt": 0, "min_flt": 0}
    return rows.assign(token_id=rows.index, seq=rows.index, position=position, context=-1, **thread, **_times(rows))


def _operators(runs: list[Span], tids: dict[str, int]) -> pd.DataFrame:
    rows = _spans(runs, tids)
    name, order = rows["kind"] + "." + rows["layer"].astype(str), rows.groupby("step").cumcount()
    columns = {"op_id": rows.index, "type": rows["kind"], "name": name, "n_tokens": rows["rows"], "order": order}
    return rows.assign(**columns, busy_ns=rows["duration_ns"], n_threads=1, wait_ns=0, maj_flt=0, min_flt=0)


def _experts(runs: list[Span], tids: dict[str, int]) -> pd.DataFrame:
    number = [i for i, span in enumerate(runs) if span.kind == "expert"]
    rows = _spans([runs[i] for i in number], tids).assign(op_id=number)
    columns = {"run_id": rows.index, "n_tokens": rows["rows"], "cache": np.where(rows["hit"].astype(bool), "hit", "miss")}
    return rows.assign(**columns, backend=rows["unit"].map(RECORDING_BACKEND), tier=0, maj_flt=0, min_flt=0)


def _loads(outcome: Outcome, tids: dict[str, int]) -> pd.DataFrame:
    rows = _spans([span for span in outcome.spans if span.kind in ("load", "prefetch")], tids)
    reason = rows["kind"].map({"load": "demand", "prefetch": "prefetch"})
    size = outcome.loaded_bytes // max(len(rows), 1)
    return rows.assign(load_id=rows.index, action="load", reason=reason, bytes=size)


def _spans(spans: list[Span], tids: dict[str, int]) -> pd.DataFrame:
    """Spans with what all tables of spans have."""
    rows = pd.DataFrame([vars(span) for span in spans], columns=[field.name for field in fields(Span)])
    return rows.assign(engine=ENGINE, pid=PID, tid=rows["unit"].map(tids), token_id=rows["step"], complete=True, **_times(rows))


def _times(rows: pd.DataFrame) -> dict[str, pd.Series]:
    begin, end = (rows[edge].mul(1e9).round().astype("int64") for edge in ("begin", "end"))
    return {"begin_ns": begin, "end_ns": end, "duration_ns": end - begin}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
