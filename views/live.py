"""A recording that still grows, as it was in its last seconds: the end of the events, and all that names what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import experts
from analyzer.questions.phases import phase_shares
from analyzer.questions.summary import operators, tokens
from analyzer.records.reading import section
from analyzer.tables.store import build
from tracer.recording.format import FIRST_DETAIL, STREAMS, Recording

TAIL_SLOTS = {"events": 200_000, "details": 50_000}
FREQUENT = ("op_shares", "route", "qnn_event", "qnn_sub_events", "call_text")
"""Details that say what happened, not what things are: of these the latest are enough."""
TOP = 10
Tables = Mapping[str, pd.DataFrame]


class Tail(Recording):
    """The last slots of a recording as a recording; details that name things are kept from its beginning."""

    def __init__(self, path: Path, names: "Names"):
        super().__init__(path)
        events = super().slots("events")[-TAIL_SLOTS["events"] :]
        self._slots = {"events": np.asarray(events), "details": names.read(self)}
        self._kinds = {}

    def whole(self, stream: str) -> np.ndarray:
        """All slots of a stream, mapped."""
        path, width = self.path / f"{stream}.bin", STREAMS[stream]
        count = path.stat().st_size // width if path.exists() else 0
        return np.memmap(path, np.uint8, "r", shape=(count, width)) if count else np.empty((0, width), np.uint8)


@dataclass
class Names:
    """The details that name things, read once; every turn reads what came since."""

    seen: int = 0
    kept: list[np.ndarray] = field(default_factory=list)

    def read(self, recording: Tail) -> np.ndarray:
        """The details of this turn: all that name things, and the latest of the others."""
        slots = recording.whole("details")
        if len(slots) < self.seen:
            self.seen, self.kept = 0, []
        numbers = [number for kind, (number, _) in recording.layouts.items() if kind in FREQUENT and number >= FIRST_DETAIL]
        fresh = np.asarray(slots[self.seen :])
        self.kept.append(fresh[~np.isin(kinds_of(fresh), numbers)])
        self.seen = len(slots)
        latest = np.asarray(slots[-TAIL_SLOTS["details"] :])
        return np.concatenate([*self.kept, latest[np.isin(kinds_of(latest), numbers)]])


def kinds_of(slots: np.ndarray) -> np.ndarray:
    """The kinds of slots."""
    return slots[:, 24:26].copy().view("<u2")[:, 0]


@dataclass(frozen=True)
class Snapshot:
    """What a recording shows of its last seconds. `tokens`, `operators` and `phases` are those of analyzer.summary, for them."""

    state: str
    seconds: float
    """How much time the figures cover."""
    records: int
    lost: int
    tokens: dict[str, Any]
    phases: dict[str, dict[str, float]]
    operators: list[dict[str, Any]]
    hits: int
    misses: int
    probe_ns: int
    """Time in probes since recording began."""
    duration_ns: int
    off: tuple[str, ...]
    """Levels that are switched off now."""


def latest(tables: Tables, seconds: float) -> Tables:
    """The tables cut to the tokens that were at work in the last seconds; what is shared by all stays."""
    known = tables["tokens"]
    if not len(known):
        return tables
    since = int(known["end_ns"].max() - seconds * 1e9)
    ids = known.loc[known["end_ns"] >= since, "token_id"]
    cut = {name: frame[frame["token_id"].isin(ids)] for name, frame in tables.items() if "token_id" in frame}
    begin = int(known.loc[known["token_id"].isin(ids), "begin_ns"].min())
    states = tables["thread_states"]
    cut["operators"] = cut["operators"].assign(op_id=np.arange(len(cut["operators"])))
    shares = tables["op_threads"]
    row = pd.Index(tables["operators"].loc[tables["operators"]["token_id"].isin(ids), "op_id"]).get_indexer(shares["op_id"])
    cut["op_threads"] = shares[row >= 0].assign(op_id=row[row >= 0])
    return {**tables, **cut, "thread_states": states[states["end_ns"] >= begin]}


def levels_off(changes: Any) -> tuple[str, ...]:
    """The levels whose last change switched them off."""
    last = {row.get("level"): bool(row.get("on")) for row in changes or [] if isinstance(row, dict)}
    return tuple(sorted(str(level) for level, on in last.items() if not on))


def snapshot(run_dir: Path, names: Names, seconds: float = 10.0) -> Snapshot:
    """Read what a recording shows now; raises RecordingError where it is none (yet)."""
    recording = Tail(run_dir, names)
    manifest = recording.manifest
    tables = latest(build(recording), seconds)
    steps = tables["tokens"]
    rates, cost = experts.hit_rate(tables), section(manifest, "cost")
    covered = (steps["end_ns"].max() - steps["begin_ns"].min()) / 1e9 if len(steps) else 0.0
    return Snapshot(
        state=str(manifest.get("state")),
        seconds=float(covered),
        records=sum(section(manifest, "records").values()),
        lost=sum(section(manifest, "lost").values()),
        tokens=tokens(steps),
        phases=phase_shares(tables) if len(steps) else {},
        operators=operators(tables, TOP).get("top", []),
        hits=int(rates["hits"].sum()),
        misses=int(rates["misses"].sum()),
        probe_ns=int(cost.get("trap_ns", 0)) + int(cost.get("bpf_ns", 0)),
        duration_ns=int(manifest.get("duration_ns") or 0),
        off=levels_off(manifest.get("level_changes")),
    )
