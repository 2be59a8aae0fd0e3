"""`python -m tracer VERB`: run, attach, probes, doctor."""

import os
import sys
from importlib import import_module
from pathlib import Path

VERBS = {
    "run": "trace a command, from its first instruction to its end",
    "attach": "trace a process that runs already",
    "compare": "trace two commands by turns until it is clear which is faster, and where",
    "probes": "show every probe that would be placed, and why there",
    "doctor": "list what the tracer needs, what is there, and how to get the rest",
}


def enter_project_environment() -> None:
    """Continue in the project's own virtual environment: sudo drops the one the user had activated."""
    root = Path(__file__).resolve().parent.parent
    python = root / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() == (root / ".venv").resolve() or not python.exists():
        return
    try:
        import capstone  # noqa: F401
        import elftools  # noqa: F401
        import numpy  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        os.execv(python, [str(python), "-m", "tracer", *sys.argv[1:]])


def main() -> int:
    """Parse the command line, run the verb, turn errors into one line."""
    enter_project_environment()
    try:
        from tracer.command_line import dispatch
    except ImportError as error:
        print(f"tracer: {error.name} is not installed; run `make setup` in the project's folder", file=sys.stderr)
        return 2
    return dispatch("tracer", VERBS, lambda verb: import_module(f"tracer.commands.{verb}"))


if __name__ == "__main__":
    sys.exit(main())
