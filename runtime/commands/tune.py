"""moescope tune: measure what each subgraph kind costs on each backend, for placement `auto`."""

import argparse
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.answers import note_emulator, print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from runtime.commands import add_count, parse_tiers, require_package, show_progress

if TYPE_CHECKING:
    from runtime.package.layout import Package
    from runtime.placement.costs import Cost, CostTable

EXAMPLES = """examples:
  moescope tune /models/qwen3-moe.package --threads 2
  moescope tune /models/qwen3-moe.package --show
  moescope generate /models/qwen3-moe.package --prompt Hello --prefill-backend auto --decode-backend auto --threads 2"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("package", type=Path, help="package to measure; the table is stored in it")
    parser.add_argument("--show", action="store_true", help="show the package's table without measuring")
    parser.add_argument("--tiers", metavar="LIST", help="rows of the experts' static shapes (default: the package's, or 1,8,32)")
    parser.add_argument(
        "--chunk", type=int, metavar="ROWS", help="prompt rows of one attention run (default: the package's, or 64)"
    )
    add_count(parser, "--threads", default=1, help="threads of one CPU graph")
    add_count(parser, "--runs", default=9, help="runs of each cell, after a warm-up")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, save and show the costs."""
    from runtime.errors import RequestError
    from runtime.package.layout import Package
    from runtime.placement.costs import CostTable
    from runtime.placement.options import Options
    from runtime.placement.table import npu_missing

    require_package(args.package)
    if args.runs < 1:
        raise RequestError("--runs must be 1 or more")
    package = Package(args.package)
    sizes = {"chunk": args.chunk, "tiers": parse_tiers(args.tiers) if args.tiers else None}
    chosen = {name: value for name, value in sizes.items() if value is not None}
    options = Options(threads=args.threads, **(package.compiled_for | chosen))
    missing = npu_missing(package)
    if args.show:
        table = CostTable.stored(package)
        if table is None:
            raise RequestError(f"{args.package} has no table yet: run `moescope tune {args.package}`")
    else:
        from runtime.prepare.tuning import Tuning

        package.require_writable()
        with show_progress("measuring") as progress:
            table = Tuning(package, options, npu=not missing).measure(args.runs, progress)
        table.save(package)
    note_emulator(table.machine.get("emulated"))
    if not print_if_json(args, vars(table)):
        print_table(table, package, options.tiers, missing)
    return 0


def print_table(table: "CostTable", package: "Package", tiers: tuple[int, ...], missing: str) -> None:
    """Print the table and the conclusions from it."""
    here, rows = table.machine, sorted({cell.rows for cell in table.cells if cell.rows})
    npu = here.get("npu", "")
    threads = f"{here['threads']} threads a graph, onnxruntime {here['onnxruntime']}"
    print_plain(f"{package.folder}: {here['cpu']}, {here['cores']} cores, {threads}")
    if npu:
        print(f"{npu}" + (": no timing model, its times are those of this host" if here.get("emulated") else ""))
    else:
        print(f"NPU: not measured{': ' + missing if missing else ''}")
    print(f"median ms of a run by rows{'' if not npu else ' (NPU: rows of the static shape)'}, and of an expert's load\n")
    heads = ["subgraph", "backend", "form", *map(str, rows), "load"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for kind, backend, form in dict.fromkeys((c.kind, c.backend, c.form) for c in table.cells):
        costs = [c for c in table.cells if (c.kind, c.backend, c.form) == (kind, backend, form)]
        cells = [_show_ms(_median_ns(costs, "run", n)) for n in rows] + [_load_times(costs)]
        print(f"| {' | '.join([kind, npu if backend == 'htp' else 'CPU', form or 'resident', *cells])} |")
    print("\n" + "\n".join(describe_choices(table, tiers)))


def describe_choices(table: "CostTable", tiers: tuple[int, ...]) -> list[str]:
    """The choices of placement `auto` by the table, a line each."""
    from runtime.cache_rules.forms import CPU, HTP
    from runtime.placement.costs import FlushByCost

    if not table.measured("expert", HTP):
        return ["all of it runs on the CPU"]
    lines = []
    for phase, names in (("prefill", table.prefill(tiers)), ("decode", table.decode(tiers))):
        lines.append(f"{phase}: attention on {names['attention']}, experts on {names['expert']}")
    for limited, when in ((False, "all experts resident"), (True, "a limited cache")):
        flush = FlushByCost(table, tiers, limited)
        places = [flush.place(n, {(HTP, max(tiers))} if limited else ()) for n in range(1, max(tiers))]
        spans = _equal_ranges(["CPU" if backend == CPU else f"tier {tier}" for backend, tier in places])
        lines.append(f"partial buffers on htp, {when}: " + ", ".join(f"{rows} rows {place}" for rows, place in spans))
    return lines


def _equal_ranges(places: list[str]) -> list[tuple[str, str]]:
    """Ranges of equal places, counted from 1: (`1-5`, place)."""
    spans = [(place, [rows for rows, _ in group]) for place, group in groupby(enumerate(places, 1), itemgetter(1))]
    return [(str(rows[0]) if len(rows) == 1 else f"{rows[0]}-{rows[-1]}", place) for place, rows in spans]


def _median_ns(cells: "list[Cost]", what: str, rows: int) -> int | None:
    return next((c.median_ns for c in cells if c.what == what and c.rows == rows), None)


def _load_times(cells: "list[Cost]") -> str:
    loads = [c for c in cells if c.what == "load"]
    return ", ".join(_show_ms(c.median_ns) + (f" (tier {c.tier})" if c.tier else "") for c in loads) or "-"


def _show_ms(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f}"
