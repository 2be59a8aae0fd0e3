"""`--on TARGET`: the same verb on another machine, which needs neither Python nor a compiler; on several at once."""

import argparse
import contextlib
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moescope.errors import UserError
from tracer.commands.options import chosen_levels, make_output, names_in, refuse_impossible, refuse_missing_levels
from tracer.engines import choose, with_needed
from tracer.errors import TracerError
from tracer.probes.functions import read_probe_files
from tracer.probes.planner import Planner
from tracer.recording.paths import Owner, invoking_user
from tracer.remote.answering import Answering
from tracer.remote.device import Device, reach, settle
from tracer.remote.job import QUESTIONS, STATE, Job, resumed, start
from tracer.remote.sysroot import Sysroot, files_of_command, files_of_process
from tracer.remote.transport import LinkError, short
from tracer.remote.voice import Board, Voice

HOST_ONLY = {
    "loader": "libbpf",
    "buffer": "ring",
    "only_slower_than": 0.0,
    "min_tps": 0.0,
    "max_overhead": 0.0,
    "sched": "target",
    "pmc": "",
    "btf": None,
}
"""Options that only the host's tracer has, with their defaults."""
GOOD, FINDING, WRONG = 0, 1, 2
Then = Callable[[Path, Owner], None]


def add_on(parser: argparse.ArgumentParser) -> None:
    """Declare `--on`."""
    text = "another machine: ssh:USER@HOST, adb, adb:SERIAL, exec:COMMAND, or @FILE of such lines; repeatable (docs/devices.md)"
    parser.add_argument("--on", action="append", default=[], metavar="TARGET", help=text)


def add_on_and_libraries(parser: argparse.ArgumentParser) -> None:
    """Declare `--on` and `--libraries`, for verbs that record."""
    add_on(parser)
    text = "with --on: folder or file of the engine on that machine; repeatable (default: beside the command)"
    parser.add_argument("--libraries", action="append", default=[], metavar="PATH", help=text)


def targets(words: list[str]) -> list[str]:
    """The named machines without duplicates; a file names one per line."""
    lines = [line for word in words for line in (Path(word[1:]).read_text().splitlines() if word[:1] == "@" else [word])]
    named = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not named:
        raise TracerError(f"{words[0]} is not a machine: write ssh:USER@HOST, adb or exec:COMMAND, one per line")
    return list(dict.fromkeys(named))


def refuse_host_only(args: argparse.Namespace) -> None:
    """Raise TracerError for options that the collector does not have."""
    given = [name for name, default in HOST_ONLY.items() if getattr(args, name) != default]
    if given:
        raise TracerError(f"--{given[0].replace('_', '-')} and --on cannot be combined: moescope-collect does not support it yet")


@dataclass
class Visit:
    """A recording on one device, from connecting to the recording's folder on the host."""

    args: argparse.Namespace
    words: list[str]
    """The command, or a process id."""
    target: str
    output: Path
    voice: Voice
    alone: bool
    owner: Owner = field(default_factory=invoking_user)
    job: Job | None = None
    answering: Answering | None = None
    interrupts: int = 0
    held: ExitStack = field(default_factory=ExitStack)
    """What is kept until the recording's end."""

    def run(self) -> int:
        """Record and fetch; returns the exit code. A failure is reported and does not affect the other devices."""
        try:
            with self.owner.acting(), self.held:
                self.job = self.resumed() or self.begin()
                return self.attend(self.job)
        except LinkError as error:
            later = f"; the recording continues there: run the same command with -o {self.output} to fetch it" if self.job else ""
            self.voice.say(f"{error}{later}")
        except (UserError, OSError) as error:
            self.voice.say(error)
        return WRONG

    def resumed(self) -> Job | None:
        """The job that an earlier call had to leave on the device, or None."""
        places = [self.output] if self.alone else [path.parent for path in self.output.glob(f"*/{STATE}")]
        return next((job for place in places if (job := resumed(place, self.target))), None)

    def begin(self) -> Job:
        """Plan for the device and start the job; if that fails, nothing stays on the device."""
        self.voice.progress("examining the device")
        with left_clean(settle(reach(self.target))) as device:
            self.check()
            plan = self.plan(device)
            folder = make_output(self.output if self.alone else self.output / build_of(plan), self.owner)
            device.write("plan.json", json.dumps(plan))
            self.check()
            self.voice.say(f"recording {' '.join(self.words)[:120]} to {folder}")
            return start(device, folder, *collector_words(self.args, self.words))

    def plan(self, device: Device) -> dict[str, Any]:
        """Pull the engine's files that are not kept here yet, and plan with them."""
        planner = planner_of(self.args, device)
        kept = kept_files()
        find = files_of_process if "pid" in self.args else files_of_command
        programs, files = find(device, planner, self.words, self.args.libraries)
        self.voice.progress(f"fetching {len(files)} files of the engine that are not cached yet")
        root = self.held.enter_context(kept.laid_out(device, files))
        plan = kept.plan(device, planner, programs, root)
        present = {name for file in plan["files"] for name in file["engines"]}
        self.answering = Answering(device, planner, kept, root, present)
        self.held.callback(self.answering.close)
        for warning in planner.warnings + planner.named.missing():
            self.voice.say(warning)
        return plan

    def attend(self, job: Job) -> int:
        """Follow the job to its end, fetch the recording, and clean up; returns the exit code."""
        with ThreadPoolExecutor(2) as others:
            following = [others.submit(job.follow, "output", self.voice.output)]
            if self.answering:  # a recording that another call began goes on by its plan
                following.append(others.submit(job.follow, QUESTIONS, self.answering.feed))
            status = job.follow("messages", self.voice.messages)
            for each in following:
                each.result()
        if self.interrupts < 2:
            job.fetch(self.voice.progress)
        if (job.output / "manifest.json").exists():
            kept_files().learn(job.output)
        if status == "2" and job.device.is_full():
            self.voice.say("the device's disk is full: everything recorded before that was fetched")
        job.finish()
        if status not in ("0", "1", "2"):
            self.voice.say(f"the collector was killed (status {status})")
        return int(status) if status in ("0", "1", "2") else WRONG

    def interrupt(self) -> None:
        """Handle Ctrl-C: the first ends the recording and fetches it, the second abandons it."""
        self.interrupts += 1
        if self.job:
            self.job.interrupt(self.interrupts > 1)

    def check(self) -> None:
        """Raise TracerError if Ctrl-C was pressed before the recording began."""
        if self.interrupts:
            raise TracerError("interrupted before the recording began")


