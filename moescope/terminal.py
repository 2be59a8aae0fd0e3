"""Output of the verbs: consoles, tables and progress that show names literally, without markup and control characters."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moescope.plain import plain_text

FILE_WIDTH = 160
"""Width of a wide table if the output is not a terminal."""
Line = str | Text | Table
"""Anything that a verb prints at once."""


class PlainConsole(Console):
    """A console that never interprets strings as markup and makes control characters visible; only `words` adds styles."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string, such as a table's cell or title, as one line."""
        return super().render_str(plain_text(text), **options)


def console(wide: bool = False, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console; a `wide` one has FILE_WIDTH columns without a terminal, a `soft_wrap` one does not break lines."""
    return PlainConsole(stderr=stderr, soft_wrap=soft_wrap, width=FILE_WIDTH if wide and not sys.stdout.isatty() else None)


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def words(*parts: str | tuple[str, str]) -> Text:
    """A line of plain parts and (part, style) pairs."""
    return Text.assemble(*(plain_text(part) if isinstance(part, str) else (plain_text(part[0]), part[1]) for part in parts))


def grid(
    *columns: str,
    left: int | tuple[str, ...] = 1,
    title: str = "",
    rows: Iterable[Iterable[RenderableType]] = (),
) -> Table:
    """A small table without lines: the first columns, or those named in `left`, are left-aligned, the others right-aligned.

    Cells that do not fit are wrapped, never cut: a number without its last digits would be another number.
    """
    table = Table(
        title=words((title, "bold")) if title else None,
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 1),
        pad_edge=False,
    )
    for position, name in enumerate(columns):
        is_left = position < left if isinstance(left, int) else name in left
        justify: JustifyMethod = "left" if is_left else "right"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A status line on the terminal during long work; `step(text)` replaces its text."""
    with console(stderr=True).status(words(text)) as status:
        yield lambda step: status.update(words(step))
