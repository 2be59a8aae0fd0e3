"""One dispatcher for all command lines: imports only the used verb, and turns errors into one line and an exit code.

A verb is a module `PACKAGE/commands/VERB.py` with `prepare_parser(parser)` and `run(args) -> exit code`: 0 good, 1 a finding,
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

from moescope.answers import forget_labels
from moescope.errors import UserError
from moescope.plain import doubts, one_line

GOOD, WRONG_USE, INTERRUPTED = 0, 2, 130
OWN_PACKAGES = ("moescope", "tracer", "analyzer", "views", "runtime")
BEFORE = {"runtime": "runtime.telemetry.probes:guard_mapped_files"}
"""Package → `module:function` that each of its verbs calls first."""
VERB_WIDTH = 18
ANSWER_S = 1.0  # an error this soon after Ctrl-C is attributed to it


@dataclass(frozen=True)
class Verb:
    """A verb: its module, imported when it is used, and the exit code of its own failure, wrong use included."""

    module: str
    help: str
    words: Mapping[str, "Verb"] = field(default_factory=dict)
    """First word → a verb of its own, with its own arguments; that of `--` where this is among the words, at any place."""
    failure: int = WRONG_USE

    def load(self) -> Any:
        """Import the verb's module."""
        return import_module(self.module)

    def chosen(self, words: list[str]) -> tuple[str, "Verb", list[str]]:
        """(the word that selects a verb of its own, that verb, the other words); ("", itself, words) without one."""
        if "--" in self.words and "--" in words:
            return "", self.words["--"], words
        if words and words[0] in self.words:
            return words[0], self.words[words[0]], words[1:]
        return "", self, words

    def prepare(self) -> None:
        """Run the preparation for all verbs of its package."""
        module, _, function = BEFORE.get(self.module.partition(".")[0], "").partition(":")
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
        signal.signal(signal.SIGINT, note_interrupt)
        try:
            return self.dispatch(sys.argv[1:])
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python shuts down, its own handler would print a traceback

    def dispatch(self, words: list[str]) -> int:
        """Run the verb named by the first of these words; returns the exit code."""
        name = words[0] if words else ""
        if name in self.verbs:
            word, verb, rest = self.verbs[name].chosen(words[1:])
            return self.call(verb, " ".join(filter(None, (name, word))), rest)
        if name in ("-h", "--help"):
            return exit_code_of(self.label, lambda: print(self.help()))
        if name == "--version" and self.version:
            print(self.version())
            return GOOD
        print(self.complaint(name), file=sys.stderr)
        return WRONG_USE

    def call(self, verb: Verb, form: str, words: list[str]) -> int:
        """Run a verb; returns the exit code, its own number if it fails."""
        try:
            return exit_code_of(self.label, lambda: run_verb(verb, self.prog, form, words), verb.failure)
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


def run_verb(verb: Any, prog: str, form: str, words: Sequence[str]) -> int:
    """Load a verb, parse its words, run it; `args.form` is what was typed to select it."""
    module = verb.load()
    parse = getattr(module, "parse", argparse.ArgumentParser.parse_args)
    args = parse(parser_of(module, f"{prog} {form}", verb.help, verb.words), words)
    args.form = form
    verb.prepare()
    forget_labels()
    return int(module.run(args))


def parser_of(module: Any, prog: str, about: str, below: Mapping[str, Verb] | None = None) -> argparse.ArgumentParser:
    """A verb's parser; its help lists the verbs `below` it."""
    lines = [f"  {word:<{VERB_WIDTH}}{verb.help}" for word, verb in (below or {}).items()]
    words = "\n".join([f"other forms (`{prog} FORM --help`)", *lines]) if lines else ""
    has_examples = hasattr(module, "EXAMPLES")
    parser = Parser(
        prog=prog,
        description=about if has_examples else module.__doc__ or about,
        epilog="\n\n".join(filter(None, (module.EXAMPLES if has_examples else "", words))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.prepare_parser(parser)
    return parser


def note_interrupt(*_: object) -> None:
    """Handle Ctrl-C and note its time, since interrupted code, such as an import of C code, may raise another error."""
    interrupts.append(time.monotonic())
    raise KeyboardInterrupt


interrupts: list[float] = []


def exit_code_of(label: str, action: Callable[[], int | None], failure: int = WRONG_USE) -> int:
    """The action's exit code, or `failure`; errors that a user can cause become one line on standard error."""
    try:
        code = action() or GOOD
        sys.stdout.flush()
        return code
    except UserError as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        reason = missing_package_text(error)
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
    print(f"{label}: {one_line(reason)}", file=sys.stderr)
    return failure


def missing_package_text(error: ModuleNotFoundError) -> str:
    """The message for a package that is not installed, with the remedy; a missing Python module of this project is a bug."""
    name = error.name or ""
    package, _, module = name.partition(".")
    if package not in OWN_PACKAGES:
        from moescope.extras import install_remedy

        return f"{package} is not installed: {install_remedy(package)}"
    if not module.rpartition(".")[2].startswith("_"):
        raise error
    return f"{name} is not built: run `make build`"
