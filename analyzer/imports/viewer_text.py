"""Converts the printed output of Qualcomm's profile viewer to rows with the columns of its CSV.

Execute Stat 1                                   a section; "Execute Stats (Average):" and "Init Stats:" are others
RPC (execute) time : 3161  us                    also `Backend (RPC (execute) time): 3161 us` under a graph
    MatMul_0:OpId_25 (cycles) : 39578  cycles    a node
        Wait (Scheduler) time : 32  cycles       with linting: its waiting time, and concurrent work
        Resources : HVX, DMA
"""

import re
from collections.abc import Iterator

SECTION = re.compile(r"(?:(Execute) Stat \d+|([A-Za-z][A-Za-z -]*) Stats(?: \((\w+)\))?):?")
VALUE = re.compile(r"(.+?)\s*:\s+(\d+)\s+(us|cycles|count|bytes)(?: : \w+)?")
RESOURCES = re.compile(r"Resources\s*:\s*(.*)")
BACKGROUND = re.compile(r".*OpId_(\d+)")
WRAPPED = re.compile(r"Backend \((.*)\)")
NO_VALUE = re.compile(r"inf/sec|Unknown event type", re.IGNORECASE)
NODE_PARTS = re.compile(r"(Wait|Overlap)\b.*time")


def is_viewer_text(text: str) -> bool:
    """Whether a line of the text begins a section."""
    return any(SECTION.fullmatch(line.strip()) for line in text.splitlines())


def rows_of_text(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, cells by column) of each line that should have a value; empty cells if it has none."""
    message = ""
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        section = SECTION.fullmatch(content)
        if section:
            kind = (section[1] or section[2]).upper()
            message = f"{kind} ({section[3].upper()})" if section[3] and section[3] != "Average" else kind
        elif message and content:
            cells = cells_of(content, message)
            if cells or (":" in content.rstrip(":") and not NO_VALUE.search(content) and not content.startswith("---")):
                yield number, cells


def cells_of(content: str, message: str) -> dict[str, str]:
    """The cells of one line; empty if it has no value."""
    resources, background, value = (form.fullmatch(content) for form in (RESOURCES, BACKGROUND, VALUE))
    if resources:
        return csv_cells("UNKNOWN", resources[1], "OBJECT", 2, "Resources")
    if value:
        name = (WRAPPED.fullmatch(value[1]) or (value[1], value[1]))[1]
        is_node, is_part = "OpId_" in name, bool(NODE_PARTS.fullmatch(name))
        of = "NODE" if is_node else "UNKNOWN" if is_part else message
        return csv_cells(of, value[2], value[3].upper(), 1 if is_node else 2 if is_part else 0, name)
    return csv_cells("UNKNOWN", background[1], "OBJECT", 3, content) if background else {}


def csv_cells(message: str, value: str, unit: str, depth: int, name: str) -> dict[str, str]:
    """Cells by the columns of the CSV."""
    source = "NETRUN" if name == "NetRun" else "BACKEND"
    level = "SUB-" * depth + "EVENT" if depth else "ROOT"
    return {
        **{"Msg Timestamp": "0", "Message": message, "Time": value, "Unit of Measurement": unit},
        **{"Timing Source": source, "Event Level": level, "Event Identifier": name},
    }
