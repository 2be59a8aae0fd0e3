"""`moescope plan`: what to attach in a program and its libraries, for moescope-recorder on a machine without Python."""

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from moescope.plain import print_plain
from tracer.commands.options import add_probe_files, added_probes, chosen_levels, names_in
from tracer.engines import choose_engines, with_needed
from tracer.errors import TracerError
from tracer.kernel.features import ARCHITECTURES
from tracer.kernel.plan_file import FileRoot, compose_plan, write_plan
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.learning import of_recording
from tracer.probes.planner import Planner
from tracer.recording.paths import invoking_user
from tracer.recording.user_files import read_text

EXAMPLES = """examples:
  moescope plan -o plan.json --libraries ./lib -- ./llama-cli -m model.gguf            for this machine
  moescope plan -o plan.json --sysroot pulled --features device.json -- /data/local/tmp/llama-cli
  moescope plan -o plan.json --learn first/ --sysroot pulled --features device.json -- /data/local/tmp/llama-cli
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-o", "--output", type=Path, default=Path("plan.json"), help="file of the plan (default: plan.json)")
    parser.add_argument("--sysroot", type=Path, help="folder of files copied from a device, in the device's layout")
    parser.add_argument("--libraries", type=Path, action="append", default=[], help="folder or file of the engine; repeatable")
    parser.add_argument(
        "--features", type=Path, metavar="FILE", help="output of `moescope-recorder --probe-features` on the device"
    )
    parser.add_argument(
        "--learn", type=Path, action="append", default=[], help="a recorder's recording from which to learn graph loops"
    )
    parser.add_argument("--engine", default="auto", help="auto, or names separated by commas (default: auto)")
    parser.add_argument("--levels", default="all", help="all, or levels separated by commas (default: all)")
    add_probe_files(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGUMENTS to be recorded")


def run(args: argparse.Namespace) -> int:
    """Write the plan, and print what is missing."""
    added, functions = added_probes(args)
    levels, brought = with_needed(chosen_levels(args.levels))
    features = read_features(args.features)
    sysroot = str(args.sysroot.resolve()) if args.sysroot else ""
    engines = choose_engines(names_in(args.engine, "--engine"), added)
    planner = Planner(engines, levels, functions, lambda: features["fast_nop"], everywhere=True)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    folders = args.libraries or ([args.sysroot] if args.sysroot else library_folders(words))
    loops = [loop for folder in args.learn for loop in of_recording(folder)]
    place = FileRoot(sysroot, features["arch"])
    plan = compose_plan(planner, place, find_executables(words, sysroot), [folder.resolve() for folder in folders], loops)
    if not planner.rows:
        raise TracerError("no engine library was found for this machine: give its folder with --libraries")
    with invoking_user().acting():
        write_plan(args.output, plan)
    for warning in brought + planner.warnings + planner.named.missing():
        print_plain(warning, sys.stderr)
    files = [file for file in plan["files"] if file["rows"]]
    print_plain(
        f"plan          {args.output}   {sum(len(file['rows']) for file in files)} probes in {len(files)} files, {place.arch}"
    )
    return 0


def read_features(path: Path | None) -> dict[str, Any]:
    """What placement depends on: the device's architecture, and whether its kernel executes a probed nop without a step."""
    if not path:
        return {"arch": platform.machine(), "fast_nop": has_fast_nop()}
    try:
        features = json.loads(read_text(path))
        if features["arch"] in ARCHITECTURES and isinstance(features["fast_nop"], bool):
            return dict(features)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise TracerError(f"{path} is not the output of `moescope-recorder --probe-features`: write it again on the device")


def find_executables(words: list[str], sysroot: str) -> list[str]:
    """The executables that a command's words name, by their paths here."""
    paths = [f"{sysroot}/{word}" if sysroot else shutil.which(word) for word in words]
    return [path for path in paths if path and os.path.isfile(path)]


def library_folders(words: list[str]) -> list[Path]:
    """The usual folders of a program's libraries: its own, and those in LD_LIBRARY_PATH."""
    folders = [Path(path).resolve().parent for path in find_executables(words[:1], "")]
    folders = [folder for each in folders for folder in (each, each.parent / "lib") if each.name != "bin" or folder != each]
    folders += [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    return [folder for folder in folders if folder.is_dir()]