@contextlib.contextmanager
def left_clean(device: Device) -> Iterator[Device]:
    """Remove our folder from the device if something fails."""
    try:
        yield device
    except BaseException:
        with contextlib.suppress(LinkError):
            device.clean()
        raise


def planner_of(args: argparse.Namespace, device: Device) -> Planner:
    """A planner for the engines, levels and functions that the user chose."""
    added, functions = read_probe_files(args.probes)
    engines = choose(names_in(args.engine, "--engine"), added)
    levels, _ = with_needed(chosen_levels(args.levels))
    return Planner(engines, levels, functions, lambda: bool(device.features["fast_nop"]), everywhere=True)


def collector_words(args: argparse.Namespace, words: list[str]) -> tuple[list[str], list[str]]:
    """(the collector's options, the command; no command if a process is followed)."""
    options = ["--duration", str(args.duration)] if args.duration else []
    options += ["--tokens", str(args.tokens)] if args.tokens else []
    options += ["--ring-mib", str(args.ring_mib)] if args.ring_mib else []
    return ([*options, "--pid", *words], []) if "pid" in args else (options, words)


def kept_files() -> Sysroot:
    """The store of the devices' files."""
    return Sysroot(invoking_user().kept() / "sysroot")


@contextlib.contextmanager
def visiting(target: str) -> Iterator[Device]:
    """A device for inspection, cleaned up afterwards."""
    device = settle(reach(target))
    try:
        yield device
    finally:
        device.clean()


def build_of(plan: dict[str, Any]) -> str:
    """The engine's build as eight digits, from the files that get probes."""
    ids = sorted(file["id"] for file in plan["files"] if file["rows"])
    return hashlib.sha256(" ".join(ids).encode()).hexdigest()[:8]


def folder_name(target: str) -> str:
    """The folder name for a target."""
    return re.sub(r"[^\w.@-]+", "_", short(target)).strip("_.") or "device"


def record_on(args: argparse.Namespace, words: list[str], then: Then) -> int:
    """Record on all devices that --on names, concurrently; `then` processes each recording as the host does its own."""
    refuse_impossible(args)
    refuse_host_only(args)
    refuse_missing_levels(args, chosen_levels(args.levels), False)
    if not words:
        raise TracerError("--on needs a command to run on that machine: -- COMMAND ARGUMENTS")
    named = targets(args.on)
    alone = len(named) == 1
    output, board = output_of(args.output), Board()
    visits = [
        Visit(args, words, target, output if alone else output / folder_name(target), Voice(short(target), board, alone), alone)
        for target in named
    ]
    try:
        codes = together(visits)
    finally:
        board.close()
    for visit in visits:
        if visit.job and not args.no_views and (visit.job.output / "manifest.json").exists():
            then(visit.job.output, visit.owner)
    return max(codes)


def together(visits: list[Visit]) -> list[int]:
    """Run all visits concurrently; returns their exit codes. Ctrl-C reaches each of them."""

    presses: list[int] = []
    answered = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: presses.append(1))
    with ThreadPoolExecutor(len(visits)) as pool:
        running = [pool.submit(visit.run) for visit in visits]
        while wait(running, timeout=0.2).not_done:
            if answered < len(presses):
                answered += 1
                for visit in visits:
                    visit.interrupt()
    return [future.result() for future in running]


def output_of(path: Path | None) -> Path:
    """The folder for all recordings of one call."""
    return path or Path("recordings") / time.strftime("%Y%m%d-%H%M%S")
