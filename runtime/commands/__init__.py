"""One module per verb: EXAMPLES, prepare_parser(parser), run(args) -> exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.package.convert import Progress


@contextmanager
def show_progress(what: str) -> Iterator["Progress"]:
    """A progress bar on standard error, shown once the first unit of work is done and only on a terminal."""
    from rich.progress import Progress as Bar

    from moescope.terminal import console

    with Bar(console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def parse_tiers(text: str) -> tuple[int, ...]:
    """Ascending rows of static shapes from `1,8,32`."""
    from runtime.errors import RequestError

    try:
        return tuple(sorted({int(tier) for tier in text.split(",")}))
    except ValueError:
        raise RequestError(f"tiers {text!r} are no list of numbers: write for example 1,8,32") from None
