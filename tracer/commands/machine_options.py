"""Options that name a machine or its kernel; imports nothing that takes time."""

import argparse
from pathlib import Path


def add_on(parser: argparse.ArgumentParser) -> None:
    """Declare `--on`."""
    text = "another machine: ssh:USER@HOST, adb, adb:SERIAL, exec:COMMAND, or @FILE of such lines; repeatable (docs/devices.md)"
    parser.add_argument("--on", action="append", default=[], metavar="TARGET", help=text)


def add_btf(parser: argparse.ArgumentParser) -> None:
    """Declare the option for a file with the kernel's types."""
    parser.add_argument("--btf", type=Path, metavar="FILE", help="BTF types for a kernel without built-in BTF (docs/kernels.md)")
