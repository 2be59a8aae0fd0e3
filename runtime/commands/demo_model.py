"""moescope convert demo: write a small model from a seed."""

import argparse
from pathlib import Path

from moescope.plain import print_plain
from runtime.commands import add_count

EXAMPLES = """example:
  moescope convert demo /tmp/demo
  moescope generate /tmp/demo --prompt 'The router looks at'"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, help="folder to write the model into")
    add_count(parser, "--seed", default=0, help="random seed; the same seed gives identical output", metavar=None)


def run(args: argparse.Namespace) -> int:
    """Write the model and print where it is."""
    from runtime.errors import ModelError
    from runtime.package.demo_model import write_demo_model
    from runtime.units import show_bytes

    try:
        write_demo_model(args.folder, args.seed)
    except OSError as error:
        raise ModelError(f"{args.folder} cannot be written ({error.strerror}): choose another folder") from None
    size = sum(path.stat().st_size for path in args.folder.iterdir() if path.is_file())
    print_plain(f"{args.folder}: Qwen3-MoE demo model, {show_bytes(size)}")
    return 0
