"""python -m runtime convert: make a package of a model."""

import argparse
from pathlib import Path

EXAMPLES = """example:
  python -m runtime convert /models/qwen3-moe /models/qwen3-moe.package
  python -m runtime generate /models/qwen3-moe.package --prompt Hello"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("package", type=Path, help="folder to write; an older package there is replaced")


def run(args: argparse.Namespace) -> int:
    """Convert and say what came out."""
    from runtime.commands import show_progress
    from runtime.convert import convert
    from runtime.units import show_bytes

    with show_progress("converting") as progress:
        package = convert(args.model, args.package, progress)
    size = sum(entry["bytes"] for entry in package.manifest["files"].values())
    print(f"{args.package}: {len(package.manifest['files'])} files, {show_bytes(size)}")
    return 0
