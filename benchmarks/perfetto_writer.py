"""Speed and output size of the Perfetto writer on synthetic tables: `python -m benchmarks.perfetto_writer [--events N]`.

Rates are from the tables to the file, per second of the wall clock and of the process's CPU time (all threads), with one thread
and with all CPUs alternately. `--open` reads the last trace with Perfetto's trace processor and counts its contents; `--ui`
opens it in the offline copy of the Perfetto UI, in headless Chromium.
"""

import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from analyzer.tables.store import LazyTables, arrow_of
from benchmarks.lib.chromium import Chromium
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from benchmarks.lib.turns import by_turns
from views.serving import make_server, ui_address
from views.timeline import perfetto
from views.timeline.slices import Slices, on_program
from views.timeline.trace_file import usable_cpus
from workloads.tables_fixture import make_tables
from workloads.trace_processor import TraceProcessorWasm

EVENTS_PER_TOKEN_AND_LAYER = 30
UI_COUNT = (
    "const done = arguments[0]; self.app.trace.engine.query('select count(*) as n from slice')"
    ".then(r => done(Number(r.firstRow({n: 0}).n)), e => done(String(e)))"
)


def bare_slices(tables: LazyTables) -> list[Slices]:
    """The slices on threads, without arguments."""
    return [replace(slices, args={}, own={}) for slices in on_program(tables)]


def memory_mib(what: str = "VmRSS") -> float:
    """MiB of memory of this process, or (VmHWM) its maximum since `forget`."""
    return float(re.findall(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def reset_peak() -> None:
    """Reset the kernel's peak of memory."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass
class Written:
    """One trace: M events per second of wall and CPU time, bytes per event, additional MiB at the peak."""

    clock: float
    cpu: float
    bytes_per_event: float
    peak_mib: float


def write_trace(manifest: dict[str, Any], tables: LazyTables, path: Path, zipped: bool, threads: int) -> Written:
    """Write the trace once."""
    reset_peak()
    path.unlink(missing_ok=True)
    before, wall, cpu = memory_mib(), time.perf_counter(), time.process_time()
    trace = perfetto.write_trace(manifest, tables, path, zipped=zipped, threads=threads)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rates = trace.events / wall / 1e6, trace.events / cpu / 1e6
    return Written(*rates, trace.bytes / trace.events, memory_mib("VmHWM") - before)


def write_all(manifest: dict[str, Any], tables: LazyTables, path: Path, rounds: int, report: Report) -> None:
    """Write every kind of trace with one thread and with all CPUs alternately."""
    kinds = {"without arguments": (bare_slices, False), "gzip": (on_program, True), "with arguments": (on_program, False)}
    cases = list(product(kinds, sorted({1, usable_cpus()})))
    written: dict[tuple[str, int], list[Written]] = {case: [] for case in cases}
    for _, case in by_turns(cases, rounds):
        perfetto.on_program, zipped = kinds[case[0]]  # type: ignore[assignment]
        written[case].append(write_trace(manifest, tables, path, zipped, case[1]))
    write_trace(manifest, tables, path, False, 1)  # opened afterwards
    for (kind, threads), runs in written.items():
        name = f"{kind}, {threads} thread{'s' * (threads > 1)}"
        report.add(f"{name}: by the clock", "M events/s", extremes([run.clock for run in runs]))
        report.add(f"{name}: by CPU time", "M events/s", extremes([run.cpu for run in runs]))
        report.add(f"{name}: size", "B/event", extremes([run.bytes_per_event for run in runs]))
        report.add(f"{name}: more memory at the peak", "MiB", extremes([run.peak_mib for run in runs]))


def read_back(path: Path, report: Report) -> None:
    """Read the trace with the trace processor and count its contents."""
    reset_peak()
    before, begin = memory_mib(), time.perf_counter()
    processor = TraceProcessorWasm(trace=str(path))
    report.add("trace processor: read", "s", single(time.perf_counter() - begin))
    ask: Callable[[str], list[Any]] = lambda sql: [tuple(row.__dict__.values()) for row in processor.query(sql)]  # noqa: E731
    counts = ask("select (select count(*) from slice) s, (select count(*) from args) a, (select sum(dur) from slice) d")[0]
    bad = ask("select name, value from stats where value != 0 and severity in ('error', 'data_loss')")
    report.add("trace processor: more memory at the peak", "MiB", single(memory_mib("VmHWM") - before))
    report.note(f"trace processor: {counts[0]:,} slices, {counts[1]:,} arguments, {counts[2]:,} ns; errors: {bad}")


def open_in_browser(path: Path, folder: str, patience: float, report: Report) -> None:
    """Open the trace in the Perfetto UI's offline copy."""
    with contextlib.closing(Chromium(folder)) as chromium, make_server(path, True, 0) as served:
        driver = chromium.driver
        threading.Thread(target=served.serve_forever, daemon=True).start()
        begin = time.perf_counter()
        driver.get(ui_address(served, True))
        while not (opened := driver.execute_script("return !!(self.app && self.app.trace)")):
            time.sleep(0.5)
            if time.perf_counter() - begin > patience:
                shown = driver.find_element("tag name", "body").text[:300]
                report.note(f"Perfetto UI: not open after {patience:.0f} s; it shows {shown!r}")
                break
        if opened:
            report.add("Perfetto UI: open", "s", single(time.perf_counter() - begin))
            report.note(f"Perfetto UI: {driver.execute_async_script(UI_COUNT):,} slices")
        served.shutdown()


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--events", type=int, default=1_000_000, help="about so many (default %(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="layers of the model (default %(default)s)")
    parser.add_argument("--open", action="store_true", help="read it with the trace processor")
    parser.add_argument("--ui", action="store_true", help="open it in the Perfetto UI")
    parser.add_argument("--patience", type=float, default=150, help="seconds to wait for the UI (default %(default)s)")
    args = parser.parse_args()
    report, tokens = Report("perfetto_writer", args), max(2, args.events // (EVENTS_PER_TOKEN_AND_LAYER * args.layers))
    manifest, frames = make_tables(tokens, args.layers)
    tables = LazyTables.of({name: arrow_of(name, frame) for name, frame in frames.items()})  # the form read from disk
    del frames
    report.note(f"{tokens} tokens, {args.layers} layers; {memory_mib():,.0f} MiB held with the tables")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pftrace"
        write_all(manifest, tables, path, args.rounds, report)
        del tables
        if args.open:
            read_back(path, report)
        if args.ui:
            open_in_browser(path, folder, args.patience, report)
    report.finish()


if __name__ == "__main__":
    main()
