"""A simulated run as a folder that the views read like a recording: tables of the schema, a manifest marked as simulated."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.predict.simulator import Outcome, Span
from analyzer.records.schema import TABLES, conform, empty
from analyzer.tables.store import INPUTS, fingerprint, write
from tracer.recording.format import write_manifest

ENGINE, PID = "simulation", 1
UNITS = ("cpu", "npu", "storage")
UNKNOWN: dict[str, Any] = {"object": "", "float64": np.nan, "bool": False, "uint64": 0}
"""By dtype, as analyzer/records/tables.toml says; -1 for the others."""

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
    frames |= {name: conform(name, _filled(name, frame)) for name, frame in simulated.items()}
    rows = [{"tid": tid, "pid": PID, "name": f"simulated {name}", "target": True} for name, tid in tids.items()]
    frames["threads"] = conform("threads", pd.DataFrame(rows))
    return frames


def threads(outcome: Outcome) -> dict[str, int]:
    """Thread ids by unit."""
    units = dict.fromkeys((*UNITS, *sorted({span.unit for span in outcome.spans})))
    return {unit: number for number, unit in enumerate(units, 1)}


def _filled(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with "not known" in every column that a simulation has nothing to say about."""
    absent = [column for column in TABLES[table] if column.name not in frame]
    return frame.assign(**{column.name: UNKNOWN.get(column.dtype, -1) for column in absent})


def _tokens(outcome: Outcome) -> pd.DataFrame:
    rows = pd.DataFrame(outcome.steps, columns=["phase", "n_tokens", "begin", "end"])
    position = rows["n_tokens"].cumsum() - rows["n_tokens"]
    fixed = {"maj_flt": 0, "min_flt": 0, "complete": True}
    return rows.assign(
        token_id=rows.index, seq=rows.index, position=position, engine=ENGINE, pid=PID, tid=1, **fixed, **_times(rows)
    )


def _operators(runs: list[Span], tids: dict[str, int]) -> pd.DataFrame:
    rows = pd.DataFrame([vars(span) for span in runs])
    order = rows.groupby("step").cumcount()
    name = rows["kind"] + "." + rows["layer"].astype(str)
    times = _times(rows)
    fixed = {"n_threads": 1, "wait_ns": 0, "maj_flt": 0, "min_flt": 0, "complete": True}
    columns = {"op_id": rows.index, "token_id": rows["step"], "type": rows["kind"], "name": name, "n_tokens": rows["rows"]}
    thread = {"engine": ENGINE, "pid": PID, "tid": rows["unit"].map(tids)}
    return rows.assign(**columns, **thread, order=order, busy_ns=times["duration_ns"], **fixed, **times)


def _experts(runs: list[Span], tids: dict[str, int]) -> pd.DataFrame:
    rows = pd.DataFrame([{**vars(span), "op_id": i} for i, span in enumerate(runs) if span.kind == "expert"])
    columns = {
        "run_id": rows.index,
        "token_id": rows["step"],
        "n_tokens": rows["rows"],
        "cache": np.where(rows["hit"], "hit", "miss"),
    }
    thread = {"engine": ENGINE, "pid": PID, "tid": rows["unit"].map(tids), "backend": rows["unit"].map(RECORDING_BACKEND)}
    return rows.assign(**columns, **thread, tier=0, maj_flt=0, min_flt=0, complete=True, **_times(rows))


def _loads(outcome: Outcome, tids: dict[str, int]) -> pd.DataFrame:
    loads = [vars(span) for span in outcome.spans if span.kind in ("load", "prefetch")]
    if not loads:
        return empty("loads")
    rows = pd.DataFrame(loads)
    size = outcome.loaded_bytes // len(rows)
    columns = {"load_id": rows.index, "token_id": rows["step"], "action": "load", "bytes": size, "resident_bytes": -1}
    reason = rows["kind"].map({"load": "demand", "prefetch": "prefetch"})
    thread = {"engine": ENGINE, "pid": PID, "tid": rows["unit"].map(tids)}
    return rows.assign(**columns, **thread, reason=reason, backend="", complete=True, **_times(rows))


def _times(rows: pd.DataFrame) -> dict[str, pd.Series]:
    begin, end = (rows[edge].mul(1e9).round().astype("int64") for edge in ("begin", "end"))
    return {"begin_ns": begin, "end_ns": end, "duration_ns": end - begin}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
