"""`tracer run`: trace a command, from its first instruction to its end."""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from moescope.calling import as_called
from moescope.interrupts import ENDING, ended_by_signals
from moescope.plain import plain_text, print_plain
from tracer.commands.on_device import add_on_and_libraries, record_on
from tracer.commands.options import add_options, session_options
from tracer.config import parse
from tracer.control.status import Status
from tracer.errors import TargetError
from tracer.recording.paths import VENV_PYTHON, Owner
from tracer.session import Options, Session
from tracer.target.process import Followed, Target

__all__ = ["EXAMPLES", "parse", "prepare_parser", "record", "run"]

EXAMPLES = """examples:
  sudo python -m tracer run                                  the bundled demo: prefill on NPU (emulated on x86-64), decode on CPU
  sudo python -m tracer run -- ./llama-bench -m model.gguf   any engine declared in tracer/engines
  sudo python -m tracer run --levels token,expert -o out -- python my_program.py
  sudo python -m tracer run --only-slower-than 50ms -- ./llama-bench -m model.gguf   keep only what happened in slow tokens
  sudo python -m tracer run --min-tps 5 -- ./llama-bench -m model.gguf           costly levels are off while decode is slower
  sudo python -m tracer run --config phone.toml -- ./llama-bench -m model.gguf   options from a file, e.g. levels = "token,expert"
  python -m tracer run --on ssh:root@board -- ./llama-cli -m model.gguf   on another machine (docs/devices.md)
after --duration or --tokens the command runs on untraced; the tracer writes its results and waits for the command's end
the exit code is the command's, 128 + N if signal N ended it, and 125 if the tracer failed; lost records do not change it
"""
DEMO_OPTIONS = "--max-new-tokens 32 --prefill-backend auto --decode-backend cpu --chunk 16 --tiers 1,8 --expert-cache 3MiB"
WAIT_SECONDS = 0.1
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
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.on:
        return record_on(args, command, show_results)
    options = session_options(args)
    return record(options, lambda: Target(command or demo_command(options), options.owner), not args.no_views)


def python() -> str:
    """The Python interpreter that has the project's packages."""
    return str(VENV_PYTHON) if VENV_PYTHON.exists() else sys.executable


def as_owner(owner: Owner, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run one of this project's modules as the invoking user."""
    drop = owner.become if os.geteuid() == 0 and owner.uid else None
    return subprocess.run([python(), *command], preexec_fn=drop, env=owner.environment(), check=False)


def demo_command(options: Options) -> list[str]:
    """The bundled demo's command line; its model is generated from a seed the first time."""
    owner, folder = options.owner, options.output.resolve()
    model = owner.kept() / "demo-model"
    if not (model / "config.json").exists():
        say(f"writing the demo model to {model}")
        done = as_owner(owner, ["-m", "runtime", "demo-model", str(model)])
        if done.returncode:
            raise TargetError(f"the demo model could not be written to {model}; see the line above")
    qnn = ["--qnn-profile", "detailed", "--qnn-profile-dir", str(folder / "qnn")]
    log = ["--log", str(folder / "runtime.json")]
    return [python(), "-m", "runtime", "generate", str(model), "--prompt", DEMO_PROMPT, *DEMO_OPTIONS.split(), *qnn, *log]


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"moescope: {plain_text(line)}", file=sys.stderr, flush=True)


def record(options: Options, make_target: Any, with_views: bool) -> int:
    """Run a session over the target and write its results; shared by `run` and `attach`.

    The exit code is the command's; of a process that was running before, 1 if records were lost.
    """
    for number in ENDING:
        signal.signal(number, lambda number, _: setattr(session, "stop_requested", number))
    with contextlib.ExitStack() as undo:
        with discarded_unless_begun(options), ended_by_signals(partial(discard, options)):
            session = undo.enter_context(Session(options))
            say(f"loading programs ({options.loader}), measuring the cost of a probe")
            session.load()
            target: Target | Followed = make_target()
            session.undo.callback(target.abandon)
            say(f"recording {' '.join(target.command)[:120]} (pid {target.pid}) to {options.output}")
            status = Status()  # created before the target starts, which would wait for its imports
            session.follow(target)
        with discarded_unless_begun(options, TargetError), contextlib.closing(status):
            follow_to_the_end(session, target, status)
        conclude(session, target)
        if with_views and session.saw_engine():
            with ended_by_signals(lambda: None):
                write_results(options.output, options.owner, ended=target.exit_code is not None)
        sys.stdout.flush()
        say(as_called(next_step(options.output, session.saw_engine())))
    if not target.started_here:
        return int(bool(session.losses_at_end))
    if not session.interrupted:
        see_off(session, target)
    return exit_code(target.exit_code or 0)


