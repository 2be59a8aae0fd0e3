"""`moescope VERB`: the verbs of all packages under one name."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from moescope.calling import RENAMED, called_as_moescope
from moescope.command_line import Program, Room, Verb
from moescope.environment import enter_project_environment

ABOUT = "See what a Mixture-of-Experts language model does while it runs on CPU and NPU."
ROOMS = {"tracer": "Record", "analyzer": "Analyze", "views": "View", "runtime": "Runtime"}
"""Room → group for its verbs that no group lists."""
GROUPS = {
    "Record": "run attach probes plan doctor",
    "Analyze": "summary time findings requests trends threads experts npu backends roofline fidelity dag tables query "
    "import-qnn import-profile routes",
    "View": "open top report profdag trace write queries export",
    "Compare": "compare compare-commands history regression",
    "Predict": "predict simulate pareto steps kernels quantization device ceilings prompts",
    "Runtime": "generate chat bench perplexity convert tune train-predictor inspect demo-model",
}


def rooms() -> list[Room]:
    """The rooms, each of which declares its verbs in its own `__main__`."""
    return [import_module(f"{name}.__main__").ROOM for name in ROOMS]


def verbs() -> dict[str, Verb]:
    """Name under `moescope` → verb. If two rooms have the same verb (`summary`), the first room's is used."""
    table: dict[str, Verb] = {}
    for room in rooms():
        for name, verb in room.table().items():
            table.setdefault(RENAMED.get((room.name, name), name), verb)
    return table


def groups() -> dict[str, dict[str, Verb]]:
    """The verbs by the groups of the help."""
    left = verbs()
    sorted_in = {title: {name: left.pop(name) for name in names.split()} for title, names in GROUPS.items()}
    for name, verb in left.items():
        sorted_in[ROOMS[verb.room.name]][name] = verb
    return sorted_in


def version() -> str:
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
    code = Program(called_as_moescope(sys.argv[0]), "moescope", ABOUT, groups(), version).main(argv)
    if argv is None and "duckdb" not in sys.modules:  # duckdb reports objects that are never freed
        gc.freeze()  # avoids the final collections, which take a fifth of a second with pandas loaded
    return code


if __name__ == "__main__":
    sys.exit(main())
