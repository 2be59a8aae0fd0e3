"""List what costs most and what mending it would save, in words, with the evidence and the query behind each finding.

examples:
  python -m analyzer findings RUN
  python -m analyzer findings RUN --queries            the SQL behind each, to be given to: python -m analyzer query RUN
  python -m analyzer findings RUN --json
"""

import argparse

from analyzer.commands._show import printed
from analyzer.questions import ceilings
from analyzer.questions.findings import findings
from analyzer.records.reading import section
from analyzer.tables.store import load
from moescope.arguments import add_ceilings, add_json, add_run
from moescope.plain import print_plain
from tracer.recording.format import Recording


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_ceilings(parser)
    parser.add_argument("--queries", action="store_true", help="print the query behind each finding")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    manifest = Recording(args.run_dir).manifest
    roof = ceilings.load(section(manifest, "machine"), args.ceilings)
    ranked = findings(load(args.run_dir), roof)
    if printed(args, ranked):
        return 0
    for rank, finding in enumerate(ranked, 1):
        print_plain(f"{rank}. {finding.text} ({finding.prize_ms:,.1f} ms)")
        if args.queries:
            print_plain(f"   {finding.query}")
    if section(manifest, "qnn").get("emulator"):
        print("the NPU is the HTP emulator: its times are the host's, not a device's")
    if not ranked:
        print("nothing that costs 1 % of the steps' time or more was found")
    return 0
