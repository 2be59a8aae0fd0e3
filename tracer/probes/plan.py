"""What is to be attached, as data: a row for each probe, and what is known of the file that it stands in."""

from dataclasses import asdict, dataclass, field
from typing import Any

PLANNED = ("program", "engine", "level", "symbol", "offset", "at", "instruction", "cost", "why", "cookie")
"""What a plan says of a probe; its file is told once for all of them."""


KERNEL = "kernel"
"""In place of an engine: the probe stands on an event of the kernel's."""


@dataclass
class Row:
    """One probe in the manifest."""

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
    retired_ns: int = 0  # when it was removed before the end, since others had taken its place
    cookie: int = 0
    skipped: int = 0


@dataclass
class FilePlan:
    """What to attach in one file.

    `engines` are those whose library it is, `operators` an engine's operator names by number as this file has them, `specs` what
    probes of the user's functions read, by their cookies (struct call_spec).
    """

    path: str
    build_id: str
    rows: list[Row] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    operators: dict[str, list[str]] = field(default_factory=dict)
    specs: dict[int, bytes] = field(default_factory=dict)

    def programs(self) -> set[str]:
        """The BPF programs that stand in it."""
        return {row.program for row in self.rows}


def planned(row: Row) -> dict[str, Any]:
    """A row as a plan holds it: without what is measured."""
    return {key: value for key, value in asdict(row).items() if key in PLANNED}
