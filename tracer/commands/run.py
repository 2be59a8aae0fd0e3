"""`moescope run`: trace a command, from its first instruction to its end."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moescope.command_line import note_interrupt
from moescope.interrupts import ENDING, ended_by_signals
from moescope.plain import plain_text, print_plain
from tracer.commands.on_device import add_on_and_libraries, record_on
from tracer.commands.options import Choice, add_options, choice_of, default_output
from tracer.commands.status import Reading, Status
from tracer.config import parse
from tracer.errors import TargetError, TracerError
from tracer.planning.answers import Message
from tracer.planning.here import Attendance, Recorder, give_up_root
from tracer.planning.loops import KeptLoops
from tracer.probes.plan import KERNEL
from tracer.recording.paths import VENV_PYTHON, Owner, invoking_user

__all__ = ["EXAMPLES", "parse", "prepare_parser", "record", "run"]

EXAMPLES = """examples:
  sudo moescope run                                  the bundled demo: prefill on NPU (emulated on x86-64), decode on CPU
  sudo moescope run -- ./llama-bench -m model.gguf   any engine declared in tracer/engines
  sudo moescope run --levels token,expert -o out -- python my_program.py
  sudo moescope run --only-slower-than 50ms -- ./llama-bench -m model.gguf   keep only what happened in slow steps
  sudo moescope run --min-tps 5 -- ./llama-bench -m model.gguf           costly levels are off while decode is slower
  sudo moescope run --config phone.toml -- ./llama-bench -m model.gguf   options from a file, e.g. levels = "token,expert"
  moescope run --on ssh:root@board -- ./llama-cli -m model.gguf   on another machine (docs/devices.md)
after --duration or --tokens the command runs on untraced; the tracer writes its results and waits for the command's end
the exit code is the command's, 128 + N if signal N ended it, and 125 if the tracer failed; lost records do not change it
"""
DEMO_OPTIONS = "--max-new-tokens 32 --prefill-backend auto --decode-backend cpu --chunk 16 --tiers 1,8 --expert-cache 3MiB"
DEMO_PROMPT = (
    "The router looks at the token and picks a few experts. A cache keeps the experts that were used last, "
    "and a good guess hides the load behind the computation. Numbers need company: where did the time go?"
)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser)
    add_on_and_libraries(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGUMENTS (default: the bundled demo)")


def run(args: argparse.Namespace) -> int:
    """Trace the command; the exit code is the command's, 128 plus a signal's number, or 125 if the tracer fails."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.on:
        return record_on(args, words, show_results)
    with discarded_unless_begun(args):
        choice = choice_of(args)
        command = words or demo_command(choice)
        return record(choice, Subject(command, Path.cwd(), ["--", *command], f"{shlex.join(command)[:120]}"), not args.no_views)


def python() -> str:
    """The Python interpreter that has the project's packages."""
    return str(VENV_PYTHON) if VENV_PYTHON.exists() else sys.executable


