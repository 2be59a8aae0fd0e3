"""One dispatcher for all command lines: imports only the used verb, and turns errors into one line and an exit code.

A verb is a module `ROOM/commands/VERB.py` with `prepare_parser(parser)` and `run(args) -> exit code`: 0 good, 1 a finding,
2 wrong use. Its help ends with its docstring (or `EXAMPLES`); an optional `parse(parser, words)` replaces argparse's parsing.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from moescope.calling import as_called
from moescope.errors import UserError
from moescope.plain import doubts, one_line

GOOD, WRONG_USE, INTERRUPTED = 0, 2, 130
OWN_PACKAGES = ("moescope", "tracer", "analyzer", "views", "runtime")
VERB_WIDTH = 18
ANSWER_S = 1.0  # an error this soon after Ctrl-C is attributed to it


@dataclass(frozen=True)
class Room:
    """A part of the project and its verbs: name → help."""

    name: str
    about: str
    verbs: dict[str, str]
    before: str = ""
    """`module:function` that every verb of the room calls first."""
    label: str = ""
    """The prefix of its messages, if it is not its name."""
    failures: dict[str, int] = field(default_factory=dict)
    """Verb → exit code of its own failure, wrong use included, if it is not 2."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run a verb of `python -m ROOM`; returns the exit code."""
        return Program(f"python -m {self.name}", self.label or self.name, self.about, {"": self.table()}).main(argv)

    def table(self) -> dict[str, "Verb"]:
        """The room's verbs, loaded when used."""
        return {name: Verb(self, name, text) for name, text in self.verbs.items()}


@dataclass(frozen=True)
class Verb:
    """A verb, by the name that its room gives it."""

    room: Room
    name: str
    help: str

    def load(self) -> Any:
        """Import the verb's module."""
        return import_module(f"{self.room.name}.commands.{self.name.replace('-', '_')}")

    @property
    def failure(self) -> int:
        """The exit code of its own failure."""
        return self.room.failures.get(self.name, WRONG_USE)

    def prepare(self) -> None:
        """Run the room's preparation for all verbs."""
        module, _, function = self.room.before.partition(":")
        if module:
            getattr(import_module(module), function)()


@dataclass(frozen=True)
class Program:
    """A command line: how it is typed, the prefix of its messages, its verbs in groups, its version."""

    prog: str
    label: str
    about: str
    groups: Mapping[str, Mapping[str, Any]]
    version: Callable[[], str] | None = field(default=None)

    @property
    def verbs(self) -> dict[str, Any]:
        """All verbs."""
        return {name: verb for group in self.groups.values() for name, verb in group.items()}

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the verb named by the first word; returns the exit code."""
        if argv is not None or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_DFL):
            return self.dispatch(list(sys.argv[1:] if argv is None else argv))
        signal.signal(signal.SIGINT, interrupt)
        try:
            return self.dispatch(sys.argv[1:])
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python shuts down, its own handler would print a traceback

    def dispatch(self, words: list[str]) -> int:
        """Run the verb named by the first of these words; returns the exit code."""
        name = words[0] if words else ""
        if name in self.verbs:
            return self.call(self.verbs[name], f"{self.prog} {name}", words[1:])
        if name in ("-h", "--help"):
            return guarded(self.label, lambda: print(self.help()))
        if name == "--version" and self.version:
            print(self.version())
            return GOOD
        print(self.complaint(name), file=sys.stderr)
        return WRONG_USE

    def call(self, verb: Verb, prog: str, words: list[str]) -> int:
        """Run a verb; returns the exit code, its own number if it fails."""
        try:
            return guarded(self.label, lambda: run(verb, prog, words), verb.failure)
        except SystemExit as end:
            if end.code != WRONG_USE:
                raise
            return verb.failure

    def help(self) -> str:
        """The help: one line per verb, by groups."""
        lines = [f"usage: {self.prog} VERB ...", "", self.about]
        for title, verbs in self.groups.items():
            lines += ["", title or "verbs"]
            lines += [f"  {name:<{VERB_WIDTH}}{verb.help}" for name, verb in verbs.items()]
        return "\n".join([*lines, "", f"`{self.prog} VERB --help` shows the options of a verb, with examples."])

    def complaint(self, name: str) -> str:
        """The error for an unknown first word, with the verb that was perhaps meant."""
        if not name:
            return f"{self.help()}\n\n{self.label}: a verb is missing"
        from difflib import get_close_matches

        near = get_close_matches(name, self.verbs, n=3)
        meant = f"did you mean {' or '.join(near)}?" if near else f"`{self.prog} --help` lists them"
        return f"{self.label}: there is no verb {one_line(name)!r}; {meant}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors show control characters of what was typed instead of passing them to the terminal."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        super().error(one_line(message))


def run(verb: Any, prog: str, words: Sequence[str]) -> int:
    """Load a verb, parse its words, run it."""
    module = verb.load()
    parse = getattr(module, "parse", argparse.ArgumentParser.parse_args)
    args = parse(parser_of(module, prog, verb.help), words)
    verb.prepare()
    return int(module.run(args))


def parser_of(module: Any, prog: str, about: str) -> argparse.ArgumentParser:
    """A verb's parser; its texts name commands as the user called them."""
    has_examples = hasattr(module, "EXAMPLES")
    parser = Parser(
        prog=prog,
        description=as_called(about if has_examples else module.__doc__ or about),
        epilog=as_called(module.EXAMPLES) if has_examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.prepare_parser(parser)
    for action in parser._actions:
        action.help = action.help and as_called(action.help)
    return parser


def interrupt(*_: object) -> None:
    """Handle Ctrl-C and note its time, since interrupted code, such as an import of C code, may raise another error."""
    interrupts.append(time.monotonic())
    raise KeyboardInterrupt


interrupts: list[float] = []


def guarded(label: str, action: Callable[[], int | None], failure: int = WRONG_USE) -> int:
    """The action's exit code, or `failure`; errors that a user can cause become one line on standard error."""
    try:
        code = action() or GOOD
        sys.stdout.flush()
        return code
    except UserError as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        reason = missing(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards output that is still to be flushed
        return GOOD
    except MemoryError:
        reason = "there is not enough memory: raise its limit (ulimit -v), or end other programs"
    except OSError as error:
        reason = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    except Exception as error:
        if interrupts and time.monotonic() - interrupts[-1] < ANSWER_S:
            return INTERRUPTED
        if not doubts and failure == WRONG_USE:
            raise
        if not doubts:
            traceback.print_exc()
            return failure
        reason = f"{doubts[-1]} cannot be read: it is damaged, or not from MoEScope ({type(error).__name__}: {error})"
    print(f"{label}: {one_line(as_called(reason))}", file=sys.stderr)
    return failure


def missing(error: ModuleNotFoundError) -> str:
    """The message for a package that is not installed, with the remedy; a missing Python module of this project is a bug."""
    name = error.name or ""
    package, _, module = name.partition(".")
    if package not in OWN_PACKAGES:
        from moescope.extras import remedy

        return f"{package} is not installed: {remedy(package)}"
    if not module.rpartition(".")[2].startswith("_"):
        raise error
    return f"{name} is not built: run `make build`"
