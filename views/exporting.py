"""Exports a recording to other formats: Chrome's JSON trace, CSV, Parquet, graphs, routes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from analyzer.questions.profdag import middle_step
from analyzer.records.schema import Tables
from moescope.plain import for_output
from views.errors import ViewError
from views.timeline import npu_slices
from views.timeline.marks import counter_tracks
from views.timeline.perfetto import extent
from views.timeline.slices import Slices, close_open, on_program
from views.timeline.threads import thread_pids

FORMULA = r"^\s*[=+\-@\t\r]"
NPU_TID = 1 << 30
"""Chrome's format knows threads only: the NPU's tracks are threads with numbers from here on."""


def slice_args(slices: Slices) -> list[dict[str, Any]]:
    """The arguments of each slice."""
    rows: list[dict[str, Any]] = [{} for _ in range(len(slices))]
    for name, column in slices.args.items():
        for row, value in zip(rows, column.tolist(), strict=True):
            if value not in ("", -1):
                row[name] = value
    return rows


def slice_events(slices: Slices, pids: dict[int, int], tid: int | None = None) -> Iterator[dict[str, Any]]:
    """Complete events ("X"), or instants ("i"); µs on CLOCK_MONOTONIC."""
    slices = slices.alone()
    tids, begins, ends = slices.tid.tolist(), slices.begin.tolist(), slices.end.tolist()
    names, kind = slices.name.tolist(), "i" if slices.instant else "X"
    for i, args in enumerate(slice_args(slices)):
        place = {"pid": pids.get(tids[i], 0), "tid": tids[i] if tid is None else tid}
        event = {"ph": kind, "name": names[i], "cat": slices.category, "ts": begins[i] / 1e3, **place}
        yield event | ({"s": "t"} if slices.instant else {"dur": max(ends[i] - begins[i], 0) / 1e3}) | {"args": args}


def chrome_events(manifest: dict[str, Any], tables: Tables) -> Iterator[dict[str, Any]]:
    """All events of the timeline that Chrome's format supports: names, slices, the NPU's tracks, counters."""
    pids, end = thread_pids(manifest, tables), extent(tables)[1]
    target = (manifest.get("target") or {}).get("pid") or next(iter(pids.values()), 0)
    for tid, name in zip(tables["threads"]["tid"].tolist(), tables["threads"]["name"].tolist(), strict=True):
        if tid in pids:
            yield {"ph": "M", "name": "thread_name", "pid": pids[tid], "tid": tid, "args": {"name": name}}
    for slices in on_program(tables):
        yield from slice_events(close_open(slices, end), pids)
    for number, (track, slices) in enumerate(npu_slices.npu_tracks(manifest, tables)):
        named = {"ph": "M", "name": "thread_name", "pid": target, "tid": NPU_TID + number, "args": {"name": track}}
        yield named
        yield from slice_events(close_open(slices, end), dict.fromkeys(slices.tid.tolist(), target), NPU_TID + number)
    for name, ts, values in counter_tracks(tables):
        for time_ns, value in zip(ts.tolist(), values.tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": target, "ts": time_ns / 1e3, "args": {"value": value}}


def write_events(out: TextIO, events: Iterator[dict[str, Any]]) -> int:
    """Write the events as one JSON object; returns their number."""
    encode, n = json.JSONEncoder(separators=(",", ":")).encode, 0
    out.write('{"displayTimeUnit":"ns","traceEvents":[')
    for event in events:
        out.write(("," if n else "") + "\n" + encode(event))
        n += 1
    out.write("\n]}\n")
    return n


def chrome_json(run_dir: Path, out: Path | None) -> dict[str, Any]:
    """Write the timeline in Chrome's JSON format."""
    from analyzer.tables.store import load_tables
    from tracer.recording.format import Recording

    path = out or run_dir / "trace.json"
    with path.open("w") as file:
        events = write_events(file, chrome_events(Recording(run_dir).manifest, load_tables(run_dir)))
    return {"path": str(path), "bytes": path.stat().st_size, "events": events}


