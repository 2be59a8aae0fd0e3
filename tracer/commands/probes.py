"""`tracer probes`: a dry run that prints every probe a file offers: where, on which instruction, at what cost, and why there."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from tracer.attach import Attachments
from tracer.calibration import measure
from tracer.commands.options import add_probe_files, chosen_levels, need_root
from tracer.engines import choose
from tracer.errors import TracerError
from tracer.functions import read_probe_files
from tracer.libbpf import Kernel
from tracer.loaders import LibbpfLoader
from tracer.paths import invoking_user

EXAMPLES = """examples:
  sudo python -m tracer probes /usr/lib/libllama.so /usr/lib/libggml-cpu.so
  sudo python -m tracer probes --json runtime/_probes.so
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", nargs="+", type=Path, help="libraries or executables to look at")
    parser.add_argument("--engine", default="auto", help="auto, or names separated by commas")
    parser.add_argument("--levels", default="all", help="all, or levels separated by commas")
    add_probe_files(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Place, measure, print, and remove the probes again."""
    from rich.console import Console
    from rich.table import Table

    need_root()
    added, functions = read_probe_files(args.probes)
    engines = choose(args.engine.split(","), added)
    probes = Attachments(engines, chosen_levels(args.levels), invoking_user(), functions)
    loader = LibbpfLoader(Kernel(), probes.programs() | {"empty"}, {})
    probes.loader = loader
    try:
        costs = probes.costs = measure(loader.program_fd("empty"))
        for path in args.file:
            if not path.is_file():
                raise TracerError(f"{path} is not a file")
            probes.attach_file(str(path), is_executable=os.access(path, os.X_OK) and ".so" not in path.name)
    finally:
        probes.detach()
        loader.close()
    for row in probes.rows:
        row.ns_per_hit = costs["return"] if row.at == "return" else costs[row.cost]
    if args.json:
        print(json.dumps([asdict(row) for row in probes.rows], indent=1))
        return 0
    table = Table(box=None)
    for name in ("level", "site", "at", "instruction", "ns/hit", "why"):
        table.add_column(name, justify="right" if name == "ns/hit" else "left")
    for row in probes.rows:
        table.add_row(row.level, f"{row.symbol} +{row.offset:#x}", row.at, row.instruction, f"{row.ns_per_hit:.0f}", row.why)
    Console().print(table)
    for warning in probes.warnings + probes.named.missing():
        print(warning)
    return 0
