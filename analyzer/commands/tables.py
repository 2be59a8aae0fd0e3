"""Write the tables of recordings as Parquet files (analyzer/records/tables.toml documents their columns).

Of many recordings (several, a folder of them, a pattern, an address) the tables and the result that `history` and `compare` read
are kept beside each, where they are not there yet. Unreadable recordings are reported and skipped.

examples:
  python -m analyzer tables recordings/run-1
  python -m analyzer tables recordings/run-1 --out /tmp/tables --json
  python -m analyzer tables 's3://bucket/device=*/build=v2/*' --dask 8

exit code: 0 all have tables, 1 a recording could not be read, 2 wrong use.
"""

import argparse

from analyzer.commands._show import answers, printed
from analyzer.compare.results import of_place
from analyzer.errors import AnalysisError
from analyzer.questions.derived import DERIVED
from analyzer.tables.recording_folders import is_many, recording_folders
from analyzer.tables.store import load, row_counts, write
from moescope.arguments import add_json, add_out


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a recording, or a pattern or an address of many")
    add_out(parser, "keep them in RUN/tables", "DIR")
    parser.add_argument(
        "--dask", metavar="WORKERS", default="", help="for many: number of local processes, or address of a Dask scheduler"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Build and write the tables, and print their row counts."""
    if len(args.runs) == 1 and not is_many(args.runs[0]):
        return one(args)
    if args.out:
        raise AnalysisError("--out takes the tables of one recording; for many recordings they are stored beside each")
    some = [place for address in args.runs for place in recording_folders(address)]
    done, failures = answers(of_place, some, args.dask)
    if not printed(args, {"recordings": len(done), "failed": {str(each.place): each.reason for each in failures}}):
        print(f"{len(done):,} recordings have tables, {len(failures):,} could not be read")
    return int(bool(failures))


def one(args: argparse.Namespace) -> int:
    """Write the tables of one recording."""
    rows = row_counts(args.runs[0])
    if args.out:
        write(load(args.runs[0]), args.out)
    if printed(args, rows):
        return 0
    for name, count in rows.items():
        print(f"{count:>12,}  {name}")
    print("derived when a query uses them:")
    for name, (meaning, _) in DERIVED.items():
        print(f"              {name}: {meaning}")
    return 0
