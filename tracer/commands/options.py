"""Options that several verbs share, and what they choose."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.commands.machine_options import add_btf
from tracer.config import add_config, effective_options
from tracer.engines import LEVELS, Engine, choose_engines, with_needed
from tracer.errors import RequirementError, TracerError
from tracer.kernel.btf import check_file
from tracer.kernel.pmc import Event, events_named
from tracer.probes.denials import OTHER_PIDS, certain_denials, few_descriptors, has_other_namespace, has_own_rights
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.functions import Function, read_probe_files, step_function
from tracer.probes.planner import Planner
from tracer.recording.paths import Owner, invoking_user

PASSED_ON = (
    "duration",
    "tokens",
    "only_slower_than",
    "min_tps",
    "max_overhead",
    "ring_mib",
    "buffer",
    "sched",
    "stacks",
    "long_wait",
    "sysfs",
    "until_steady",
    "steady_for",
)
"""Options that the recorder has by the same names, and without if they are 0."""
RING_MIB, RING_MIB_ON_DEVICES = 32, 8
"""The defaults of --ring-mib."""
MOST_MINUTES = 15
"""How long --until-steady waits unless told."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare engines, levels, loader and output."""
    parser.add_argument("-o", "--output", type=output_folder, help="new folder of the recording (default: recordings/<time>)")
    parser.add_argument("--engine", default="auto", help="auto, or names separated by commas (default: auto)")
    parser.add_argument("--levels", default="all", help=f"all, or a choice of {','.join(LEVELS)} (default: all)")
    parser.add_argument(
        "--loader", choices=("bcc", "libbpf"), default="libbpf", help="library that loads the BPF programs (default: libbpf)"
    )
    add_btf(parser)
    parser.add_argument(
        "--buffer",
        choices=("ring", "perf"),
        default="ring",
        help="buffer that carries records from the kernel; kernels before 5.8 need perf (default: ring)",
    )
    help_text = "size of each of the two buffers (perf: of all CPUs together), a power of two"
    default = f"{RING_MIB}; {RING_MIB_ON_DEVICES} with --on"
    parser.add_argument("--ring-mib", type=int, help=f"{help_text} (default: {default})")
    add_limits(parser)
    parser.add_argument(
        "--sched",
        choices=("target", "all"),
        default="target",
        help="threads recorded by level sched: the target's and those that displace them, or all (default: target)",
    )
    parser.add_argument(
        "--pmc",
        default="",
        metavar="EVENTS",
        help="up to 4 counters per thread at operator boundaries: cycles,major-faults,r1c2 ... (default: none)",
    )
    add_stacks(parser)
    add_power(parser)
    add_probe_files(parser)
    parser.add_argument("--no-views", action="store_true", help="record only; no summary, trace or report")
    add_config(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Declare when to stop and what to leave out."""
    parser.add_argument(
        "--duration", type=seconds, default=0.0, metavar="TIME", help="how long to record: 10, 10s, 500ms (default: to the end)"
    )
    parser.add_argument("--tokens", type=int, default=0, metavar="N", help="stop recording after N steps")
    add_steady(parser)
    parser.add_argument(
        "--only-slower-than", type=seconds, default=0.0, metavar="TIME", help="keep only steps that take longer than this: 50ms"
    )
    parser.add_argument(
        "--min-tps",
        type=float,
        default=0.0,
        metavar="TPS",
        help="switch costly levels off while decode is slower than this, in tokens/s",
    )

    parser.add_argument(
        "--max-overhead",
        type=share,
        default=0.0,
        metavar="PERCENT",
        help="largest slowdown of decode; costly levels are enabled only part of the time: 10%% (default: no limit)",
    )


def add_steady(parser: argparse.ArgumentParser) -> None:
    """Declare what is waited for before a recording ends."""
    parser.add_argument(
        "--until-steady",
        type=minutes,
        nargs="?",
        const=MOST_MINUTES * 60,
        default=0.0,
        metavar="MINUTES",
        help="repeat the command until power, clocks and temperatures have settled while it runs, for at most MINUTES "
        f"({MOST_MINUTES} unless given), and stop recording then (docs/energy.md)",
    )
    text = "with --until-steady, how long they must not have moved (default: 60s)"
    parser.add_argument("--steady-for", type=seconds, default=0.0, metavar="TIME", help=text)


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Declare what is recorded of stacks."""
    parser.add_argument(
        "--stacks",
        type=int,
        nargs="?",
        const=199,
        default=0,
        metavar="HZ",
        help="sample the stacks of the target's threads, 199 times a second unless HZ is given (default: no stacks)",
    )
    parser.add_argument(
        "--long-wait",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="with --stacks, record the stack of each wait as long as this (default: 1ms)",
    )


def add_power(parser: argparse.ArgumentParser) -> None:
    """Declare how power sensors are read."""
    text = "readings of power sensors a second; 0: none (default: 10, fewer where they are costly)"
    parser.add_argument("--power", type=float, metavar="HZ", help=text)
    text = "load the CPUs in a pattern first, for the file of an external power meter (`moescope import FILE --onto RUN`)"
    parser.add_argument("--meter", action="store_true", help=text)
    text = "look for sensors of power and heat below this folder instead of /sys"
    parser.add_argument("--sysfs", metavar="DIR", help=text)


def share(text: str) -> float:
    """Parse a share: 10, 10%, 0.5%."""
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix("%")) / 100
        if 0 < value <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 10 or 10%, at most 100%")


