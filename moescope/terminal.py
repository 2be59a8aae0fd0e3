"""What the verbs print: consoles, tables and progress that show every name as it is, with no markup and no control characters."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moescope.plain import plain_text

FILE_WIDTH = 160
"""Columns of a wide table where the output is not a terminal."""
Line = str | Text | Table
"""What a verb prints in one go."""


class PlainConsole(Console):
    """A console that takes no string for markup and shows control characters; style comes from `words` alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string, a table's cell or title, as one line."""
        return super().render_str(plain_text(text), **options)


def console(wide: bool = False, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """The console; a `wide` one has FILE_WIDTH columns without a terminal, a `soft_wrap` one breaks no line."""
    return PlainConsole(stderr=stderr, soft_wrap=soft_wrap, width=FILE_WIDTH if wide and not sys.stdout.isatty() else None)


def counted(number: int, noun: str) -> str:
    """How many of something: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def words(*parts: str | tuple[str, str]) -> Text:
    """A line of plain parts and of (part, style)."""
    return Text.assemble(*(plain_text(part) if isinstance(part, str) else (plain_text(part[0]), part[1]) for part in parts))


def grid(
    *columns: str,
    left: int | tuple[str, ...] = 1,
    title: str = "",
    rows: Iterable[Iterable[RenderableType]] = (),
) -> Table:
    """A small table without lines: the first columns, or those named in `left`, to the left, the others to the right.

    Cells that do not fit are continued below, never cut: a number without its last digits is another number.
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
    """A status line on the terminal while something long runs; `step(text)` replaces its text."""
    with console(stderr=True).status(words(text)) as status:
        yield lambda step: status.update(words(step))
