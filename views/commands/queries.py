"""Print PerfettoSQL queries for the timeline: paste one into the query page of the Perfetto UI, or give it to trace_processor.

examples:
  moescope query perfetto                   names and what each answers
  moescope query perfetto slow_steps        its SQL
  trace_processor_shell -q <(moescope query perfetto npu_idle) RUN/trace.pftrace
"""

import argparse
from importlib.resources import files
from pathlib import Path

from views.errors import ViewError


def shipped_queries() -> dict[str, str]:
    """Name → SQL of every query."""
    folder = files("views").joinpath("queries")
    return {
        Path(file.name).stem: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda file: file.name)
    }


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a query (default: list them)")


def run(args: argparse.Namespace) -> int:
    """Print one query, or the list."""
    queries = shipped_queries()
    if args.name is None:
        for name, sql in queries.items():
            print(f"{name:16} {sql.splitlines()[0].removeprefix('-- ')}")
        return 0
    if args.name not in queries:
        raise ViewError(f"no query {args.name}; available: {', '.join(queries)}")
    print(queries[args.name], end="")
    return 0