def table_files(run_dir: Path, out: Path | None, form: str) -> dict[str, Any]:
    """Write every table as a file, csv or parquet."""
    from pyarrow import csv, parquet

    from analyzer.tables.store import load_tables

    folder = out or run_dir / form
    folder.mkdir(parents=True, exist_ok=True)
    size = rows = 0
    tables = load_tables(run_dir)
    for name in tables:
        path, table = folder / f"{name}.{form}", tables.arrow(name)
        if form == "csv":
            csv.write_csv(flat_table(table), path)
        else:
            parquet.write_table(table, path, compression="zstd")
        size, rows = size + path.stat().st_size, rows + table.num_rows
    return {"path": str(folder), "bytes": size, "rows": rows}


def flat_table(table: Any) -> Any:
    """The table for CSV: lists as JSON texts, null columns as text, and no text that is a formula."""
    import pyarrow

    for i, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, no_formula(table.column(i).cast(field.type.value_type)))
        elif pyarrow.types.is_nested(field.type) or pyarrow.types.is_null(field.type):
            texts = [json.dumps(value) for value in table.column(i).to_pylist()]
            table = table.set_column(i, field.name, pyarrow.array(texts, pyarrow.string()))
        elif pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type):
            table = table.set_column(i, field.name, no_formula(table.column(i)))
    return table


def no_formula(texts: Any) -> Any:
    """Texts with an apostrophe before those that a spreadsheet would evaluate, since names come from the traced program."""
    from pyarrow import compute

    formula = compute.match_substring_regex(texts, FORMULA)
    return compute.if_else(formula, compute.binary_join_element_wise("'", texts, ""), texts)


def export_graph(run_dir: Path, out: Path | None, form: str, token_id: int | None, mean: bool, how: str) -> dict[str, Any] | None:
    """Write one step's ProfDAG, its layers merged (`how` is fold) or without views (resolve); None on standard output."""
    from analyzer.questions import structure
    from analyzer.questions.profdag import as_text, build_profdag, decode_steps
    from analyzer.tables.store import load_tables

    tables = load_tables(run_dir)
    chosen = middle_step(tables) if token_id is None else token_id
    built = build_profdag(tables, chosen, decode_steps(tables) if mean else None)
    if how:
        built = structure.fold_layers(built) if how == "fold" else structure.without_views(built)
    path, text = out or run_dir / f"profdag.{form}", as_text(built, form)
    if str(path) == "-":
        print(for_output(text))
        return None
    path.write_text(text)
    counts = {"nodes": built.number_of_nodes(), "edges": built.number_of_edges(), "averaged": built.graph["tokens_used"]}
    return {"path": str(path), "bytes": path.stat().st_size, "token": chosen, **counts}


def export_routes(run_dir: Path, out: Path | None, form: str) -> dict[str, Any]:
    """Write the routes of a recording, or of a file of routes, in another tool's format."""
    from analyzer.imports.routes import FORMATS, tables_of, write_routes

    if run_dir.is_file() and out is None:
        raise ViewError(f"{run_dir} is a file: give --out")
    path, tables = out or run_dir / f"routes-{form}.{'csv' if FORMATS[form].columns else 'json'}", tables_of(run_dir)
    write_routes(tables, path, form)
    return {"path": str(path), "bytes": path.stat().st_size, "steps": len(tables["tokens"])}


def export_energy(run_dir: Path, out: Path | None) -> dict[str, Any]:
    """Write the energy of a run in the fields proposed for MLPerf, and TensorRT-LLM's."""
    from analyzer.questions.energy_export import exported_energy
    from analyzer.tables.store import load_tables
    from moescope.answers import json_text
    from tracer.recording.format import Recording

    rails = exported_energy(load_tables(run_dir), Recording(run_dir).manifest)
    if not rails:
        raise ViewError(f"{run_dir} has no energy of steps: moescope summary says why, moescope doctor what would give it")
    path = out or run_dir / "energy.json"
    path.write_text(json_text({"rails": rails}))
    return {"path": str(path), "bytes": path.stat().st_size, "rails": len(rails)}
