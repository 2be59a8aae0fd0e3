"""Whether power, clocks and temperatures have settled while steps ran, since when, and how fast decode is then."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.questions import energy, figures
from analyzer.questions.heat import S, mean_within, origin_ns, total_watts
from analyzer.records.manifest import section
from analyzer.records.schema import Tables
from analyzer.tables.sequences import APART

WINDOWS = 6
"""Means of this many parts of STEADY_S are compared (tracer/recorder/steady.c does the same while it records)."""
STEADY_S = 60.0
RELATIVE, DEGREES = 0.05, 1.0
"""Half the band in which means of clocks and power, and of temperatures, stay."""
MOST_WINDOWS = 600
STEADY, MOVING, SHORT = "steady", "not steady", "too short"


@dataclass(frozen=True)
class Signal:
    """What settles, or does not: its means in windows, and half the band."""

    name: str
    unit: str
    means: np.ndarray
    band: float
    """NaN: RELATIVE."""

    @property
    def settled(self) -> int | None:
        """The first window from which on no mean leaves the band around their mean, WINDOWS of them at least."""
        for first in range(len(self.means) - WINDOWS + 1):
            rest = self.means[first:]
            mean = rest.mean()
            if np.abs(rest - mean).max() <= (self.band if self.band == self.band else RELATIVE * abs(mean)):
                return first
        return None

    def summary(self, settled_s: float | None) -> dict[str, Any]:
        """Name, unit, mean of the last windows, and seconds after the first step since when it has settled."""
        return {"name": self.name, "unit": self.unit, "value": float(self.means[-WINDOWS:].mean()), "settled_s": settled_s}


def signals(tables: Tables, begin: np.ndarray, end: np.ndarray) -> list[Signal]:
    """Clocks, temperatures and power in the windows; those that are known in all but a few."""
    rows, found = tables["clocks"], []
    by_kind = {kind: [mine for _, mine in rows[rows["what"] == kind].groupby("number")] for kind in ("frequency", "temperature")}
    means = {
        kind: [mean_within(m["ts_ns"].to_numpy(np.int64), m["value"].to_numpy(), begin, end) for m in of]
        for kind, of in by_kind.items()
    }
    if means["frequency"]:
        found.append(Signal("clocks", "MHz", np.mean(means["frequency"], axis=0), np.nan))
    for mine, values in zip(by_kind["temperature"], means["temperature"], strict=True):
        found.append(Signal(str(mine["name"].iloc[0]), "°C", values, DEGREES))
    found.append(Signal("power", "W", total_watts(tables, begin, end), np.nan))
    return [signal for signal in found if len(begin) and not np.isnan(signal.means).any()]


def steady_state(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """Whether power, clocks and temperatures settled while steps ran, since when, and decode speed before and since.

    {} without steps or without anything that could settle. `state`: steady | not steady | too short.
    """
    tokens, (seconds, reached) = tables["tokens"], asked_for(manifest)
    origin, last = origin_ns(tables), int(tokens["end_ns"].max()) if len(tokens) else 0
    if last <= origin or not signals(tables, np.array([origin]), np.array([last])):
        return {}
    width = max(int(seconds * S / WINDOWS), (last - origin) // MOST_WINDOWS + 1)
    edges = last - width * np.arange((last - origin) // width, -1, -1, dtype=np.int64)
    every = signals(tables, edges[:-1], edges[1:])
    settled = [signal.settled for signal in every]
    firsts = [first for first in settled if first is not None]
    since = int(edges[max(firsts)]) if every and len(firsts) == len(every) else None
    since = int(reached - seconds * S) if reached else since
    state = STEADY if since is not None else MOVING if len(edges) > WINDOWS else SHORT
    rows = [
        signal.summary(None if at is None else (int(edges[at]) - origin) / S) for signal, at in zip(every, settled, strict=True)
    ]
    about = {"state": state, "for_s": seconds, "recorded_s": (last - origin) / S, "signals": rows}
    return about | {"since_s": None if since is None else (since - origin) / S, **speeds(tables, since)}


def asked_for(manifest: dict[str, Any]) -> tuple[float, int]:
    """(how many seconds must not move, when --until-steady saw that in ns; 0: not, or nobody asked)."""
    asked = section(manifest, "steady")
    seconds, reached = asked.get("for_s"), asked.get("reached_ns")
    return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else STEADY_S, reached if isinstance(
        reached, int
    ) else 0


def speeds(tables: Tables, since_ns: int | None) -> dict[str, Any]:
    """Decode tokens/s before a moment, if it ever came, and since, and the number of steps since."""
    steps = figures.complete_steps(tables).dropna(subset=["itl_ms"])
    late = (steps["end_ns"] >= since_ns).to_numpy() if since_ns is not None else np.zeros(len(steps), bool)
    sides = {"before": steps["itl_ms"][~late], "since": steps["itl_ms"][late]}
    return {f"tokens_per_s_{name}": figures.decode_tokens_per_s(itl) for name, itl in sides.items()} | {
        "steps_since": int(late.sum())
    }


def steady_part(tables: Tables, manifest: dict[str, Any]) -> Tables:
    """The tables of a recording that was made until it was steady, whose earlier steps count as warm-up; others as they are."""
    seconds, reached = asked_for(manifest)
    if not reached:
        return tables
    since, tokens, power, rails = int(reached - seconds * S), tables["tokens"], tables["power"], energy.rail_table(tables)
    early = (tokens["begin_ns"] < since).to_numpy()
    floor = int(rails["floor_end_ns"].max()) if len(rails) else 0
    kept = power[(power["begin_ns"] >= since) | (power["end_ns"] <= floor)]
    return {**tables, "tokens": tokens.assign(phase=tokens["phase"].astype(object).mask(early, APART[0])), "power": kept}
