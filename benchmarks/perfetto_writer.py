"""How fast and how small the Perfetto writer is, on synthetic tables: `python -m benchmarks.perfetto_writer [--events N]`.

Rates are from the tables to the file, per second of the wall clock and of the process's own CPU time (all its threads), with one
thread and with all CPUs by turns. `--open` reads the last trace with Perfetto's trace processor and counts; `--ui` opens it in
the offline copy of the Perfetto UI, in headless Chromium.
"""

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from views.timeline import perfetto
from views.timeline.slices import Slices, on_program
from views.timeline.trace_file import usable_cpus
from workloads.tables_fixture import Tables, make

EVENTS_PER_TOKEN_AND_LAYER = 30
MIB = 1 << 20
UI_COUNT = (
    "const done = arguments[0]; self.app.trace.engine.query('select count(*) as n from slice')"
    ".then(r => done(Number(r.firstRow({n: 0}).n)), e => done(String(e)))"
)


def bare(tables: Tables) -> list[Slices]:
    """What is drawn on threads, without arguments."""
    return [replace(slices, args={}, own={}) for slices in on_program(tables)]


def held(what: str = "VmRSS") -> float:
    """MiB of memory that this process holds, or (VmHWM) held at most since `forget`."""
    return float(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def forget() -> None:
    """Let the kernel count the peak of memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def write(manifest: dict[str, Any], tables: Tables, path: Path, what: str, zipped: bool, threads: int) -> tuple[float, float]:
    """Write the trace once and say how that went; M events per second by the clock and of CPU time."""
    forget()
    path.unlink(missing_ok=True)
    before, wall, cpu = held(), time.perf_counter(), time.process_time()
    written = perfetto.write_trace(manifest, tables, path, zipped=zipped, threads=threads)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{what}, {threads} thread{'s' * (threads > 1)}: {written.events:,} events ({written.slices:,} slices that last), "
        f"{written.events / wall / 1e6:.2f} M events/s by the clock ({wall:.2f} s), "
        f"{written.events / cpu / 1e6:.2f} M per second of CPU ({cpu:.2f} s), "
        f"{written.bytes / written.events:.1f} bytes/event, {held('VmHWM') - before:,.0f} MiB more at the peak"
    )
    return written.events / wall / 1e6, written.events / cpu / 1e6


def repeated(manifest: dict[str, Any], tables: Tables, path: Path, runs: int) -> None:
    """Write every kind of trace with one thread and with all CPUs by turns, and say the medians."""
    rates: dict[str, list[tuple[float, float]]] = {}
    kinds = (("without arguments", bare, False), ("gzip", on_program, True), ("with arguments", on_program, False))
    for _ in range(runs):
        for what, drawn, zipped in kinds:
            perfetto.on_program = drawn
            for threads in sorted({1, usable_cpus()}):
                rate = write(manifest, tables, path, what, zipped, threads)
                rates.setdefault(f"{what}, {threads} thread{'s' * (threads > 1)}", []).append(rate)
    for what, seen in rates.items():
        clock, cpu = (sorted(column) for column in zip(*seen, strict=True))
        print(
            f"median of {runs}, {what}: {median(clock):.2f} M events/s by the clock ({clock[0]:.2f}..{clock[-1]:.2f}), "
            f"{median(cpu):.2f} M per second of CPU ({cpu[0]:.2f}..{cpu[-1]:.2f})"
        )


def opened(path: Path) -> None:
    """Read the trace with the trace processor and count."""
    from workloads.trace_processor import TraceProcessorWasm

    forget()
    before, begin = held(), time.perf_counter()
    processor = TraceProcessorWasm(trace=str(path))
    read = time.perf_counter() - begin
    ask: Callable[[str], list[Any]] = lambda sql: [tuple(row.__dict__.values()) for row in processor.query(sql)]  # noqa: E731
    begin = time.perf_counter()
    counts = ask("select (select count(*) from slice) s, (select count(*) from args) a, (select sum(dur) from slice) d")[0]
    bad = ask("select name, value from stats where value != 0 and severity in ('error', 'data_loss')")
    print(
        f"trace processor: read in {read:.1f} s; {counts[0]:,} slices, {counts[1]:,} arguments, {counts[2]:,} ns; errors: {bad}"
    )
    print(f"  counted in {time.perf_counter() - begin:.1f} s; {held('VmHWM') - before:,.0f} MiB at most")


def shown(path: Path, folder: str, patience: float) -> None:
    """Open the trace in the Perfetto UI's offline copy."""
    from benchmarks.profdag_page import browser
    from views.serving import address, server

    driver = browser(folder)
    with server(path, True, 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        begin = time.perf_counter()
        driver.get(address(served, True))
        while not driver.execute_script("return !!(self.app && self.app.trace)"):
            time.sleep(0.5)
            if time.perf_counter() - begin > patience:
                said = driver.find_element("tag name", "body").text[:300]
                print(f"Perfetto UI: not open after {patience:.0f} s; it says: {said!r}")
                break
        else:
            print(
                f"Perfetto UI: open after {time.perf_counter() - begin:.1f} s; {driver.execute_async_script(UI_COUNT):,} slices"
            )
        driver.quit()
        served.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="about so many (default %(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="layers of the model (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="repetitions (default %(default)s)")
    parser.add_argument("--open", action="store_true", help="read it with the trace processor")
    parser.add_argument("--ui", action="store_true", help="open it in the Perfetto UI")
    parser.add_argument("--patience", type=float, default=150, help="seconds to wait for the UI (default %(default)s)")
    options = parser.parse_args()
    tokens = max(2, options.events // (EVENTS_PER_TOKEN_AND_LAYER * options.layers))
    manifest, tables = make(tokens, options.layers)
    print(f"{tokens} tokens, {options.layers} layers; {held():,.0f} MiB held with the tables")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pftrace"
        repeated(manifest, tables, path, options.runs)
        del tables
        if options.open:
            opened(path)
        if options.ui:
            shown(path, folder, options.patience)


if __name__ == "__main__":
    main()
