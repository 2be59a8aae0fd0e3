"""Options that several verbs share, and the way from them to a session."""

import argparse
import os
import time
from pathlib import Path

from tracer.engines import LEVELS, choose
from tracer.errors import RequirementError, TracerError
from tracer.functions import read_probe_files
from tracer.loaders import LOADERS
from tracer.paths import Owner, invoking_user
from tracer.session import Options

RING_MIB = 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """Engines, levels, loader, output."""
    parser.add_argument("-o", "--output", type=Path, help="folder of the recording (default: recordings/<time>)")
    parser.add_argument("--engine", default="auto", help="auto, or names separated by commas (default: auto)")
    parser.add_argument("--levels", default="all", help=f"all, or a choice of {','.join(LEVELS)} (default: all)")
    parser.add_argument(
        "--loader", choices=sorted(LOADERS), default="libbpf", help="how programs get into the kernel (default: libbpf)"
    )
    parser.add_argument(
        "--ring-mib", type=int, default=RING_MIB, help=f"size of each of the two rings, a power of two (default: {RING_MIB})"
    )
    add_probe_files(parser)
    parser.add_argument("--no-views", action="store_true", help="record only; no summary, trace or report")


def add_probe_files(parser: argparse.ArgumentParser) -> None:
    """Functions and engines of the user's own."""
    text = "TOML file that names functions or an engine to probe as well (docs/engines.md); may be given again"
    parser.add_argument("--probes", type=Path, action="append", default=[], metavar="FILE", help=text)


def need_root() -> None:
    """Raise where the user may not load BPF programs."""
    if os.geteuid() != 0:
        raise RequirementError("not root: probes need root; type `sudo python -m tracer ...` (see `python -m tracer doctor`)")


def chosen_levels(text: str) -> set[str]:
    """The set of levels in `a,b,c` or `all`."""
    levels = set(LEVELS) if text == "all" else {part.strip() for part in text.split(",") if part.strip()}
    unknown = levels - set(LEVELS)
    if unknown or not levels:
        raise TracerError(f"unknown level {', '.join(sorted(unknown)) or '(none)'}; known: all, {', '.join(LEVELS)}")
    return levels


def make_output(path: Path | None, owner: Owner) -> Path:
    """Create the folder of the recording, belonging to the owner; an existing recording is not overwritten."""
    folder = path or Path("recordings") / time.strftime("%Y%m%d-%H%M%S")
    if (folder / "manifest.json").exists():
        raise TracerError(f"{folder} holds a recording already; give another folder with -o")
    try:
        for parent in reversed([folder, *folder.parents]):
            if not parent.exists():
                parent.mkdir()
                os.chown(parent, owner.uid, owner.gid)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise TracerError(f"cannot write to {folder}: {error.strerror}; give a writable folder with -o") from None
    return folder


def session_options(args: argparse.Namespace, duration_s: float = 0.0) -> Options:
    """Everything a session needs; raises before anything has been touched."""
    need_root()
    if args.ring_mib < 1 or args.ring_mib & (args.ring_mib - 1):
        raise TracerError(f"--ring-mib {args.ring_mib} is not a power of two")
    added, functions = read_probe_files(args.probes)
    engines, levels, owner = choose(args.engine.split(","), added), chosen_levels(args.levels), invoking_user()
    output = make_output(args.output, owner)
    return Options(output, engines, levels, args.loader, args.ring_mib << 20, duration_s, owner, functions)
