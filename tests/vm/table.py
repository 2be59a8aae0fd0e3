"""The table of kernels against features in docs/kernels.md, from what the rungs said last.

python -m tests.vm.table [ROWS ...]     ROWS: what `tests.vm.guest --json` wrote; kept in tests/vm/results.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.vm.guest import GUESTS, HERE, ROOT

RESULTS, PAGE = HERE / "results.json", ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- made by python -m tests.vm.table -->\n", "<!-- end -->\n"
RUNGS = {
    "programs": "BPF programs accepted, with ring buffers",
    "perf": "the same with perf buffers",
    "doctor": "doctor: nothing that is required is missing",
    "steps": "12 USDT sites of a C program: each of 300 calls counted",
    "collected": "the same by `moescope-recorder`, through rings and through perf buffers",
    "late": "library loaded by `dlopen` and dropped 50 times: each of 150 calls counted",
    "answers": "300 reads past the page cache: each block request answered, each waking of the program right",
    "truth": "`tests/test_tracer_truth.py`: every call, a late library, a child",
    "llama": "`tests/test_tracer_llamacpp.py`: a real llama.cpp",
    "recorders": "a plan alone and a planner: equal tables of a real llama.cpp, losses counted to the record",
    "stacks": "`tests/test_stacks.py`: samples of a tree of calls, and its waits (from Linux 5.15 on)",
    "runtime": "our runtime on the CPU: the tokens of its own log",
    "sites": "each arm64 instruction that counts as probeable stands",
    "signed": "functions that begin with `bti` and `paciasp`",
    "lockdown": "locked down (confidentiality): said in one line",
}

Row = dict[str, Any]


def merged(kept: list[Row], newer: list[Row]) -> list[Row]:
    """One row for each guest and rung, the newest; without times, which mean nothing in a guest."""
    fields = ("guest", "rung", "ok", "seen", "kernel")
    rows = {(row["guest"], row["rung"]): {name: row.get(name, "") for name in fields} for row in (*kept, *newer)}
    return [rows[key] for key in sorted(rows)]


def said(row: Row | None) -> str:
    """A rung's result in a cell; empty where it was not climbed."""
    if row is None:
        return ""
    result: str = row["seen"].removesuffix(" accepted") if row["rung"] in ("programs", "perf") else "yes"
    return result if row["ok"] else "FAILED"


def table(rows: list[Row]) -> str:
    """The table: features and rungs down, guests across."""
    known = {(row["guest"], row["rung"]): row for row in rows}
    guests = [guest.name for guest in GUESTS if (guest.name, "features") in known]
    offered = {name: json.loads(known[name, "features"]["seen"]) for name in guests}
    lines = [["", *guests], ["---"] * (len(guests) + 1)]
    lines += [["kernel", *(known[name, "features"]["kernel"].partition("-cloud")[0] for name in guests)]]
    for feature in dict.fromkeys(feature for features in offered.values() for feature in features):
        lines.append([feature, *({True: "yes", False: "no"}[offered[name][feature]] for name in guests)])
    lines += [[words, *(said(known.get((name, rung))) for name in guests)] for rung, words in RUNGS.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(text: str, rows: list[Row]) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(rows) + END + rest.partition(END)[2]


def main() -> None:
    """Take newer rows in, and write the page."""
    newer = [row for name in sys.argv[1:] for row in json.loads(Path(name).read_text())]
    rows = merged(json.loads(RESULTS.read_text()) if RESULTS.exists() else [], newer)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
