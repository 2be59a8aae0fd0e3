"""What to attach, as data: a row for each probe, and what is known of its file."""

from dataclasses import asdict, dataclass, field
from typing import Any

PLANNED = ("program", "engine", "level", "symbol", "offset", "at", "instruction", "cost", "why", "cookie")
"""A probe's fields in a plan; its file is given once for all of the file's probes."""


KERNEL = "kernel"
"""The engine of probes on kernel events."""


@dataclass
class Row:
    """A probe's row in the manifest."""

    program: str
    engine: str
    level: str
    library: str
    symbol: str
    offset: int
    at: str
    instruction: str
    cost: str
    why: str
    ns_per_hit: float = 0.0
    ns_per_hit_cold: float = 0.0
    bpf_ns_per_hit: float = 0.0
    hits: int = 0
    retired_ns: int = 0  # when it was removed before the end because others had replaced it
    cookie: int = 0
    skipped: int = 0


@dataclass
class FilePlan:
    """What to attach in one file.

    `engines`: those whose library it is; `operators`: an engine's operator names by number, as in this file; `specs`: what the
    probes of the user's functions read (struct call_spec), by cookie.
    """

    path: str
    build_id: str
    rows: list[Row] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    operators: dict[str, list[str]] = field(default_factory=dict)
    specs: dict[int, bytes] = field(default_factory=dict)

    def programs(self) -> set[str]:
        """The BPF programs that are attached in it."""
        return {row.program for row in self.rows}


def stored_row(row: Row) -> dict[str, Any]:
    """A row as stored in a plan, without measured fields."""
    return {key: value for key, value in asdict(row).items() if key in PLANNED}
