"""`--min-tps`: watches the decode speed, sheds the costliest probes while it is too low, and restores them once it recovers.

Tokens that are slow because of a longer context or missed experts do not cause shedding of probes, which would not help.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracer.control.step_latency import StepLatency
from tracer.control.switching import Change, Switch
from tracer.recording.tokens import Misses

Stats = Callable[[str], tuple[int, int, int]]  # program → (runs, ns inside, skipped)
KEPT = ("token", "process")  # the guard itself needs the first; the second finds libraries and threads
COSTLY = ("io", "sched", "operator", "expert", "qnn", "graph")  # the order before anything has been measured
WINDOW, NEEDED = 15, 5  # maximum and minimum number of tokens for the median
MARGIN = 1.1  # factor by which decode must exceed the target before a level is restored
HOLD_NS, LONGEST_HOLD_NS = 2_000_000_000, 256_000_000_000


@dataclass
class Controller:
    """Decides which level to switch, only from the times of decode tokens; does nothing by itself.

    Below `min_tps` it sheds one level after another. After `hold_ns` above it by a margin, it restores the level shed last.
    If decode becomes too slow again within `hold_ns`, that level is shed again and `hold_ns` doubles; once a restored level
    has stayed on for that long, `hold_ns` returns to its minimum.
    """

    min_tps: float
    hold_ns: int = HOLD_NS
    off: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._times: deque[int] = deque(maxlen=WINDOW)
        self._good_since: int | None = None
        self._trial: tuple[str, int] | None = None  # the level restored last, and when

    def observe(self, durations_ns: Iterable[int]) -> None:
        """Add decode tokens in order."""
        self._times.extend(durations_ns)

    def tps(self) -> float:
        """Tokens per second, from the median of the latest tokens; 0 if there are too few."""
        return 1e9 / max(statistics.median(self._times), 1) if len(self._times) >= NEEDED else 0.0

    def decide(self, now_ns: int, on: dict[str, float]) -> Change | None:
        """The change to make now, if any; `on`: the levels that may be shed, with their recent cost."""
        tps = self.tps()
        if not tps:
            return None
        if self._trial and now_ns - self._trial[1] >= self.hold_ns and tps >= self.min_tps:
            self._trial, self.hold_ns = None, HOLD_NS
        if tps < self.min_tps:
            self._good_since = None
            return self._shed(now_ns, tps, on) if on else None
        if tps < self.min_tps * MARGIN:
            self._good_since = None
        elif self._good_since is None:
            self._good_since = now_ns
        if self.off and self._good_since is not None and now_ns - self._good_since >= self.hold_ns:
            return self._restore(now_ns, tps)
        return None

    def _shed(self, now_ns: int, tps: float, on: dict[str, float]) -> Change:
        level = max(on, key=lambda name: (on[name], -COSTLY.index(name) if name in COSTLY else 0))
        why = f"decode below {self.min_tps:g} tokens/s; costliest level"
        if self._trial and self._trial[0] in on:
            level = self._trial[0]
            why = f"decode fell below {self.min_tps:g} tokens/s when it came back"
            self.hold_ns = min(2 * self.hold_ns, LONGEST_HOLD_NS)
        self._trial = None
        self.off.append(level)
        return self._changed(Change(now_ns, level, False, round(tps, 3), why))

    def _restore(self, now_ns: int, tps: float) -> Change:
        level = self.off.pop()
        self._trial = level, now_ns
        why = f"decode above {self.min_tps * MARGIN:g} tokens/s for {self.hold_ns / 1e9:g} s"
        return self._changed(Change(now_ns, level, True, round(tps, 3), why))

    def _changed(self, change: Change) -> Change:
        self._times.clear()
        self._good_since = None
        return change


class Explanation:
    """Whether the latest decode steps are slow because of context and misses, whose costs are learnt while speed is good."""

    def __init__(self, min_tps: float):
        self.min_tps, self.latency, self.withheld = min_tps, StepLatency(), 0
        self._latest: deque[float] = deque(maxlen=WINDOW)  # seconds, minus what context and misses add to a typical step

    def observe(self, steps: Iterable[tuple[int, int, float]], good: bool) -> None:
        """Add steps as (context, experts missed, seconds); learn from them if decode is fast enough."""
        for context, missed, seconds in steps:
            self._latest.append(seconds - self.latency.beyond_typical(context, missed))
            if good:
                self.latency.update(context, missed, seconds)

    def holds(self) -> bool:
        """Whether a typical step would be fast enough now."""
        enough = len(self._latest) >= NEEDED and self.latency.steps >= WINDOW
        return enough and statistics.median(self._latest) <= 1 / self.min_tps

    def forget(self) -> None:
        """Drop the latest steps, which were measured under other conditions than the coming ones."""
        self._latest.clear()

    def to_json(self) -> dict[str, Any]:
        """The learnt costs, their errors, and how often they prevented a change, for the manifest."""
        error = {name: None if value != value else round(value, 5) for name, value in self.latency.error().items()}
        names = ("seconds", "seconds_per_1000_tokens", "seconds_per_miss")
        learnt = dict(zip(names, (float(f"{value:.6g}") for value in self.latency.coefficients), strict=True))
        return {"steps": self.latency.steps, "coefficients": learnt, "error": error, "withheld": self.withheld}


class Quality:
    """Carries out the controller's decisions."""

    def __init__(self, min_tps: float, switch: Switch, misses: Misses | None = None):
        self.controller, self.explanation, self.switch = Controller(min_tps), Explanation(min_tps), switch
        self.misses = misses
        self._spent_before: dict[str, float] = {}

    def turn(self, finished: np.ndarray, stats: Stats) -> None:
        """Add the steps that ended and begin a change if one is due."""
        if self.switch.busy():
            return
        good = self.switch.settled(finished)
        if not len(good):
            return
        durations = (good["end_ns"] - good["begin_ns"]).tolist()
        self.controller.observe(durations)
        self._explain(good, durations)
        levels = [level for level in self.switch.levels_on() if level not in KEPT]
        spent = self._spent(stats) if 0 < self.controller.tps() < self.controller.min_tps else {}
        lately = {level: spent.get(level, 0.0) - self._spent_before.get(level, 0.0) for level in levels}
        on = {level: ns for level, ns in lately.items() if ns > 0}  # shedding a level without cost gains nothing
        if on and 0 < self.controller.tps() < self.controller.min_tps and self.explanation.holds():
            self.explanation.withheld += 1
            return
        change = self.controller.decide(time.monotonic_ns(), on)
        if change:
            self.explanation.forget()
            self.switch.begin([change], lambda: self._note_spent(stats))

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return self.explanation.to_json()

    def _explain(self, steps: np.ndarray, durations_ns: list[int]) -> None:
        """Explain the steps' times by context and misses, if the level that records misses is on."""
        missed = self.misses.within(steps) if self.misses else [0] * len(steps)
        if "expert" in self.switch.probes.shed_levels:
            self.explanation.forget()
            return
        observations = zip(steps["position"].tolist(), missed, (ns / 1e9 for ns in durations_ns), strict=True)
        self.explanation.observe(observations, self.controller.tps() >= self.controller.min_tps)

    def _note_spent(self, stats: Stats) -> None:
        self._spent_before = self._spent(stats)

    def _spent(self, stats: Stats) -> dict[str, float]:
        """ns spent so far in the probes of each level: traps by calibration, programs by the kernel's counts."""
        probes = self.switch.probes
        programs = {row.program: row for row in list(probes.rows)}
        total: dict[str, float] = {}
        for row in programs.values():
            runs, inside, _ = stats(row.program)
            trap = probes.costs.get("return" if row.at == "return" else row.cost, 0.0)
            total[row.level] = total.get(row.level, 0.0) + inside + runs * trap
        return total
