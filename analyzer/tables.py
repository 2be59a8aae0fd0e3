"""Recording → tables: every table of analyzer/schema.py, built with column operations, kept beside the recording as Parquet."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet as parquet

from analyzer import calls, io, moe, nodes, operators, pmc, qnn, qnn_busy, sched
from analyzer.complexity import work_columns
from analyzer.reading import Source, open_recording
from analyzer.schema import TABLES, conform
from analyzer.sessions import sessions
from analyzer.steps import graphs, steps
from tracer.recording import Recording, RecordingError

TABLES_VERSION = 5
"""Raise it when the same records give other tables: cached ones are then made again."""

INPUTS = ("manifest.json", "events.bin", "details.bin")


def build(recording: Recording) -> dict[str, pd.DataFrame]:
    """Every table of the schema, in memory. Nothing is dropped: what finds no partner has -1 or stands in `unpaired`."""
    source = Source(recording)
    nodes.unfold(source)
    tokens = steps(source)
    runs = graphs(source)
    columns, threads, op_id, known = operators.build(source, tokens, runs)
    spans = source.spans("expert", ("layer", "expert"))
    enclosing = operators.finish(columns, threads, op_id, source.rows("expert_begin"), threads.complete)
    tables = {
        "tokens": conform("tokens", tokens.table(source)),
        "graphs": conform("graphs", runs.table(source, tokens)),
        "op_threads": operators.thread_table(threads, op_id),
        "tensors": known,
        "routes": moe.routes(source, tokens, known),
        "experts": moe.experts(source, tokens, spans, enclosing),
        "loads": moe.loads(source, tokens),
        **qnn.build(source, tokens, runs),
        "sessions": sessions(source),
        "calls": calls.build(source, tokens),
        **sched.build(source),
    }
    tables["operators"] = conform("operators", columns | work_columns(columns, known, tables["routes"], tables["tokens"]))
    tables["qnn_gaps"] = qnn_busy.gap_table(tables)
    tables["pmc"] = pmc.build(source, threads, op_id)
    tables |= io.build(source, tokens, threads, op_id, tables)
    tables["counters"] = moe.counters(source, tables["experts"], tables["loads"])
    tables["unpaired"] = unpaired(source)
    return {name: tables[name] for name in TABLES}


def unpaired(source: Source) -> pd.DataFrame:
    """The table `unpaired`: ends that no begin was recorded for, in order of time."""
    both = {name: np.concatenate([part[name] for part in source.unpaired]) for name in ("kind", "pid", "tid", "ts_ns")}
    order = np.argsort(both["ts_ns"], kind="stable")
    return conform("unpaired", {name: column[order] for name, column in both.items()})


def fingerprint(folder: Path) -> dict[str, Any]:
    """What cached tables depend on: the recording's files and the schema."""
    files = {}
    for name in INPUTS:
        path = folder / name
        stat = path.stat() if path.exists() else None
        files[name] = [stat.st_size, stat.st_mtime_ns] if stat else None
    schema = {name: [[c.name, c.dtype] for c in columns] for name, columns in TABLES.items()}
    return {"version": TABLES_VERSION, "files": files, "schema": schema}


def load(run_dir: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, pd.DataFrame]:
    """The tables of a recording, or those named: from RUN/tables/ where up to date, else built and, if possible, kept there."""
    folder = Path(run_dir)
    recording = open_recording(folder)
    stamp, wanted = fingerprint(folder), tuple(TABLES if names is None else names)
    cached = _read(folder / "tables", stamp, wanted)
    if cached is not None:
        return cached
    try:
        tables = build(recording)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RecordingError(f"{folder} holds records that its manifest does not describe ({error!r}); record again") from error
    with contextlib.suppress(OSError):  # a read-only recording is analysed in memory, every time
        write(tables, folder / "tables", stamp)
    return {name: tables[name] for name in wanted}


def _read(folder: Path, stamp: dict[str, Any], names: Iterable[str]) -> dict[str, pd.DataFrame] | None:
    """Cached tables that were made from exactly this recording by this schema, else None."""
    try:
        if json.loads((folder / "index.json").read_text()) != stamp:
            return None
        return {name: _read_table(name, folder / f"{name}.parquet") for name in names}
    except (OSError, ValueError, KeyError):
        return None


def _read_table(name: str, path: Path) -> pd.DataFrame:
    """One table; texts come by way of categories, which share their strings."""
    return conform(name, parquet.read_table(path).to_pandas(strings_to_categorical=True))


def write(tables: dict[str, pd.DataFrame], folder: Path, stamp: dict[str, Any] | None = None) -> None:
    """Write the tables as Parquet into `folder`, replacing what was there; the index is written last, by rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        for name, table in tables.items():
            texts = [column for column in table.columns if table[column].dtype == object]
            whole = pyarrow.Table.from_pandas(table, preserve_index=False)
            parquet.write_table(whole, fresh / f"{name}.parquet", compression="lz4", use_dictionary=texts)
        folder.mkdir(exist_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
        for path in fresh.iterdir():
            os.replace(path, folder / path.name)
        if stamp is not None:
            (fresh / "index.json").write_text(json.dumps(stamp))
            os.replace(fresh / "index.json", folder / "index.json")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
