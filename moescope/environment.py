"""The virtual environment of a checkout, since sudo drops the one that the user activated."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("capstone", "numpy", "rich")
"""A package that a system's Python seldom has and that all verbs of the tracer import."""


def enter_project_environment(package: str) -> None:
    """Continue as `python -m package` in the checkout's `.venv`, if this Python lacks what the project needs."""
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve() or not python.exists():
        return
    if not all(map(find_spec, NEEDED)):
        os.execv(python, [str(python), "-m", package, *sys.argv[1:]])
