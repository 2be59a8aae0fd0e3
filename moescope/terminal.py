"""Output of the verbs: consoles, tables and progress that show names literally, without markup and control characters."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from moescope.plain import markdown_text, plain_text

FILE_WIDTH = 160
"""Width of a wide table if the output is not a terminal."""
ENOUGH_TEXT, LEAST_TEXT, BETWEEN = 30, 6, 2
"""Beside numbers, the width of a column of text that leaves room for heads in one line, that of a column of text at least, and
the space beside each column."""
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
    """A number with its noun: `1 run`, `2 runs`, `2 misses`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def words(*parts: str | tuple[str, str]) -> Text:
    """A line of plain parts and (part, style) pairs."""
    return Text.assemble(*(plain_text(part) if isinstance(part, str) else (plain_text(part[0]), part[1]) for part in parts))


class NumberTable(Table):
    """A table whose right-aligned columns keep their cells whole, and their heads in one line, as long as there is room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render it."""
        numbers = [column for column in self.columns if column.justify == "right"]
        texts = [line_width(column) for column in self.columns if column.justify != "right"]
        room = options.max_width - BETWEEN * len(self.columns)
        chosen: list[int | None] = [None] * len(numbers)
        for measure, text in ((line_width, max(texts, default=0)), (line_width, ENOUGH_TEXT), (word_width, LEAST_TEXT)):
            widths = [measure(column) for column in numbers]
            if sum(widths) + sum(min(width, text) for width in texts) <= room:
                chosen = [*widths]
                break
        for column, width in zip(numbers, chosen, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)


def shown_width(text: RenderableType) -> int:
    """The width of a cell or head as PlainConsole shows it."""
    return cell_len(text.plain if isinstance(text, Text) else plain_text(str(text)))


def cells_width(column: Column) -> int:
    """The width of a column's longest cell."""
    return max(map(shown_width, column.cells), default=0)


def line_width(column: Column) -> int:
    """The width of a column with its head in one line."""
    return max(cells_width(column), shown_width(column.header))


def word_width(column: Column) -> int:
    """The width of a column with a line for each word of its head."""
    return max(cells_width(column), *map(shown_width, str(column.header).split() or [""]))


def grid(
    *columns: str,
    left: int | tuple[str, ...] = 1,
    title: str = "",
    rows: Iterable[Iterable[RenderableType]] = (),
) -> Table:
    """A small table without lines: the first columns, or those named in `left`, are left-aligned, the others right-aligned.

    Cells that do not fit are wrapped, never cut: a number without its last digits would be another number.
    """
    table = NumberTable(
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


def as_markdown(lines: Iterable[Line]) -> str:
    """Lines of a screen as Markdown: tables as tables, the others as items of a list, names literally."""
    blocks: list[str] = []
    for line in lines:
        if isinstance(line, Table):
            heads = [markdown_cell(column.header) for column in line.columns]
            sides = ["---:" if column.justify == "right" else "---" for column in line.columns]
            rows = zip(*(map(markdown_cell, column.cells) for column in line.columns), strict=True)
            blocks += ["", *(f"| {' | '.join(row)} |" for row in (heads, sides, *rows)), ""]
        else:
            blocks.append(f"- {markdown_cell(line)}")
    return "\n".join(blocks).lstrip("\n") + "\n"


def markdown_cell(content: RenderableType) -> str:
    """A line or cell as Markdown of one line; only what is bold on the screen has a mark."""
    text = content if isinstance(content, Text) else Text(plain_text(str(content)))
    written, at = "", 0
    for span in text.spans:
        marked = text.plain[span.start : span.end].rstrip()
        mark = "**" * ("bold" in str(span.style))
        written += f"{markdown_text(text.plain[at : span.start])}{mark}{markdown_text(marked)}{mark}"
        at = span.start + len(marked)
    return written + markdown_text(text.plain[at:])


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A status line on the terminal during long work; `step(text)` replaces its text."""
    with console(stderr=True).status(words(text)) as status:
        yield lambda step: status.update(words(step))