def minutes(text: str) -> float:
    """Parse minutes, as seconds."""
    return 60 * seconds(text)


def seconds(text: str) -> float:
    """Parse a time in seconds: 2, 2s, 50ms, 300us."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if text.endswith(unit):
            with contextlib.suppress(ValueError):
                value = float(text.removesuffix(unit)) * factor
                if 0 < value < float("inf"):
                    return value
            break
    raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 2, 2s, 50ms or 300us")


def add_probe_files(parser: argparse.ArgumentParser) -> None:
    """Declare the option for files with the user's functions and engines."""
    text = "TOML file with further functions or an engine to probe (docs/engines.md); repeatable"
    parser.add_argument("--probes", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "begin a step whenever a thread enters this function of the program or of a library; repeatable"
    parser.add_argument("--step-at", action="append", default=[], metavar="[LIBRARY:]FUNCTION", help=text)


def added_probes(args: argparse.Namespace) -> tuple[list[Engine], list[Function]]:
    """The engines and functions that --probes and --step-at add."""
    added, functions = read_probe_files(args.probes)
    return added, [*functions, *map(step_function, args.step_at)]


def need_root() -> None:
    """Raise if BPF programs cannot be loaded by this process, or if these would see the target under another pid."""
    if os.geteuid() != 0 and not has_own_rights():
        raise RequirementError(f"not root: probes need root; type `sudo {command_for_sudo()} ...` (see `moescope doctor`)")
    for reason in (OTHER_PIDS if has_other_namespace("pid") else "", few_descriptors(), *certain_denials()):
        if reason:
            raise RequirementError(reason)


def command_for_sudo() -> str:
    """This program as sudo finds it, which knows the system's folders only."""
    program = Path(sys.argv[0]).absolute()
    package = program.parent.name if program.name == "__main__.py" else "tracer"
    return str(program) if program.name == "moescope" else f"python3 -m {package}"


def chosen_levels(text: str) -> set[str]:
    """The set of levels in `a,b,c` or `all`."""
    levels = set(LEVELS) if text == "all" else set(names_in(text, "--levels"))
    unknown = levels - set(LEVELS)
    if unknown:
        raise TracerError(f"unknown level {', '.join(sorted(unknown))}; known: all, {', '.join(LEVELS)}")
    return levels


def default_output() -> Path:
    """The folder of a recording for which none is given."""
    return Path("recordings") / time.strftime("%Y%m%d-%H%M%S")


def make_output(folder: Path, owner: Owner) -> Path:
    """Create the folder with the owner's rights; refuses one that is not empty."""
    try:
        with owner.acting():
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(entry.name for entry in os.scandir(folder))
            if not names:
                probe = folder / "manifest.json.new"
                probe.touch(exist_ok=False)
                probe.unlink()
    except OSError as error:
        raise TracerError(
            f"cannot write to {folder}: {error.strerror}; give a folder that {owner.name} may write with -o"
        ) from None
    if "manifest.json" in names:
        raise TracerError(f"{folder} already holds a recording; give another folder with -o")
    if names:
        raise TracerError(f"{folder} is not empty (it holds {names[0]}): give a new or an empty folder with -o")
    return folder


def output_folder(text: str) -> Path:
    """The folder that -o names."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("an empty name; give a folder")
    return Path(text)


def names_in(text: str, option: str) -> list[str]:
    """The names in `a,b,c`; raises TracerError if one is empty."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise TracerError(f"{option} {text!r} has an empty name; write a,b,c")
    return names


def refuse_impossible(args: argparse.Namespace) -> None:
    """Raise TracerError for values that no session can use."""
    if args.ring_mib is not None and (args.ring_mib < 1 or args.ring_mib & (args.ring_mib - 1)):
        raise TracerError(f"--ring-mib {args.ring_mib} is not a power of two")
    for name in ("tokens", "min_tps"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise TracerError(f"--{name.replace('_', '-')} {getattr(args, name)} is not a positive number")
    if args.power is not None and not 0 <= args.power <= 1000:
        raise TracerError(f"--power {args.power:g} is not between 0 and 1000 readings a second")
    if args.btf:
        check_file(args.btf)
    if args.min_tps and args.max_overhead:
        raise TracerError("--min-tps and --max-overhead cannot be combined, as both switch levels")


def refuse_missing_levels(args: argparse.Namespace, levels: set[str], counters: bool) -> None:
    """Raise TracerError if an option needs a level that is not recorded."""
    by_tokens = ("tokens", "min_tps", "max_overhead", "only_slower_than", "until_steady")
    if any(getattr(args, name) for name in by_tokens) and "token" not in levels:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in by_tokens)
        raise TracerError(f"{names} depend on steps: add the level token to --levels")
    if counters and "operator" not in levels:
        raise TracerError("--pmc reads counters where operators begin and end: add operator to --levels")


def planner_of(args: argparse.Namespace, fast_nop: Callable[[], bool] = has_fast_nop, everywhere: bool = False) -> Planner:
    """A planner for the engines, levels and functions that the user chose; `everywhere`: for a recorder that asks nothing."""
    added, functions = added_probes(args)
    engines = choose_engines(names_in(args.engine, "--engine"), added)
    levels, brought = with_needed(chosen_levels(args.levels))
    planner = Planner(engines, levels, functions, fast_nop, everywhere)
    planner.warnings += brought
    return planner


def named_events(args: argparse.Namespace) -> tuple[Event, ...]:
    """The events that --pmc names, whether or not a machine has them."""
    return events_named(names_in(args.pmc, "--pmc")) if args.pmc else ()


def recorder_options(args: argparse.Namespace, events: tuple[Event, ...], btf: str | Path | None) -> list[str]:
    """The recorder's options."""
    chosen = {name: getattr(args, name) for name in PASSED_ON}
    options = [word for name, value in chosen.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--btf", str(btf)] if btf else []
    options += ["--meter"] * args.meter
    options += ["--power", f"{args.power:g}"] if args.power is not None else []
    return options + (["--pmc", ",".join(event.word for event in events)] if events else [])


@dataclass(frozen=True)
class Choice:
    """A recording on this machine that the user asks for."""

    output: Path
    owner: Owner
    planner: Planner
    options: list[str]
    """The recorder's."""
    given: dict[str, Any]
    """All options in effect, for the manifest."""


def choice_of(args: argparse.Namespace) -> Choice:
    """What the options choose; raises before anything is changed."""
    need_root()
    if args.loader == "bcc" and os.geteuid() != 0:
        raise RequirementError("--loader bcc needs root: only the recorder's file has capabilities; leave it out")
    refuse_impossible(args)
    args.ring_mib = args.ring_mib or RING_MIB
    events = named_events(args)
    refuse_missing_levels(args, chosen_levels(args.levels), bool(events))
    planner, owner = planner_of(args), invoking_user()
    output = make_output(args.output, owner)
    options = ["-o", str(output), *recorder_options(args, events, args.btf)]
    return Choice(output, owner, planner, options, effective_options(args))
