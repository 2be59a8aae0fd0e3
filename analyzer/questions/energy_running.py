"""What ran while power was read: the program's CPU time by phase, kind of CPU and clock, and its waits for an accelerator."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.questions.causes import ACCELERATOR
from analyzer.questions.step_time import step_time
from analyzer.records.intervals import Intervals, common_time, merge_intervals, split_intervals, uncovered_parts
from analyzer.records.schema import Tables
from analyzer.records.spans import EVER

PHASES = ("prefill", "decode")
OUTSIDE = "outside steps"
NS = 1e-9
SAMPLES = 8
"""Parts of the time between readings in which a sensor may have measured."""
EXPONENTS = (1, 2, 3)
"""Of its clock, with which a CPU's power may grow: between one voltage for all clocks and a voltage that grows as they do."""
LEAST_SPREAD = 0.02
"""Of the clocks while the program ran, from which on they can explain anything."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a power depends on: constants of sums of activities, the columns of `matrix` [activities, constants].

    `by_kind`: each kind of CPU has constants of its own; `exponent`: of the clock with which they grow.
    """

    matrix: np.ndarray
    by_kind: bool = False
    exponent: int = 0


@dataclass(frozen=True)
class Growth:
    """A sum that grows with time, linear between the moments `ts` (ns)."""

    ts: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, spans: Intervals, weights: np.ndarray | float = 1.0) -> "Growth":
        """Seconds of all intervals, each times its weight."""
        change = np.broadcast_to(weights, len(spans)) * NS
        ts = np.concatenate([spans.begin, spans.end])
        order = np.argsort(ts, kind="stable")
        ts, rate = ts[order], np.cumsum(np.concatenate([change, -change])[order])
        return cls(ts, np.append(0, np.cumsum(rate[:-1] * np.diff(ts)))[: len(ts)])

    def at(self, ts: np.ndarray) -> np.ndarray:
        """The sum at these moments."""
        return np.interp(ts, self.ts, self.total) if len(self.ts) else np.zeros(len(ts))

    def between(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """What it grows by in these windows."""
        return self.at(end) - self.at(begin)

    def within(self, spans: Intervals, outside: bool = False) -> "Growth":
        """It with growth in the disjoint `spans`, in time order, alone; or `outside` of them."""
        ts = np.unique(np.concatenate([self.ts, spans.begin, spans.end]))
        row = np.searchsorted(spans.begin, ts[:-1], "right")
        inside = ts[:-1] < np.append(0, spans.end)[row]
        return Growth(ts, np.append(0, np.cumsum(np.diff(self.at(ts)) * (inside != outside)))[: len(ts)])

    @property
    def whole(self) -> float:
        """All of it."""
        return float(self.total[-1]) if len(self.total) else 0.0


@dataclass(frozen=True)
class Activity:
    """One kind of work: in which phase, on which kind of CPU (its name, "" for any) or ACCELERATOR, and its amount.

    `exponent`: 0, or the amount is CPU seconds times that power of the clock, as a share of the highest.
    """

    phase: str
    where: str
    amount: Growth
    exponent: int = 0


@dataclass(frozen=True)
class Running:
    """What the program did: activities, and when it computed steps of each phase."""

    activities: tuple[Activity, ...]
    steps: dict[str, Intervals]

    @classmethod
    def of(cls, tables: Tables) -> "Running":
        """From steps, states of threads and clocks; without states the phase's own time counts."""
        steps = phase_times(tables)
        if not len(tables["thread_states"]):
            return cls.of_spans(steps, {(phase, ""): span for phase, span in steps.items()})
        grown_cpu = cpu_growth(cpu_pieces(tables))
        every = merge_intervals(Intervals.joined(*steps.values()))
        activities = [
            Activity(phase, kind, grown.within(span, phase == OUTSIDE), power)
            for phase, span in {**steps, OUTSIDE: every}.items()
            for (kind, power), grown in grown_cpu.items()
        ]
        worked = accelerator_times(tables)
        activities += [Activity(phase, ACCELERATOR, Growth.of(common_time(span, worked))) for phase, span in steps.items()]
        return cls(tuple(each for each in activities if each.amount.whole > 0), steps)

    @classmethod
    def of_spans(cls, steps: dict[str, Intervals], spans: dict[tuple[str, str], Intervals]) -> "Running":
        """From the times of each (phase, where); several at once count several times."""
        made = (Activity(*name, Growth.of(span)) for name, span in spans.items())
        return cls(tuple(each for each in made if each.amount.whole > 0), steps)

    def seconds(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """What ran in each window: shape [windows, 1 + activities], the first column all the time."""
        return np.column_stack([(end - begin) * NS, *(each.amount.between(begin, end) for each in self.activities)])

    def amounts(self, phase: str, where: str | None = None) -> np.ndarray:
        """A phase's time and activities as a row of `seconds`; `where`: those there alone, without the time."""
        chosen = [each.phase == phase and where in (None, each.where) for each in self.activities]
        seconds = float(self.steps[phase].length.sum()) * NS if where is None else 0.0
        return np.array([seconds, *(each.amount.whole * mine for each, mine in zip(self.activities, chosen, strict=True))])

    def places(self, phase: str) -> dict[str, float]:
        """Where a phase ran → seconds."""
        return {each.where: each.amount.whole for each in self.activities if each.phase == phase and not each.exponent}

    def explanations(self) -> list[Explanation]:
        """What power may depend on, the simplest first: phases alone, kinds of CPUs, clocks, both."""
        powers = sorted({each.exponent for each in self.activities if each.where != ACCELERATOR}) or [0]
        kinds = {each.where for each in self.activities} - {ACCELERATOR}
        return [self._explanation(apart, power) for apart in (False, True)[: max(len(kinds), 1)] for power in powers]

    def _explanation(self, apart: bool, power: int) -> Explanation:
        """A constant for each phase, or with `apart` for each phase and kind of CPU, of CPU time by this power of the clock."""
        names: list[tuple[str, str]] = []
        matrix = np.zeros((1 + len(self.activities), 1 + len(self.activities)))
        matrix[0, 0] = 1
        for row, each in enumerate(self.activities, 1):
            name = (each.phase, each.where if apart or each.where == ACCELERATOR else "")
            if each.exponent == (0 if each.where == ACCELERATOR else power):
                names += [name] if name not in names else []
                matrix[row, 1 + names.index(name)] = 1
        return Explanation(matrix[:, : 1 + len(names)], apart, power)


def cpu_pieces(tables: Tables) -> pd.DataFrame:
    """When threads of the program ran: begin_ns, end_ns, `kind` of CPU, its `clock` as a share of the highest; NaN: not known."""
    running = tables["thread_states"]
    running = running[running["state"] == "running"]
    cpus = (tables["cpus"] if "cpus" in tables else pd.DataFrame(columns=["cpu", "policy", "kind"])).set_index("cpu")
    known = cpus.reindex(running["cpu"])
    policy = known["policy"].fillna(-1).astype(np.int64).to_numpy()
    spans = Intervals(policy, running["begin_ns"].to_numpy(np.int64), running["end_ns"].to_numpy(np.int64))
    readings = policy_clocks(tables)
    met = split_intervals(spans, Intervals.of_table(readings, "number"))
    clock = np.append(readings["share"].to_numpy(np.float64), np.nan)[met.right]
    kind = known["kind"].fillna("").to_numpy(object)[met.left]
    return pd.DataFrame({"begin_ns": met.begin, "end_ns": met.end, "kind": kind, "clock": clock})


def cpu_growth(pieces: pd.DataFrame) -> dict[tuple[str, int], Growth]:
    """CPU seconds by kind of CPU and by the power of the clock that they are multiplied by."""
    powers = (0, *telling_exponents(pieces))
    spans = {str(kind): (Intervals.of_table(rows.assign(key=0), "key"), rows["clock"]) for kind, rows in pieces.groupby("kind")}
    return {(kind, n): Growth.of(span, (clock**n).to_numpy()) for kind, (span, clock) in spans.items() for n in powers}


def policy_clocks(tables: Tables) -> pd.DataFrame:
    """The clock of each policy (`number`) as a `share` of its highest, from begin_ns to end_ns, the next reading."""
    clocks = tables["clocks"]
    rows = clocks[(clocks["what"] == "frequency") & (clocks["most"] > 0)].sort_values(["number", "ts_ns"], kind="stable")
    number, ts = rows["number"].to_numpy(np.int64), rows["ts_ns"].to_numpy(np.int64)
    new = np.append(True, number[1:] != number[:-1])[: len(rows)]
    begin = np.where(new, 0, ts)
    end = np.append(np.where(new[1:], EVER, ts[1:]), EVER)[: len(rows)]
    return pd.DataFrame({"number": number, "begin_ns": begin, "end_ns": end, "share": (rows["value"] / rows["most"]).to_numpy()})


def telling_exponents(pieces: pd.DataFrame) -> tuple[int, ...]:
    """EXPONENTS if the clock is known all the time and changed, else none."""
    clock = pieces["clock"].to_numpy()
    if not len(clock) or np.isnan(clock).any():
        return ()
    spent = (pieces["end_ns"] - pieces["begin_ns"]).to_numpy(np.float64)
    spread = np.sqrt(np.average((clock - np.average(clock, weights=spent)) ** 2, weights=spent))
    return EXPONENTS if spread > LEAST_SPREAD else ()


def accelerator_times(tables: Tables) -> Intervals:
    """When steps waited for an accelerator that worked."""
    rows = step_time(tables)
    return merge_intervals(Intervals.of_table(rows[rows["cause"] == ACCELERATOR].assign(key=0), "key"))


def phase_times(tables: Tables) -> dict[str, Intervals]:
    """When steps of each phase were computed; steps of several contexts at once are prefill if one of them is."""
    tokens = tables["tokens"]
    every = {name: tokens[(tokens["phase"] == name) & tokens["complete"]] for name in PHASES}
    prefill, decode = (merge_intervals(Intervals.of_table(rows.assign(key=0), "key")) for rows in every.values())
    return {"prefill": prefill, "decode": uncovered_parts(decode, prefill)}
