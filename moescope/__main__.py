"""`moescope VERB`: the one command."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
    __name__ == "__main__" or sys.argv[0].endswith("/moescope")
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends it without a traceback

import gc
from collections.abc import Sequence
from pathlib import Path

from moescope.command_line import Program
from moescope.environment import enter_project_environment
from moescope.verbs import ABOUT, GROUPS


def version_text() -> str:
    """`moescope 0.1.0`."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return f"moescope {installed('moescope')}"
    except PackageNotFoundError:
        return "moescope (not installed, run from a checkout)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0 good, 1 a finding, 2 wrong use."""
    if argv is None:
        enter_project_environment("moescope")
    prog = "python -m moescope" if Path(sys.argv[0]).name == "__main__.py" else "moescope"
    code = Program(prog, "moescope", ABOUT, GROUPS, version_text).main(argv)
    if argv is None and "duckdb" not in sys.modules:  # duckdb reports objects that are never freed
        gc.freeze()  # avoids the final collections, which take a fifth of a second with pandas loaded
    return code


if __name__ == "__main__":
    sys.exit(main())
