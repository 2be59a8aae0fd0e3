"""Text from outside, made safe: terminals show its control characters instead of executing them."""

import html
import re
import sys
from functools import cache
from typing import Any, TextIO

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that change the direction of text, and halves of surrogate pairs."""
CONTROL_BUT_LAYOUT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_text(value: Any) -> str:
    """One line without control characters: each is shown as Python writes it, `\\x1b`."""
    return CONTROL.sub(_escape_match, str(value))


def plain_lines(value: Any) -> str:
    """Text of several lines without control characters other than line ends and tabs."""
    return CONTROL_BUT_LAYOUT.sub(_escape_match, str(value))


def for_output(text: str) -> str:
    """Text for standard output: unchanged in a file or a pipe, without control characters on a terminal."""
    return plain_lines(text) if sys.stdout.isatty() else text


def one_line(message: Any) -> str:
    """A message with spaces instead of line breaks, without control characters."""
    return plain_text(" ".join(str(message).split()))


def markdown_text(text: str) -> str:
    """Text of one line, with Markdown and HTML escaped."""
    return html.escape("".join("\\" + c if c in "\\`*_{}[]#|!" else c for c in text), quote=False)


def print_plain(line: Any, file: TextIO | None = None) -> None:
    """Print a line that contains text from outside, without control characters."""
    print(plain_text(line), file=file)


doubts: list[str] = []
"""Paths of data that was read and may be damaged: errors in processing it are not bugs."""


@cache
def warn(line: str) -> None:
    """Print a warning on standard error; the same line only once."""
    print(f"warning: {one_line(line)}", file=sys.stderr)


def _escape_match(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
