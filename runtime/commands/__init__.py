"""One module per verb that runs models: EXAMPLES, prepare_parser(parser), run(args) -> exit code."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.package.convert import Progress


def add_count(parser: argparse._ActionsContainer, *names: str, default: int, help: str, metavar: str | None = "N") -> None:
    """Declare an option that takes a whole number; the help text ends with its default."""
    parser.add_argument(*names, type=int, default=default, metavar=metavar, help=f"{help} (default: {default})")


@contextmanager
def show_progress(what: str) -> Iterator["Progress"]:
    """A progress bar on standard error, shown once the first unit of work is done and only on a terminal."""
    from rich.progress import Progress as Bar

    from moescope.terminal import console

    with Bar(console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def read_text(path: Path) -> str:
    """A file that the user named, as UTF-8 text; `-` is standard input."""
    from runtime.errors import RequestError

    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as text ({error}): give a UTF-8 file") from None


def read_objects(path: Path) -> list[dict[str, Any]]:
    """A file that the user named, as a JSON list of objects."""
    import json

    from runtime.errors import RequestError

    try:
        objects = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}): give a list of objects") from None
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise RequestError(f"{path} is not a list of objects: put them in [ ]")
    return objects


def require_package(folder: Path) -> None:
    """Refuse a folder that is not a package, such as a model's."""
    from runtime.errors import RequestError
    from runtime.package.layout import is_package

    if not is_package(folder):
        raise RequestError(f"{folder} is not a package: make one with `moescope convert`")


def parse_tiers(text: str) -> tuple[int, ...]:
    """Ascending rows of static shapes from `1,8,32`."""
    from runtime.errors import RequestError

    try:
        return tuple(sorted({int(tier) for tier in text.split(",")}))
    except ValueError:
        raise RequestError(f"tiers {text!r} is not a list of numbers: write for example 1,8,32") from None