def as_owner(owner: Owner, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run one of this project's modules as the invoking user."""
    drop = owner.become if os.geteuid() == 0 and owner.uid else None
    return subprocess.run([python(), *command], preexec_fn=drop, env=owner.environment(), check=False)


def demo_command(choice: Choice) -> list[str]:
    """The bundled demo's command line; its model is generated from a seed the first time."""
    owner, folder = choice.owner, choice.output.resolve()
    model = owner.kept() / "demo-model"
    if not (model / "config.json").exists():
        print_progress(f"writing the demo model to {model}")
        done = as_owner(owner, ["-m", "moescope", "convert", "demo", str(model)])
        if done.returncode:
            raise TargetError(f"the demo model could not be written to {model}; see the line above")
    qnn = ["--qnn-profile", "detailed", "--qnn-profile-dir", str(folder / "qnn")]
    log = ["--log", str(folder / "runtime.json")]
    return [python(), "-m", "moescope", "generate", str(model), "--prompt", DEMO_PROMPT, *DEMO_OPTIONS.split(), *qnn, *log]


def print_progress(line: str) -> None:
    """Print a line of progress."""
    print(f"moescope: {plain_text(line)}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Subject:
    """The program to record."""

    command: list[str]
    folder: Path
    """The folder of relative paths on its command line."""
    words: list[str]
    """What names it to the recorder: `--pid N`, or the command behind `--`."""
    shown: str
    manifest: dict[str, Any] = field(default_factory=dict)
    """What is known of it beforehand."""


def record(choice: Choice, subject: Subject, with_views: bool) -> int:
    """Record and write the results; shared by `run` and `attach`. The exit code is the recorder's.

    The recorder is started with root; this process gives it up before it reads anything that the user named.
    """
    results = Results(choice, with_views)
    print_progress(f"recording {subject.shown} to {choice.output}")
    with (
        stopped_by_signals(Recorder.start([*choice.options, *subject.words], choice.given["loader"])) as recorder,
        closing(Status()) as status,
    ):
        give_up_root(choice.owner)
        loops = KeptLoops.of(choice.owner)
        given = {"options": choice.given, **subject.manifest}
        show = partial(show_progress, status)
        attendance = Attendance(recorder, choice.planner, subject.command, subject.folder, given, loops, show, results.write)
        code = attendance.run()
    results.write()
    if code < 0 and recorder.stopped_by:
        return 128 - code
    if code < 0:
        raise TracerError(f"the recorder was ended by signal {-code}; what was recorded before is readable")
    return code


@contextmanager
def stopped_by_signals(recorder: Recorder) -> Iterator[Recorder]:
    """Pass SIGINT and SIGTERM on to the recorder, which has other rights; it is never left behind."""
    handlers = {number: signal.signal(number, recorder.stop) for number in ENDING}
    try:
        yield recorder
    except BaseException:
        recorder.stop(signal.SIGINT)
        raise
    finally:
        recorder.link.close()
        recorder.process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def show_progress(status: Status, now: Message) -> None:
    """Show the recorder's counters in the status line."""
    status.show(Reading(now["decode_steps"], now["records"], now["lost"], now["probe_ns"], tuple(now["levels"])))


@dataclass
class Results:
    """Writes a recording's views and says what to do next, once: while a command outlives its recording, or at the end."""

    choice: Choice
    with_views: bool
    is_written: bool = False

    def write(self) -> None:
        """Write them, unless that was done or nothing was recorded."""
        folder = self.choice.output
        if self.is_written or not (folder / "manifest.json").exists():
            return
        self.is_written = True
        manifest = json.loads((folder / "manifest.json").read_text())
        saw_engine = any(row["engine"] != KERNEL for row in manifest["probes"])
        if not saw_engine:
            print_progress("no engine that tracer/engines declares was seen: steps are looked for from outside")
        if self.with_views:
            with ended_by_signals(lambda: None):
                write_results(folder, self.choice.owner, ended=manifest["target"]["exit_code"] is not None)
        sys.stdout.flush()
        print_stacks(folder)
        print_progress(next_step(folder, saw_engine))


@contextmanager
def discarded_unless_begun(args: argparse.Namespace) -> Iterator[None]:
    """Remove the recording's folder if an error or a signal has left nothing in it."""
    args.output, owner = args.output or default_output(), invoking_user()
    is_new = not args.output.exists()
    signal.signal(signal.SIGTERM, note_interrupt)
    try:
        yield
    finally:
        with owner.acting(), suppress(OSError):
            if is_new:
                args.output.rmdir()


VIEWS = {"trace.pftrace": "timeline", "report.html": "report", "profdag.html": "ProfDAG"}


def write_results(output: Path, owner: Owner, ended: bool = False) -> None:
    """Write tables, summary and views as the invoking user, without root.

    If the target `ended` here, the machine's ceilings may be measured: nothing is disturbed by that, and it is this machine.
    """
    as_owner(owner, ["-m", "moescope", "write", str(output), *["--ceilings"] * ended])
    as_owner(owner, ["-m", "moescope", "summary", str(output)])
    for name, what in VIEWS.items():
        if (output / name).exists():
            print_plain(f"{what:<9} {output / name}")


def show_results(output: Path, owner: Owner) -> None:
    """Write the results of a recording from another machine, and print the next step."""
    write_results(output, owner)
    sys.stdout.flush()
    print_stacks(output)
    print_progress(next_step(output, True))


def print_stacks(folder: Path) -> None:
    """Print how many stacks a recording has and what they take on disk, if it has any."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if recorded := manifest.get("stacks"):
        size, seconds = (folder / "stacks.bin").stat().st_size, max(manifest["duration_ns"] / 1e9, 1e-3)
        taken = f"{recorded['samples']:,} samples, {recorded['sent']:,} stacks of waits; {size / seconds / 1e6:.2f} MB/s"
        paused = " (--max-overhead paused them)" if (manifest.get("sampling") or {}).get("share_on", 1) < 1 else ""
        print_progress(f"stacks: {taken}, {recorded['lost']:,} lost{paused}")


def next_step(folder: Path, saw_engine: bool) -> str:
    """The suggested next command, in one line."""
    if not saw_engine:
        return f"next: `moescope findings {shlex.quote(str(folder))}`; `moescope probes PROGRAM`: what --step-at may name"
    verb, what = ("open", "shows the timeline") if (folder / "trace.pftrace").exists() else ("write", "writes its views")
    return f"next: `moescope {verb} {shlex.quote(str(folder))}` {what}"
