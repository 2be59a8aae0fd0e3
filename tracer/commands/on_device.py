"""`--on TARGET`: the same verb on another machine, which needs neither Python nor a compiler; on several at once."""

import argparse
import contextlib
import hashlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moescope.errors import UserError
from tracer.commands.machine_options import add_on
from tracer.commands.options import (
    chosen_levels,
    default_output,
    make_output,
    named_events,
    planner_of,
    recorder_options,
    refuse_impossible,
    refuse_missing_levels,
)
from tracer.errors import FAILED, TracerError
from tracer.kernel.btf import blob_of
from tracer.planning.loops import KeptLoops
from tracer.recording.paths import Owner, invoking_user
from tracer.recording.user_files import read_text
from tracer.remote.answering import Answering
from tracer.remote.device import Device, connect_as_root, prepare
from tracer.remote.job import QUESTIONS, STATE, Job, start_job, unfetched_job
from tracer.remote.printer import Printer, ProgressLines
from tracer.remote.sysroot import Sysroot, files_of_command, files_of_process
from tracer.remote.transport import LinkError, short_name

BTF = "kernel.btf"
"""The name on a device of the file that --btf gives."""
WRONG, KILLED = 2, 128
INTERRUPTED = "interrupted before the recording was complete"
Then = Callable[[Path, Owner], None]


def add_on_and_libraries(parser: argparse.ArgumentParser) -> None:
    """Declare `--on` and `--libraries`, for verbs that record."""
    add_on(parser)
    text = "with --on: folder or file of the engine on that machine; repeatable (default: beside the command)"
    parser.add_argument("--libraries", action="append", default=[], metavar="PATH", help=text)


def parse_targets(words: list[str]) -> list[str]:
    """The named machines without duplicates; a file names one per line."""
    lines = [line for word in words for line in (read_text(word[1:]).splitlines() if word[:1] == "@" else [word])]
    named = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not named:
        raise TracerError(f"{words[0]} is not a machine: write ssh:USER@HOST, adb or exec:COMMAND, one per line")
    return list(dict.fromkeys(named))


@dataclass
class Visit:
    """A recording on one device, from connecting to the recording's folder on the host."""

    args: argparse.Namespace
    words: list[str]
    """The command, or a process id."""
    target: str
    output: Path
    printer: Printer
    alone: bool
    owner: Owner = field(default_factory=invoking_user)
    job: Job | None = None
    answering: Answering | None = None
    signals: list[int] = field(default_factory=list)
    """Those that were to end it."""
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
            self.printer.say(f"{error}{later}")
        except (UserError, OSError) as error:
            self.printer.say(error)
        return self.failure

    @property
    def failure(self) -> int:
        """The exit code if the recording fails: 128 + N if signal N ended it; that of `run` differs from a command's own."""
        if self.signals and not is_complete(self.job.output if self.job else self.output):
            return KILLED + self.signals[-1]
        return WRONG if "pid" in self.args else FAILED

    def resumed(self) -> Job | None:
        """The job that an earlier call had to leave on the device, or None."""
        places = [self.output] if self.alone else [path.parent for path in self.output.glob(f"*/{STATE}")]
        return next((job for place in places if (job := unfetched_job(place, self.target))), None)

    def begin(self) -> Job:
        """Plan for the device and start the job; if that fails, nothing stays on the device."""
        self.printer.progress("examining the device")
        with left_clean(prepare(connect_as_root(self.target))) as device:
            self.check()
            plan = self.plan(device)
            folder = make_output(self.output if self.alone else self.output / build_of(plan), self.owner)
            self.held.callback(remove_if_empty, folder)
            device.write("plan.json", json.dumps(plan).encode())
            if self.args.btf:
                device.write(BTF, blob_of(self.args.btf))
            if self.args.loader == "bcc":
                device.compile_with_bcc()
            self.check()
            self.printer.say(f"recording {' '.join(self.words)[:120]} to {folder}")
            return start_job(device, folder, *recorder_words(self.args, self.words, device.folder))

    def plan(self, device: Device) -> dict[str, Any]:
        """Pull the engine's files that are not kept here yet, and plan with them."""
        planner = planner_of(self.args, lambda: bool(device.features["fast_nop"]), everywhere=True)
        kept = kept_files()
        find = files_of_process if "pid" in self.args else files_of_command
        programs, files = find(device, planner, self.words, self.args.libraries)
        self.printer.progress(f"fetching {len(files)} files of the engine that are not cached yet")
        root = self.held.enter_context(kept.laid_out(device, files))
        plan = kept.plan(device, planner, programs, root)
        present = {name for file in plan["files"] for name in file["engines"]}
        self.answering = Answering(device, planner, kept, root, present)
        self.held.callback(self.answering.close)
        for warning in planner.warnings + planner.named.missing():
            self.printer.say(warning)
        return plan

    def attend(self, job: Job) -> int:
        """Follow the job to its end, fetch the recording, and clean up; returns the exit code."""
        with ThreadPoolExecutor(2) as others:
            following = [others.submit(job.follow, "output", self.printer.output)]
            if self.answering:  # a recording that another call began goes on by its plan
                following.append(others.submit(job.follow, QUESTIONS, self.answering.feed))
            status = job.follow("messages", self.printer.messages)
            for each in following:
                each.result()
        if len(self.signals) < 2:
            job.fetch(self.printer.progress)
        if (job.output / "manifest.json").exists():
            kept_files().learn(job.output)
        if status == str(FAILED) and job.device.is_full():
            self.printer.say("the device's disk is full: everything recorded before that was fetched")
        job.finish()
        code = int(status) if status.isdigit() else KILLED
        if code >= KILLED and not is_complete(job.output):  # otherwise it is the command that a signal ended
            self.printer.say(INTERRUPTED if self.signals else f"the recorder was killed (status {status})")
            return self.failure
        return self.failure if code == FAILED else code

    def interrupt(self, number: int) -> None:
        """Handle Ctrl-C: the first ends the recording and fetches it, the second abandons it."""
        self.signals.append(number)
        if self.job:
            self.job.interrupt(len(self.signals) > 1)

    def check(self) -> None:
        """Raise TracerError if Ctrl-C was pressed before the recording began."""
        if self.signals:
            raise TracerError(INTERRUPTED)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing was recorded."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def is_complete(folder: Path) -> bool:
    """Whether a recording's writer came to its end."""
    try:
        return bool(json.loads((folder / "manifest.json").read_text())["state"] == "complete")
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def left_clean(device: Device) -> Iterator[Device]:
    """Remove our folder from the device if something fails."""
    try:
        yield device
    except BaseException:
        with contextlib.suppress(LinkError):
            device.clean()
        raise


