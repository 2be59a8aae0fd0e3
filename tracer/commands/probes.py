"""`tracer probes`: a dry run that prints every probe a file offers: where, on which instruction, at what cost, and why there."""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

from moescope.arguments import add_json
from moescope.plain import print_plain
from tracer.commands.on_device import add_on, kept_files, planner_of, targets, visiting
from tracer.commands.options import add_probe_files, chosen_levels, names_in, need_root
from tracer.engines import choose
from tracer.errors import TracerError
from tracer.kernel.libbpf import Kernel
from tracer.kernel.loaders import LibbpfLoader
from tracer.probes.attach import Attachments
from tracer.probes.calibration import UNKNOWN, measure
from tracer.probes.elf import read_binary
from tracer.probes.functions import read_probe_files
from tracer.probes.plan import Row

WIDE = 140
"""Columns that the table of probes needs."""
ARCHITECTURES = {"x86_64": "x64", "aarch64": "AArch64"}
"""The kernel's name of this machine → its name in ELF headers."""

EXAMPLES = """examples:
  sudo python -m tracer probes build/bin/libllama.so build/bin/libggml-cpu.so
  sudo python -m tracer probes --json runtime/telemetry/_probes.so
  python -m tracer probes --on adb /data/local/tmp/libllama.so   on a device; without the cost of a hit
  sudo python -m tracer probes --probes my.toml ./my_engine
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
    """Place, measure, print, and remove the probes again."""
    if args.on:
        for target in targets(args.on):
            show(placed_on(args, target), args.json)
        return 0
    need_root()
    added, functions = read_probe_files(args.probes)
    engines = choose(names_in(args.engine, "--engine"), added)
    probes = Attachments(engines, chosen_levels(args.levels), functions)
    loader = LibbpfLoader(Kernel(), probes.programs() | {"empty"}, {})
    probes.loader = loader
    try:
        probes.drop(loader.refused)
        costs = probes.costs = UNKNOWN if "empty" in probes.refused else measure(loader.program_fd("empty"))
        for path in args.file:
            refuse_foreign(path)
            probes.attach_file(str(path), is_executable=os.access(path, os.X_OK) and ".so" not in path.name)
    finally:
        probes.detach()
        loader.close()
    for row in probes.rows:
        kind = "return" if row.at == "return" else row.cost
        row.ns_per_hit, row.ns_per_hit_cold = costs[kind], costs[f"cold_{kind}"]
    rows = probes.rows + probes.at_run_time()
    for warning in probes.warnings + probes.named.missing():
        print_plain(warning, sys.stderr)
    show(rows, args.json)
    return 0


def placed_on(args: argparse.Namespace, target: str) -> list[Row]:
    """The rows of the plan for another machine's files."""
    with visiting(target) as device:
        planner = planner_of(args, device)
        files = device.identify("; ".join(f"echo {quote(str(path))}" for path in args.file))
        with kept_files().laid_out(device, files) as root:
            kept_files().plan(device, planner, [path for path in files if ".so" not in path], root)
    return [replace(row, library=row.library.removeprefix(str(root))) for row in planner.rows]


def show(rows: list[Row], as_json: bool) -> None:
    """Print rows."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
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
    lines = [cells(row) for row in rows]
    if screen.width >= WIDE:
        screen.print(grid(*columns, left=tuple(name for name in columns if name not in ("ns/hit", "cold")), rows=lines))
        return
    for level, program, site, at, instruction, warm, cold, why in lines:
        cost = f": {warm} ns/hit, {cold} with cold caches" if warm else ""
        screen.print(f"{level} {program}, {at}{cost}", style="bold")
        screen.print(Padding(f"{site}, {instruction}: {why}" if instruction else f"{site}: {why}", (0, 0, 0, 4)))


def cells(row: Row) -> tuple[str, ...]:
    """The table cells of a probe."""
    later, unmeasured = row.offset < 0, not row.ns_per_hit
    site = row.symbol if later else f"{os.path.basename(row.library)}+{row.offset:#x} {row.symbol}"
    costs = ("", "") if later or unmeasured else (f"{row.ns_per_hit:.0f}", f"{row.ns_per_hit_cold:.0f}")
    return (row.level, row.program, site, row.at, row.instruction, *costs, row.why)
