"""Device profiles: list them, show one, or measure this machine.

examples:
  moescope predict device
  moescope predict device --show h800
  moescope predict device --measure --out here.toml       then: predict --device here.toml
  sudo moescope predict device --measure --power --out here.toml        also its watts, for joules per token
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from analyzer.errors import PredictError
from analyzer.predict import devices, machine, machine_power
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_out
from moescope.terminal import console, grid


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", metavar="NAME", help="show one profile in full, by name or TOML file")
    what.add_argument("--measure", action="store_true", help="measure this machine's CPU, memory and storage (some seconds)")
    parser.add_argument("--storage", metavar="DIR", type=Path, help="folder on the storage to measure, with --measure")
    parser.add_argument("--power", action="store_true", help="also measure its watts by a power sensor, with --measure (as root)")
    parser.add_argument("--sysfs", metavar="DIR", default="/sys", help="look for power sensors below this folder, with --power")
    add_out(parser, "standard output")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List, show or measure."""
    if args.power and not args.measure:
        raise PredictError("--power is for --measure: add it")
    if args.measure:
        watts = machine_power.measure_watts(args.storage, args.sysfs) if args.power else None
        text = machine.to_toml(machine.measure_machine(args.storage), platform.node() or "this machine", watts)
        if args.out:
            args.out.write_text(text)
        else:
            print(text, end="")
    elif args.show or args.json:
        profiles = [devices.load_device(name) for name in ([args.show] if args.show else devices.packaged_names())]
        if not print_if_json(args, {"devices": profiles}):
            print(json.dumps(asdict(profiles[0]), indent=1))
    else:
        console().print(list_profiles())
    return 0


def list_profiles() -> Table:
    """All profiles, one line each."""
    table = grid("profile", "device", "units", "memory", "GB/s", "estimated", left=6)
    for name in devices.packaged_names():
        device = devices.load_device(name)
        peaks = "; ".join(
            f"{unit} " + " ".join(f"{dtype} {peak / 1e12:.4g}T" for dtype, peak in compute_unit.peak.items())
            for unit, compute_unit in device.units.items()
        )
        size, speed = f"{device.memory_bytes / 1e9:.0f} GB", f"{device.bandwidth / 1e9:.4g}"
        table.add_row(name, device.name, peaks, size, speed, ", ".join(device.estimates) or "-")
    return table
