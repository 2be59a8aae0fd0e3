"""What is to be attached, as data: a row for each probe, and what is known of the file that it stands in."""

from dataclasses import dataclass, field


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
