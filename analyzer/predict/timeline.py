"""A simulated run as a folder that the views read like a recording: tables of the schema, a manifest marked as simulated."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd

from analyzer.imports import run_folder
from analyzer.predict.simulator import Outcome, SimSpan

ENGINE, PID = "simulation", 1
UNITS = ("cpu", "npu", "storage")
RECORDING_BACKEND = {"cpu": "cpu", "npu": "htp"}


def write_run(folder: Path, outcome: Outcome, source: str) -> None:
    """Write RUN, for `moescope write RUN`. `source`: the source of the costs."""
    machine = {"arch": "simulated", "kernel": "-", "os": "-", "cpu_model": source, "cpus": 1, "memory_bytes": 0}
    command = ["simulated", json.dumps(outcome.summary())]
    run_folder.write_run(
        folder, run_folder.Run(ENGINE, outcome_tables(outcome)), f"moescope simulation: {source}", command, machine=machine
    )


def outcome_tables(outcome: Outcome) -> dict[str, pd.DataFrame]:
    """The tables that a simulation fills: tokens, operators, experts, loads and threads."""
    spans = outcome.spans
    runs = [span for span in spans if span.kind not in ("load", "prefetch")]
    tids = unit_threads(outcome)
    simulated = {"tokens": _token_rows(outcome), "operators": _operator_rows(runs, tids), "experts": _expert_rows(runs, tids)}
    simulated["loads"] = _load_rows(outcome, tids)
    named = [{"tid": tid, "pid": PID, "name": f"simulated {name}", "target": True} for name, tid in tids.items()]
    return {**simulated, "threads": pd.DataFrame(named)}


def unit_threads(outcome: Outcome) -> dict[str, int]:
    """Thread ids by unit."""
    units = dict.fromkeys((*UNITS, *sorted({span.unit for span in outcome.spans})))
    return {unit: number for number, unit in enumerate(units, 1)}


def _token_rows(outcome: Outcome) -> pd.DataFrame:
    rows = pd.DataFrame(outcome.steps, columns=["phase", "n_tokens", "begin", "end"])
    position = rows["n_tokens"].cumsum() - rows["n_tokens"]
    thread = {"engine": ENGINE, "pid": PID, "tid": 1, "maj_flt": 0, "min_flt": 0}
    return rows.assign(token_id=rows.index, seq=rows.index, position=position, context=-1, **thread, **_times(rows))


def _operator_rows(runs: list[SimSpan], tids: dict[str, int]) -> pd.DataFrame:
    rows = _span_columns(runs, tids)
    name, order = rows["kind"] + "." + rows["layer"].astype(str), rows.groupby("step").cumcount()
    columns = {"op_id": rows.index, "type": rows["kind"], "name": name, "n_tokens": rows["rows"], "order": order}
    return rows.assign(**columns, busy_ns=rows["duration_ns"], n_threads=1, wait_ns=0, maj_flt=0, min_flt=0)


def _expert_rows(runs: list[SimSpan], tids: dict[str, int]) -> pd.DataFrame:
    number = [i for i, span in enumerate(runs) if span.kind == "expert"]
    rows = _span_columns([runs[i] for i in number], tids).assign(op_id=number)
    columns = {"run_id": rows.index, "n_tokens": rows["rows"], "cache": np.where(rows["hit"].astype(bool), "hit", "miss")}
    return rows.assign(**columns, backend=rows["unit"].map(RECORDING_BACKEND), tier=0, maj_flt=0, min_flt=0)


def _load_rows(outcome: Outcome, tids: dict[str, int]) -> pd.DataFrame:
    rows = _span_columns([span for span in outcome.spans if span.kind in ("load", "prefetch")], tids)
    reason = rows["kind"].map({"load": "demand", "prefetch": "prefetch"})
    size = outcome.loaded_bytes // max(len(rows), 1)
    return rows.assign(load_id=rows.index, action="load", reason=reason, bytes=size)


def _span_columns(spans: list[SimSpan], tids: dict[str, int]) -> pd.DataFrame:
    """Spans with the columns that all tables of spans share."""
    rows = pd.DataFrame([vars(span) for span in spans], columns=[field.name for field in fields(SimSpan)])
    return rows.assign(engine=ENGINE, pid=PID, tid=rows["unit"].map(tids), token_id=rows["step"], complete=True, **_times(rows))


def _times(rows: pd.DataFrame) -> dict[str, pd.Series]:
    begin, end = (rows[edge].mul(1e9).round().astype("int64") for edge in ("begin", "end"))
    return {"begin_ns": begin, "end_ns": end, "duration_ns": end - begin}
