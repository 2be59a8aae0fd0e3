"""Names from outside as text that a terminal shows and never obeys."""

import re
import sys
from functools import cache
from typing import Any, TextIO

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that change the direction of text, and halves of surrogate pairs."""
CONTROL_BUT_LAYOUT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_text(value: Any) -> str:
    """One line without control characters: each is shown as Python writes it, `\\x1b`."""
    return CONTROL.sub(_shown, str(value))


def plain_lines(value: Any) -> str:
    """The same for text of several lines: line ends and tabs stay."""
    return CONTROL_BUT_LAYOUT.sub(_shown, str(value))


def for_output(text: str) -> str:
    """What goes to standard output: exact in a file or a pipe, without control characters on a terminal."""
    return plain_lines(text) if sys.stdout.isatty() else text


def one_line(message: Any) -> str:
    """A message whose line breaks became spaces, without control characters."""
    return plain_text(" ".join(str(message).split()))


def print_plain(line: Any, file: TextIO | None = None) -> None:
    """Print a line that holds names from outside."""
    print(plain_text(line), file=file)


doubts: list[str] = []
"""What was read and may not be as it was written: what goes wrong with it is no bug."""


@cache
def warn(line: str) -> None:
    """Say on standard error what does not stop the work; the same line once."""
    print(f"warning: {one_line(line)}", file=sys.stderr)


def _shown(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
