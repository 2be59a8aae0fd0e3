"""Import what other tools wrote, recognized by its content.

Profiles that a program wrote itself become a recording, for `summary`, `time` and the other verbs: ONNX Runtime's
(SessionOptions.enable_profiling; `end_profiling` returns its path), ExecuTorch's ETDump (write_etdump_result_to_file) and the log
of llama.cpp's Hexagon backend with GGML_HEXAGON_PROFILE=1 or 2 and llama.cpp's debug messages on. What they lack is empty in the
tables, and the summary lists it. Files of routes need no import: `experts` and `simulate` take them in place of RUN.

QNN profiles are read into tables, and with --onto compared with a recording's executions: ONNX Runtime's CSV, the profile
viewer's CSV and text (linting too), optrace and its summary (QHAS) in JSON. All may be compressed by gzip. QAIRT's other reports
are refused by their type: their contents are not described in public.

The file of an external power meter (CSV: a column of time, and power or voltage and current) joins a recording that was made with
`run --meter`: the pattern of load that was played then gives the offset of its clock.

examples:
  moescope import onnxruntime_profile.json --out recordings/imported
  moescope import model.etdp --out recordings/executorch
  moescope import hexagon.log --out recordings/npu
  moescope import qnn/expert.csv
  moescope import qnn/*.csv --onto recordings/run-1           tables go to RUN/imported, or to --out
  moescope import chrometrace.json --mhz 1100 --json
  moescope import meter.csv --onto recordings/run-1

Exit code 1: a QNN profile, or a part of one, could not be read, or an execution is not in the recording.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.imports import etdump, hexagon, onnxruntime, routes
from analyzer.imports.csv import match_executions, read_csv, text_of
from analyzer.imports.optrace import critical_path, read_optrace, utilization
from analyzer.imports.qhas import is_summary, read_qhas
from analyzer.imports.run_folder import Run, write_run
from analyzer.tables.meter import METER, is_meter, join_meter, read_meter
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_out
from moescope.plain import print_plain
from moescope.scratch import replaced_file
from moescope.terminal import console, grid, words
from tracer.recording.format import Recording, RecordingError

MOST = 8
READERS = (
    (onnxruntime.is_profile, onnxruntime.read_profile),
    (hexagon.is_log, hexagon.read_log),
)
"""(whether a text is of this kind, its contents from path and text)."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a program's profile, or QNN profiles")
    parser.add_argument(
        "--onto", metavar="RUN", type=Path, help="recording that QNN profiles, or a power meter's file, belong to"
    )
    add_out(parser, "of QNN profiles with --onto RUN/imported, otherwise none", "DIR")
    parser.add_argument("--mhz", type=float, metavar="MHZ", help="frequency of the NPU, to show cycles as time too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Make a recording of a profile, or read QNN profiles, of which unreadable ones are reported and skipped."""
    for path in args.files:
        if args.onto and is_meter_file(path):
            return import_meter(path, args)
        if imported := run_from_file(path):
            if len(args.files) > 1 or args.out is None:
                raise RecordingError(f"{path} becomes a recording: import it alone, with --out RUN")
            return make_recording(path, imported, args)
    return import_qnn(args)


def run_from_file(path: Path) -> Run | None:
    """The contents of a file that becomes a recording; None of others. Raises RecordingError if it is damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if etdump.is_dump(raw):
        return etdump.read_dump(path, raw)
    try:
        text = text_of(path)
    except RecordingError:
        return None  # reported with the QNN profiles
    if routes.is_routes(text):
        taken = f"`moescope experts {path}` and `simulate` read it as it is, `write` converts it"
        raise RecordingError(f"{path} holds routes of {len(routes.read_routes(path)['tokens'])} steps, without times: {taken}")
    return next((read(path, text) for knows, read in READERS if knows(text)), None)


def make_recording(path: Path, imported: Run, args: argparse.Namespace) -> int:
    """Write the recording, and print what the file lacks."""
    if args.out.exists():
        raise RecordingError(f"{args.out} exists: choose another --out")
    write_run(args.out, imported, f"import of {path.name}", [imported.engine])
    rows = {name: len(frame) for name, frame in imported.tables.items() if len(frame)}
    if print_if_json(args, {"run": args.out, "rows": rows, "not_known": imported.warnings}, "recording"):
        return 0
    for warning in imported.warnings:
        print_plain(f"not known: {warning}")
    print_plain(f"{args.out}: {', '.join(f'{count:,} {name}' for name, count in rows.items())}")
    return 0


def is_meter_file(path: Path) -> bool:
    """Whether a file is of a power meter."""
    try:
        return is_meter(text_of(path))
    except (RecordingError, OSError):
        return False  # reported with the QNN profiles


def import_meter(path: Path, args: argparse.Namespace) -> int:
    """Join a power meter's file with a recording, whose tables it is part of from now on."""
    text = text_of(path)
    meter = read_meter(path, text)
    joined = join_meter(meter, Recording(args.onto).manifest, path)
    with replaced_file(args.onto / METER) as file:
        file.write_text(text)
    about = {"samples": len(meter.watts), "likeness": joined.likeness, "zero_ns": joined.zero_ns}
    about |= {"off_watts": joined.off_watts, "on_watts": joined.on_watts}
    if not print_if_json(args, about, "meter"):
        print_plain(
            f"{path}: {len(meter.watts):,} samples joined; the pattern of load took {joined.on_watts - joined.off_watts:.2f} W "
            f"more than rest (correlation {joined.likeness:.2f})"
        )
    return 0


def import_qnn(args: argparse.Namespace) -> int:
    """Read each QNN profile, and print its figures."""
    events = load_tables(args.onto)["qnn_events"] if args.onto else None
    out = args.out or (args.onto / "imported" if args.onto else None)
    answers: list[dict[str, Any]] = []
    written: dict[str, Path] = {}
    for path in args.files:
        try:
            if out and (other := written.setdefault(table_name(path), path)) is not path:
                raise RecordingError(f"{path}: its table would replace that of {other}; import it alone, with another --out")
            is_json = path.name.lower().removesuffix(".gz").endswith(".json") or text_of(path).lstrip()[:1] in ("{", "[")
            answers.append(of_json(path, out) if is_json else of_csv(path, out, events))
        except (RecordingError, OSError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            answers.append({"file": str(path), "complaints": [reason], "failed": True})
    for answer in answers:
        for complaint in answer["complaints"]:
            print_plain(f"import: {complaint}", sys.stderr)
    if not print_if_json(args, {"files": answers}):
        print_lines(answers, args.mhz)
        if out and not args.onto:
            print_plain(f"{out}: tables, not a recording, as these files lack the host's times; --onto RUN joins them to one")
    return int(any(answer["complaints"] or answer.get("unmatched") for answer in answers))


def table_name(path: Path) -> str:
    """The file that holds a profile's table."""
    return f"{path.name.removesuffix('.gz').rpartition('.')[0]}.parquet"


def write_table(frame: Any, out: Path | None, path: Path) -> None:
    """Write a table to the folder that the user named."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(out / table_name(path), index=False)


def of_csv(path: Path, out: Path | None, events: Any) -> dict[str, Any]:
    """Figures of a CSV."""
    imported = read_csv(path)
    frame = imported.events
    executes = int(frame["execute"].max()) + 1 if len(frame) else 0
    answer: dict[str, Any] = {"file": str(path), "events": len(frame), "executes": executes, "complaints": imported.complaints}
    if events is not None:
        frame["execute_id"] = match_executions(frame, events)
        matched = frame[frame["execute_id"] >= 0]["execute_id"].nunique()
        answer |= {"matched": int(matched), "unmatched": executes - int(matched)}
    answer["graphs"] = [of_graph(rows) for graph, rows in frame.groupby("graph") if graph >= 0]
    write_table(frame, out, path)
    return answer


def of_graph(rows: pd.DataFrame) -> dict[str, Any]:
    """Figures of one graph's executions: how many, cycles by node, medians of the whole execution's times."""
    cycles = rows[(rows["unit"] == "cycles") & (rows["depth"] == 1)].groupby("name")["value"].sum().sort_values(ascending=False)
    roots = rows[rows["depth"] == 0].groupby(["name", "unit"])["value"].median()
    return {
        "executes": int(rows["execute"].nunique()),
        "nodes": {str(name): int(value) for name, value in cycles.items()},
        "medians": [{"name": name, "unit": unit, "value": float(value)} for (name, unit), value in roots.items()],
    }


def whole_json(path: Path) -> Any:
    """A JSON document; None if it is damaged."""
    try:
        return json.loads(text_of(path))
    except (ValueError, RecursionError):
        return None


def of_json(path: Path, out: Path | None) -> dict[str, Any]:
    """Figures of an optrace, or of the summary of one."""
    document = whole_json(path)
    if is_summary(document):
        imported, figures = read_qhas(path, document)
        write_table(imported.events, out, path)
        return {"file": str(path), "events": len(imported.events), "complaints": imported.complaints, **figures}
    trace = read_optrace(path)
    chain = critical_path(trace.events)
    cycles = trace.events.groupby("name")["cycles"].sum().sort_values(ascending=False)
    write_table(trace.events, out, path)
    return {
        "file": str(path),
        "events": len(trace.events),
        "duplicates": trace.duplicates,
        "complaints": trace.complaints,
        **utilization(trace.events),
        "critical_path": {"events": len(chain), "cycles": int(chain["cycles"].sum()), "names": chain["name"].tolist()},
        "nodes": {str(name): int(value) for name, value in cycles.items()},
    }


def print_lines(answers: list[dict[str, Any]], mhz: float | None) -> None:
    """Print a few lines for each file that could be read."""
    screen = console(soft_wrap=True)
    for answer in (answer for answer in answers if not answer.get("failed")):
        joined = f", {answer['matched']} found in the recording, {answer['unmatched']} not" if "matched" in answer else ""
        extent = f", {answer['executes']} executes" if "executes" in answer else ""
        extent += f", {answer['duplicates']} duplicates removed" if "duplicates" in answer else ""
        screen.print(words((answer["file"], "bold"), f": {answer['events']:,} events{extent}{joined}"))
        graphs = answer.get("graphs", [])
        for number, graph in enumerate(graphs):
            if len(graphs) > 1:
                screen.print(f"  graph {number}: {graph['executes']} executes")
            show_graph(graph, mhz)
        for unit, row in answer.get("units", {}).items():
            time = as_time(row["cycles"], "cycles", mhz)
            events = f", {row['events']} events" if "events" in row else ""
            screen.print(f"  {unit}: busy {row['share']:.1%} of the time, {row['cycles']:,} cycles{time}{events}")
        for name, value in answer.get("bytes", {}).items():
            screen.print(f"  {name}: {value:,} bytes")
        for thread, row in answer.get("threads", {}).items():
            screen.print(f"  {thread}: {row['share']:.1%} of the time, {row['cycles']:,} cycles")
        if "critical_path" in answer:
            path = answer["critical_path"]
            time = as_time(path["cycles"], "cycles", mhz)
            screen.print(f"  critical path (by time): {path['events']} events, {path['cycles']:,} cycles{time}")
        if "nodes" in answer:
            show_nodes(answer["nodes"])


def show_graph(graph: dict[str, Any], mhz: float | None) -> None:
    """Print the medians of a graph's executions, and its longest nodes."""
    for row in graph["medians"]:
        time = as_time(row["value"], row["unit"], mhz)
        console(soft_wrap=True).print(f"  {row['name']}: median {row['value']:,.0f} {row['unit']}{time}")
    show_nodes(graph["nodes"])


def show_nodes(nodes: dict[str, int]) -> None:
    """Print the nodes with most cycles."""
    rows = ((f"  {name}", f"{value:,}") for name, value in list(nodes.items())[:MOST])
    console(soft_wrap=True).print(grid("  node", "cycles", rows=rows))


def as_time(value: float, unit: str, mhz: float | None) -> str:
    """Cycles as time, if the user gives the frequency."""
    return f" ({value / mhz:,.1f} µs at {mhz:g} MHz)" if unit == "cycles" and mhz else ""