def recorder_words(args: argparse.Namespace, words: list[str], folder: str) -> tuple[list[str], list[str]]:
    """(the recorder's options, the command; no command if a process is followed). `folder`: ours on the device."""
    options = recorder_options(args, named_events(args), f"{folder}/{BTF}" if args.btf else None)
    return ([*options, "--pid", *words], []) if "pid" in args else (options, words)


def kept_files() -> Sysroot:
    """The store of the devices' files."""
    return Sysroot(invoking_user().cache() / "sysroot", KeptLoops.of(invoking_user()))


@contextlib.contextmanager
def inspected_device(target: str) -> Iterator[Device]:
    """A device for inspection, cleaned up afterwards."""
    device = prepare(connect_as_root(target))
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
    return re.sub(r"[^\w.@-]+", "_", short_name(target)).strip("_.") or "device"


def record_on(args: argparse.Namespace, words: list[str], then: Then) -> int:
    """Record on all devices that --on names, concurrently; `then` processes each recording as the host does its own."""
    refuse_impossible(args)
    refuse_missing_levels(args, chosen_levels(args.levels), bool(named_events(args)))
    if not words:
        raise TracerError("--on needs a command to run on that machine: -- COMMAND ARGUMENTS")
    named = parse_targets(args.on)
    alone = len(named) == 1
    output, lines = args.output or default_output(), ProgressLines()
    visits = [
        Visit(args, words, each, output if alone else output / folder_name(each), Printer(short_name(each), lines, alone), alone)
        for each in named
    ]
    try:
        codes = run_visits(visits)
    finally:
        lines.close()
    for visit in visits:
        if visit.job and not args.no_views and (visit.job.output / "manifest.json").exists():
            then(visit.job.output, visit.owner)
    return max(codes)


def run_visits(visits: list[Visit]) -> list[int]:
    """Run all visits concurrently; returns their exit codes. Ctrl-C reaches each of them."""

    presses: list[int] = []
    answered = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: presses.append(number))
    with ThreadPoolExecutor(len(visits)) as pool:
        running = [pool.submit(visit.run) for visit in visits]
        while wait(running, timeout=0.2).not_done:
            if answered < len(presses):
                for visit in visits:
                    visit.interrupt(presses[answered])
                answered += 1
    return [future.result() for future in running]
