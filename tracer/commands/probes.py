"""`moescope probes`: prints every probe that a file would get: where, on which instruction, why there; as root, at what cost."""

import argparse
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote

from moescope.answers import print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from tracer.commands.machine_options import add_on
from tracer.commands.on_device import inspected_device, kept_files, parse_targets
from tracer.commands.options import add_probe_files, planner_of
from tracer.errors import TracerError
from tracer.kernel.features import ARCHITECTURES
from tracer.kernel.trial import try_programs
from tracer.probes.elf import read_binary
from tracer.probes.plan import Row

WIDE = 140
"""Columns that the table of probes needs."""
"""The kernel's name of this machine → its name in ELF headers."""

EXAMPLES = """examples:
  sudo moescope probes build/bin/libllama.so build/bin/libggml-cpu.so
  sudo moescope probes --json runtime/telemetry/_probes.so
  moescope probes --on adb /data/local/tmp/libllama.so   on a device; without the cost of a hit
  sudo moescope probes --probes my.toml ./my_engine
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", nargs="+", type=Path, help="libraries or executables to examine")
    parser.add_argument("--engine", default="auto", help="auto, or names separated by commas (default: auto)")
    parser.add_argument("--levels", default="all", help="all, or levels separated by commas (default: all)")
    add_probe_files(parser)
    add_on(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, measure what a hit costs, and print."""
    if args.on:
        for target in parse_targets(args.on):
            print_probes(args, placed_on(args, target))
        return 0
    planner = planner_of(args)
    engines = set[str]()
    for path in args.file:
        refuse_foreign(path)
        plan = planner.file(str(path), is_executable=os.access(path, os.X_OK) and ".so" not in path.name)
        planner.rows += plan.rows
        engines.update(plan.engines)
    if not any(engine.late and engine.name in engines for engine in planner.engines):
        late = planner.programs(late=True)  # placed once the program opens a library of a late engine
        planner.rows = [row for row in planner.rows if row.program not in late]
    rows = planner.rows + planner.at_run_time(engines)
    if os.geteuid() == 0:
        costs = try_programs().costs
        for row in planner.rows:
            kind = "return" if row.at == "return" else row.cost
            row.ns_per_hit, row.ns_per_hit_cold = costs[kind], costs[f"cold_{kind}"]
    for warning in planner.warnings + planner.named.missing():
        print_plain(warning, sys.stderr)
    print_probes(args, rows)
    return 0


def placed_on(args: argparse.Namespace, target: str) -> list[Row]:
    """The rows of the plan for another machine's files."""
    with inspected_device(target) as device:
        planner = planner_of(args, lambda: bool(device.features["fast_nop"]), everywhere=True)
        files = device.identify("; ".join(f"echo {quote(str(path))}" for path in args.file))
        with kept_files().laid_out(device, files) as root:
            kept_files().plan(device, planner, [path for path in files if ".so" not in path], root)
    return [replace(row, library=row.library.removeprefix(str(root))) for row in planner.rows]


def print_probes(args: argparse.Namespace, rows: list[Row]) -> None:
    """Print rows."""
    if not print_if_json(args, {"probes": rows}):
        print_table(rows)


def refuse_foreign(path: Path) -> None:
    """Raise TracerError if a file is not a program or library for this machine."""
    if not path.is_file():
        raise TracerError(f"{path} is not a file")
    architecture = read_binary(str(path)).machine
    if architecture != ARCHITECTURES.get(platform.machine()):
        raise TracerError(f"{path} is code for {architecture}, but this machine runs {platform.machine()}: give files for it")


def print_table(rows: list[Row]) -> None:
    """One line for each probe, two on a narrow terminal; ns per hit with warm and with cold caches."""
    from rich.padding import Padding

    from moescope.terminal import console, grid

    screen = console(wide=True)
    columns = ("level", "program", "site", "at", "instruction", "ns/hit", "cold", "why")
    lines = [probe_cells(row) for row in rows]
    if screen.width >= WIDE:
        screen.print(grid(*columns, left=tuple(name for name in columns if name not in ("ns/hit", "cold")), rows=lines))
        return
    for level, program, site, at, instruction, warm, cold, why in lines:
        cost = f": {warm} ns/hit, {cold} with cold caches" if warm else ""
        screen.print(f"{level} {program}, {at}{cost}", style="bold")
        screen.print(Padding(f"{site}, {instruction}: {why}" if instruction else f"{site}: {why}", (0, 0, 0, 4)))


def probe_cells(row: Row) -> tuple[str, ...]:
    """The table cells of a probe."""
    later, unmeasured = row.offset < 0, not row.ns_per_hit
    site = row.symbol if later else f"{os.path.basename(row.library)}+{row.offset:#x} {row.symbol}"
    costs = ("", "") if later or unmeasured else (f"{row.ns_per_hit:.0f}", f"{row.ns_per_hit_cold:.0f}")
    return (row.level, row.program, site, row.at, row.instruction, *costs, row.why)