def follow_to_the_end(session: Session, target: Target | Followed, status: Status) -> None:
    """Let the target run and record it; the recording is completed whatever happens, and says if it is not whole."""
    failure: BaseException | None = None
    try:
        target.release()
        session.run(lambda now: status.show(now.reading()) if status.due() else None)
    except BaseException as error:
        failure = error
        raise
    finally:
        status.close()
        session.finish(failure)


@contextlib.contextmanager
def discarded_unless_begun(options: Options, error: type[BaseException] = BaseException) -> Iterator[None]:
    """Remove the recording after an error that means that the target never ran."""
    try:
        yield
    except error:
        discard(options)
        raise


def exit_code(status: int) -> int:
    """The exit code for a command's status, as a shell has it: 128 plus the number of a signal, which is negative here."""
    return status if status >= 0 else 128 - status


def see_off(session: Session, target: Target | Followed) -> None:
    """Wait for a command that outlives the recording, unless interrupted."""
    while target.poll() and not session.stop_requested:
        time.sleep(WAIT_SECONDS)
    if session.stop_requested == signal.SIGTERM:
        target.end()


def discard(options: Options) -> None:
    """Remove the folder of a recording that never began."""
    with options.owner.acting():
        for name in ("events.bin", "events.sum", "details.bin", "details.sum", "manifest.json"):
            (options.output / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            options.output.rmdir()


def conclude(session: Session, target: Target | Followed) -> None:
    """Print how the recording ended."""
    for warning in session.probes.warnings:
        say(warning)
    lost = session.losses_at_end
    if lost:
        kinds = ", ".join(f"{kind} {count}" for kind, count in lost.items())
        say(f"{sum(lost.values()):,} records were lost ({kinds}); give a larger --ring-mib")
    if target.exit_code is None:
        say(f"detached; process {target.pid} keeps running, untraced")
    status = ""
    if target.exit_code:
        status = f"status {target.exit_code}" if target.exit_code > 0 else f"signal {-target.exit_code}"
        status = f"the command ended with {status}"
    if not session.saw_engine():
        what = "no engine that tracer/engines declares was seen, so only threads were recorded"
        status = f"{status}; {what}" if status else what
    if status:
        say(status)


VIEWS = {"trace.pftrace": "timeline", "report.html": "report", "profdag.html": "ProfDAG"}


def write_results(output: Path, owner: Owner, ended: bool = False) -> None:
    """Write tables, summary and views as the invoking user, without root.

    If the target `ended` here, the machine's ceilings may be measured: nothing is disturbed by that, and it is this machine.
    """
    as_owner(owner, ["-m", "views", "write", str(output), *["--ceilings"] * ended])
    as_owner(owner, ["-m", "analyzer", "summary", str(output)])
    for name, what in VIEWS.items():
        if (output / name).exists():
            print_plain(f"{what:<9} {output / name}")


def show_results(output: Path, owner: Owner) -> None:
    """Write the results of a recording from another machine, and print the next step."""
    write_results(output, owner)
    sys.stdout.flush()
    say(as_called(next_step(output, True)))


def next_step(folder: Path, saw_engine: bool) -> str:
    """The suggested next command, in one line."""
    if not saw_engine:
        return "next: `python -m tracer probes PROGRAM` shows what can be probed; docs/engines.md: how to declare an engine"
    verb, what = ("open", "shows the timeline") if (folder / "trace.pftrace").exists() else ("write", "writes its views")
    return f"next: `python -m views {verb} {shlex.quote(str(folder))}` {what}"
