"""Functions that write a recording's views, shared by the verbs."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import add_json, add_out, add_run
from moescope.plain import print_plain
from views.errors import ViewError

if TYPE_CHECKING:
    from analyzer.tables.store import Tables as LoadedTables

Tables = Mapping[str, Any]
TRACE, REPORT, DAG = "trace.pftrace", "report.html", "profdag.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every verb that writes one file of a recording."""
    add_run(parser)
    add_out(parser, "inside RUN")
    add_json(parser)


def make_trace(
    run_dir: Path,
    out: Path | None,
    step: Callable[[str], None],
    zipped: bool = False,
    optrace: Path | None = None,
    execute: int | None = None,
    tables: "LoadedTables | None" = None,
) -> dict[str, Any]:
    """Write the timeline, as gzip if `zipped`, with the optrace of one execution if given; `tables`: if already loaded."""
    from analyzer.tables.store import load
    from tracer.recording.format import Recording
    from views.timeline.perfetto import write_trace

    path = out or run_dir / (TRACE + ".gz" * zipped)
    manifest, tables = Recording(run_dir).manifest, load(run_dir) if tables is None else tables
    if optrace:
        tables = tables.with_table("qnn_optrace", optrace_of(tables, optrace, execute))
    written = write_trace(manifest, tables, path, lambda name: step(f"timeline: {name}"), zipped)
    return {"path": str(path), "bytes": written.bytes, "events": written.events, "slices": written.slices}


def optrace_of(tables: Tables, path: Path, execute: int | None) -> Any:
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


def make_report(run_dir: Path, out: Path | None, step: Callable[[str], None], tables: Tables | None = None) -> dict[str, Any]:
    """Write the report."""
    from analyzer.questions.cached import kept
    from analyzer.tables.store import load
    from tracer.recording.format import Recording
    from views.report.report import write_report

    path, recording = out or run_dir / REPORT, Recording(run_dir)
    tables = load(run_dir) if tables is None else tables
    step("report: summary")
    summary, _ = kept(run_dir, recording, tables)
    step("report: page")
    return {"path": str(path), "bytes": write_report(recording.manifest, tables, summary, path)}


def make_dag(
    run_dir: Path, out: Path | None, step: Callable[[str], None], token: int | None = None, tables: Tables | None = None
) -> dict[str, Any]:
    """Write the ProfDAG page of one token."""
    from analyzer.questions.profdag import build_profdag, middle_token
    from analyzer.tables.store import load
    from tracer.recording.format import Recording
    from views.profdag.page import write_profdag

    path, recording = out or run_dir / DAG, Recording(run_dir)
    tables = load(run_dir) if tables is None else tables
    chosen = middle_token(tables) if token is None else token
    step(f"ProfDAG of token {chosen}")
    graph = build_profdag(tables, chosen)
    written = write_profdag(graph, tables, recording.manifest, path)
    return {"path": str(path), "bytes": written, "token": chosen, "nodes": graph.number_of_nodes()}


def write_from_json(args: argparse.Namespace, source: Path, kind: str, verb: str, write: Callable[[Any, Path], int]) -> int:
    """Write a page from the JSON that an analyzer verb printed, and announce it. Raises ViewError if it is not a `kind`."""
    remedy = f"write one with `python -m analyzer {verb} --json`"
    try:
        printed = source.read_bytes()
    except OSError as error:
        raise ViewError(f"{source} cannot be read ({error.strerror}); {remedy}") from None
    try:
        written = write(json.loads(printed), args.out)
    except (ValueError, KeyError, TypeError) as error:
        raise ViewError(f"{source} is not a {kind} ({error!r}); {remedy}") from None
    announce({"path": str(args.out), "bytes": written}, args.json)
    return 0


def announce(written: dict[str, Any], as_json: bool) -> None:
    """Print the written files: one line, or JSON."""
    if as_json:
        print(json.dumps(written))
        return
    counts = ", ".join(f"{name} {value:,}" for name, value in written.items() if name not in ("path", "bytes"))
    print_plain(f"{written['path']}  {written['bytes'] / 1e6:.2f} MB" + (f"  ({counts})" if counts else ""))
