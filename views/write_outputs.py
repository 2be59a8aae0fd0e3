"""Functions that write a recording's views, shared by the verbs."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.answers import print_if_json
from moescope.plain import print_plain
from views.errors import ViewError

if TYPE_CHECKING:
    from analyzer.records.schema import Tables
    from analyzer.tables.store import LazyTables

TRACE, REPORT, DAG, FLAME = "trace.pftrace", "report.html", "profdag.html", "flame.html"
LABELS = {"token": "step"}
"""Fields of what was written that are printed by another name."""


def make_trace(
    run_dir: Path,
    out: Path | None,
    step: Callable[[str], None],
    zipped: bool = False,
    optrace: Path | None = None,
    execute: int | None = None,
    tables: "LazyTables | None" = None,
) -> dict[str, Any]:
    """Write the timeline, as gzip if `zipped`, with the optrace of one execution if given; `tables`: if already loaded."""
    from analyzer.tables.store import load_tables
    from tracer.recording.format import Recording
    from views.timeline.perfetto import write_trace

    path = out or run_dir / (TRACE + ".gz" * zipped)
    manifest, tables = Recording(run_dir).manifest, load_tables(run_dir) if tables is None else tables
    if optrace:
        tables = tables.with_table("qnn_optrace", optrace_of(tables, optrace, execute))
    written = write_trace(manifest, tables, path, lambda name: step(f"timeline: {name}"), zipped)
    return {"path": str(path), "bytes": written.bytes, "events": written.events, "slices": written.slices}


def optrace_of(tables: "Tables", path: Path, execute: int | None) -> Any:
    """An optrace's events with the execution to draw them in. Raises ViewError if there is none."""
    from analyzer.imports.optrace import read_optrace

    runs = tables["qnn_executes"].query("complete")
    timed = runs[runs["accel_us"] > 0]["execute_id"].tolist()
    chosen = execute if execute is not None else next(iter(timed or runs["execute_id"].tolist()), None)
    if chosen is None or chosen not in set(runs["execute_id"]):
        recorded = (
            f"the recording has {runs['execute_id'].min()} to {runs['execute_id'].max()}"
            if len(runs)
            else "the recording has none"
        )
        raise ViewError(
            f"no complete execution {'on the NPU' if execute is None else execute} to draw the optrace in: {recorded}"
        )
    trace = read_optrace(path)
    for complaint in trace.complaints:
        print_plain(f"views: {complaint}", sys.stderr)
    return trace.events.assign(execute_id=chosen)


def make_report(run_dir: Path, out: Path | None, step: Callable[[str], None], tables: "Tables | None" = None) -> dict[str, Any]:
    """Write the report."""
    from analyzer.questions.cached import store_summary
    from analyzer.tables.store import load_tables
    from tracer.recording.format import Recording
    from views.report.report import write_report

    path, recording = out or run_dir / REPORT, Recording(run_dir)
    tables = load_tables(run_dir) if tables is None else tables
    step("report: summary")
    summary, _ = store_summary(run_dir, recording, tables)
    step("report: page")
    return {"path": str(path), "bytes": write_report(recording.manifest, tables, summary, path)}


def make_dag(
    run_dir: Path, out: Path | None, step: Callable[[str], None], token_id: int | None = None, tables: "Tables | None" = None
) -> dict[str, Any]:
    """Write the ProfDAG page of one step."""
    from analyzer.questions.profdag import build_profdag, middle_step
    from analyzer.tables.store import load_tables
    from tracer.recording.format import Recording
    from views.profdag.page import write_profdag

    path, recording = out or run_dir / DAG, Recording(run_dir)
    tables = load_tables(run_dir) if tables is None else tables
    chosen = middle_step(tables) if token_id is None else token_id
    step(f"ProfDAG of step {chosen}")
    graph = build_profdag(tables, chosen)
    written = write_profdag(graph, tables, recording.manifest, path)
    return {"path": str(path), "bytes": written, "token": chosen, "nodes": graph.number_of_nodes()}


def make_flame(run_dir: Path, out: Path | None, step: Callable[[str], None], tables: "Tables | None" = None) -> dict[str, Any]:
    """Write the flame graph. Raises ViewError if the recording has no stacks."""
    from analyzer.tables.store import load_tables
    from tracer.recording.format import Recording
    from views.flame.page import write_flame

    path, manifest = out or run_dir / FLAME, Recording(run_dir).manifest
    tables = load_tables(run_dir) if tables is None else tables
    if not manifest.get("stacks"):
        raise ViewError(f"{run_dir} has no stacks: record with --stacks")
    step("flame graph")
    return {"path": str(path), "bytes": write_flame(tables, manifest, path), "samples": len(tables["samples"])}


def print_written(args: argparse.Namespace, files: list[dict[str, Any]], no_profdag: str = "") -> None:
    """Print the written files: a line each, or JSON; and why there is no ProfDAG."""
    if print_if_json(args, {"files": files, "no_profdag": no_profdag}):
        return
    for written in files:
        counted = {LABELS.get(name, name): value for name, value in written.items() if name not in ("path", "bytes")}
        counts = ", ".join(f"{name} {value:,}" for name, value in counted.items())
        print_plain(f"{written['path']}  {written['bytes'] / 1e6:.2f} MB" + (f"  ({counts})" if counts else ""))
    if no_profdag:
        print_plain(f"no ProfDAG page: {no_profdag}", sys.stderr)
