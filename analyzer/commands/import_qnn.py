"""Import QNN profiles from other tools: ONNX Runtime's CSV, the profile viewer's CSV, text, optrace and summary (JSON).

examples:
  python -m analyzer import-qnn qnn/expert.csv
  python -m analyzer import-qnn qnn/*.csv --onto recordings/run-1
  python -m analyzer import-qnn chrometrace.json --mhz 1100 --json

With --onto every execution is matched with the recording's; tables go to RUN/imported (else to --out, else nowhere).
Exit code 1: a file, or a part of one, could not be read, or an execution is not in the recording.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from analyzer.commands._show import printed
from analyzer.imports.csv import join, read_csv, text_of
from analyzer.imports.optrace import critical_path, read_optrace, utilization
from analyzer.imports.qhas import is_summary, read_qhas
from analyzer.tables.store import load
from moescope.arguments import add_json, add_out
from moescope.plain import print_plain
from moescope.terminal import console, grid, words
from tracer.recording.format import RecordingError

MOST = 8


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="CSV, text or JSON")
    parser.add_argument("--onto", metavar="RUN", type=Path, help="recording that the files belong to")
    add_out(parser, "with --onto RUN/imported, otherwise none", "DIR")
    parser.add_argument("--mhz", type=float, metavar="MHZ", help="frequency of the NPU, to show cycles as time too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read each file; unreadable ones are reported and skipped."""
    events = load(args.onto)["qnn_events"] if args.onto else None
    out = args.out or (args.onto / "imported" if args.onto else None)
    answers: list[dict[str, Any]] = []
    for path in args.files:
        try:
            answers.append(of_json(path, out) if path.suffix.lower() == ".json" else of_csv(path, out, events))
        except (RecordingError, OSError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            answers.append({"file": str(path), "complaints": [reason], "failed": True})
    for answer in answers:
        for complaint in answer["complaints"]:
            print_plain(f"import-qnn: {complaint}", sys.stderr)
    if not printed(args, answers):
        show(answers, args.mhz)
    return int(any(answer["complaints"] or answer.get("unmatched") for answer in answers))


def keep(frame: Any, out: Path | None, path: Path) -> None:
    """Write a table to the file that the user named."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(out / f"{path.stem}.parquet", index=False)


def of_csv(path: Path, out: Path | None, events: Any) -> dict[str, Any]:
    """Figures of a CSV."""
    imported = read_csv(path)
    frame = imported.events
    executes = int(frame["execute"].max()) + 1 if len(frame) else 0
    answer: dict[str, Any] = {"file": str(path), "events": len(frame), "executes": executes, "complaints": imported.complaints}
    if events is not None:
        frame["execute_id"] = join(frame, events)
        matched = frame[frame["execute_id"] >= 0]["execute_id"].nunique()
        answer |= {"matched": int(matched), "unmatched": executes - int(matched)}
    cycles = (
        frame[(frame["unit"] == "cycles") & (frame["depth"] == 1)].groupby("name")["value"].sum().sort_values(ascending=False)
    )
    roots = frame[(frame["depth"] == 0) & (frame["execute"] >= 0)].groupby(["name", "unit"])["value"].median()
    answer["nodes"] = {str(name): int(value) for name, value in cycles.items()}
    answer["medians"] = [{"name": name, "unit": unit, "value": float(value)} for (name, unit), value in roots.items()]
    keep(frame, out, path)
    return answer


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
        keep(imported.events, out, path)
        return {"file": str(path), "events": len(imported.events), "complaints": imported.complaints, **figures}
    trace = read_optrace(path)
    chain = critical_path(trace.events)
    cycles = trace.events.groupby("name")["cycles"].sum().sort_values(ascending=False)
    keep(trace.events, out, path)
    return {
        "file": str(path),
        "events": len(trace.events),
        "duplicates": trace.duplicates,
        "complaints": trace.complaints,
        **utilization(trace.events),
        "critical_path": {"events": len(chain), "cycles": int(chain["cycles"].sum()), "names": chain["name"].tolist()},
        "nodes": {str(name): int(value) for name, value in cycles.items()},
    }


def show(answers: list[dict[str, Any]], mhz: float | None) -> None:
    """Print a few lines for each file that could be read."""
    screen = console(soft_wrap=True)
    for answer in (answer for answer in answers if not answer.get("failed")):
        joined = f", {answer['matched']} found in the recording, {answer['unmatched']} not" if "matched" in answer else ""
        extent = f", {answer['executes']} executes" if "executes" in answer else ""
        extent += f", {answer['duplicates']} duplicates removed" if "duplicates" in answer else ""
        screen.print(words((answer["file"], "bold"), f": {answer['events']:,} events{extent}{joined}"))
        for row in answer.get("medians", []):
            screen.print(f"  {row['name']}: median {row['value']:,.0f} {row['unit']}{as_time(row['value'], row['unit'], mhz)}")
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
        nodes = list(answer["nodes"].items())[:MOST]
        screen.print(grid("  node", "cycles", rows=((f"  {name}", f"{value:,}") for name, value in nodes)))


def as_time(value: float, unit: str, mhz: float | None) -> str:
    """Cycles as time, if the user gives the frequency."""
    return f" ({value / mhz:,.1f} µs at {mhz:g} MHz)" if unit == "cycles" and mhz else ""
