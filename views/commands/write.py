"""Write the views of a recording into it: trace.pftrace, report.html, profdag.html; or one of them, in a format of your choice.

examples:
  moescope write RUN
  moescope write RUN --only trace --gzip                 RUN/trace.pftrace.gz, which Perfetto opens as it is
  moescope write RUN --only trace --optrace chrometrace.json --execute 12
  moescope write RUN --only profdag --step 0             the page of the first step, usually the prefill
  moescope write RUN --format chrome                     RUN/trace.json: the timeline's slices, without scheduling
  moescope write RUN --format csv --out folder           one file per table; parquet keeps types
  moescope write RUN --format graphml --step 7           RUN/profdag.graphml
  moescope write RUN --format dot --fold --out - | dot -Tsvg > layers.svg    equal layers as one
  moescope write RUN --format route-trace --out trace.csv                    BigMoeOnEdge's route_trace v1
  moescope write RUN --only energy                       RUN/energy.json, in the fields proposed for MLPerf
  moescope write trace.csv --format counts --out counts.csv                  routes from one format into another

An optrace does not say which execution it is of; without --execute it is drawn in the first one whose time on the NPU is known.
In CSV, a text that a spreadsheet would compute (it begins with =, +, - or @) has an apostrophe before it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analyzer.errors import AnalysisError
from analyzer.imports.routes import FORMATS as ROUTES
from analyzer.questions import ceilings
from analyzer.questions.profdag import DagError
from analyzer.tables.store import load_tables
from moescope.arguments import add_json, add_out, add_step
from moescope.plain import print_plain
from moescope.terminal import progress
from tracer.recording.format import Recording
from views import exporting
from views.errors import ViewError
from views.write_outputs import make_dag, make_flame, make_report, make_trace, print_written

GRAPHS = ("graphml", "json", "dot")
VIEWS = {
    "trace": ("perfetto", "chrome"),
    "report": ("html",),
    "profdag": ("html", *GRAPHS),
    "flame": ("html",),
    "tables": ("parquet", "csv"),
    "routes": tuple(ROUTES),
    "energy": ("mlperf",),
}
"""View → its formats, the default first."""
TAKERS = {
    **dict.fromkeys(("gzip", "optrace", "execute"), ("perfetto",)),
    **dict.fromkeys(("mean", "resolve", "fold"), GRAPHS),
    "step": VIEWS["profdag"],
}
"""Option → the formats that it is for."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording; for routes also a file of them")
    parser.add_argument("--only", choices=tuple(VIEWS), help="write one view (default: trace, report and profdag)")
    formats = "; ".join(f"{view}: {', '.join(forms)}" for view, forms in VIEWS.items())
    names = dict.fromkeys(form for forms in VIEWS.values() for form in forms)
    parser.add_argument("--format", choices=tuple(names), metavar="FORMAT", help=f"{formats} (default: the first of each)")
    add_out(parser, "inside RUN; for tables a folder; - is standard output, for graphs", "PATH")
    add_step(parser)
    add = parser.add_argument
    add("--gzip", action="store_true", help="trace: compress it to a third of the size or less, at half the speed")
    add("--optrace", metavar="FILE", type=Path, help="trace: draw the NPU's threads too, from an optrace in Chrome's format")
    add("--execute", metavar="N", type=int, help="trace: execute_id of the execution in the optrace")
    add("--mean", action="store_true", help="graphs: times averaged over the decode steps of the same structure")
    add("--resolve", action="store_true", help="graphs: omit views: readers depend on the operator that wrote the memory")
    add("--fold", action="store_true", help="graphs: merge equal layers and sum their times; implies --resolve")
    add("--ceilings", action="store_true", help="first measure this machine's ceilings for a second, if they are unknown")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write one view or all; a recording without operators has no ProfDAG, which is reported but no error."""
    view, form = view_and_format(args)
    with progress("reading the recording") as step:
        if args.ceilings:
            measure_ceilings(step)
        written = write_one(args, view, form, step) if view else None
        files, reason = ([], "") if view else write_all(args.run_dir, step)
    if written:
        print_written(args, [written])
    elif not view:
        print_written(args, files, reason)
    return 0


def view_and_format(args: argparse.Namespace) -> tuple[str, str]:
    """(view, format); ("", "") for all views. Raises ViewError if the options do not fit together."""
    views = [view for view in ([args.only] if args.only else VIEWS) if args.format in VIEWS[view]]
    if args.format and len(views) != 1:
        remedy = f"--only {args.only} has {', '.join(VIEWS[args.only])}" if args.only else f"add --only {' or '.join(views)}"
        raise ViewError(f"--format {args.format} does not say what to write: {remedy}")
    view = views[0] if args.format else args.only or ""
    form = args.format or (VIEWS[view][0] if view else "")
    if args.out and not view:
        raise ViewError("--out is for one view: add --only or --format")
    for option, forms in TAKERS.items():
        if getattr(args, option) not in (None, False) and form not in forms:
            raise ViewError(f"--{option} is for --format {' or '.join(forms)}")
    return view, form


def write_one(args: argparse.Namespace, view: str, form: str, step: Callable[[str], None]) -> dict[str, Any] | None:
    """Write one view; returns what was written, None on standard output."""
    run_dir, out = args.run_dir, args.out
    if view in ("report", "flame"):
        return (make_report if view == "report" else make_flame)(run_dir, out, step)
    if form == "perfetto":
        return make_trace(run_dir, out, step, args.gzip, args.optrace, args.execute)
    if form == "html":
        return make_dag(run_dir, out, step, args.step)
    step(f"writing {form}")
    if view == "routes":
        return exporting.export_routes(run_dir, out, form)
    if view == "energy":
        return exporting.export_energy(run_dir, out)
    if view == "tables":
        return exporting.table_files(run_dir, out, form)
    if view == "trace":
        return exporting.chrome_json(run_dir, out)
    how = "fold" if args.fold else "resolve" if args.resolve else ""
    return exporting.export_graph(run_dir, out, form, args.step, args.mean, how)


def write_all(run_dir: Path, step: Callable[[str], None]) -> tuple[list[dict[str, Any]], str]:
    """(written files, why there is no ProfDAG page)."""
    tables = load_tables(run_dir)
    written = [make_trace(run_dir, None, step, tables=tables), make_report(run_dir, None, step, tables)]
    if Recording(run_dir).manifest.get("stacks"):
        written.append(make_flame(run_dir, None, step, tables))
    try:
        return [*written, make_dag(run_dir, None, step, tables=tables)], ""
    except DagError as error:
        return written, str(error)


def measure_ceilings(step: Callable[[str], None]) -> None:
    """Have this machine's ceilings; where they cannot be measured, the report has no roofline."""
    step("measuring this machine's ceilings")
    try:
        ceilings.stored_or_measured()
    except (AnalysisError, OSError) as error:
        print_plain(f"no ceilings: {error}", sys.stderr)
