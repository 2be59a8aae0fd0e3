"""`--max-overhead`: costly levels are on only part of the time, so that decode slows down by no more than allowed.

Their cost is measured, not accounted: tokens with these levels on, or while they are switched, against tokens without them, in
the same run. The cost of the rest of the recording cannot be measured this way; it is accounted and reduces their share. Both
are in the manifest, so that a recording states its own overhead.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tracer.control.switching import Change, Switch

CHEAP = ("token", "graph", "process", "heat")  # always on
WINDOW_TOKENS, WINDOW_NS = 8, 250_000_000  # minimum of a window
PATIENCE_NS = 5_000_000_000  # after this, a window ends without that many tokens, since decode pauses
LOOK_AGAIN_NS = 10_000_000_000  # how long levels that cost less than allowed stay on between two checks
ON_WINDOWS = 4  # minimum time off after each time on, in windows
AIM = 0.85  # target share of the allowed slowdown: levels go off only after their cost has been measured
LEAST_SHARE = 0.1  # share of the allowed slowdown that is left to the costly levels, whatever the rest of the recording takes
OVERDRAWN = 2.0  # times the allowed slowdown may be lost before levels that seemed cheap go off
KEPT_WINDOWS = 19
ASSUMED = 1.0  # slowdown while on, before any measurement
REMEMBERED = 0.9  # share kept of the time lost and not lost so far, at each check


@dataclass(frozen=True)
class Window:
    """A period with the costly levels on, or off; the median of its decode tokens, ns, or 0 if there were too few."""

    on: bool
    token_ns: float


@dataclass
class Tokens:
    """Number of decode tokens and sum of their times, ns; older ones weigh less."""

    count: float = 0.0
    time_ns: float = 0.0

    def add(self, durations_ns: list[int]) -> None:
        """Add these tokens."""
        self.count, self.time_ns = self.count + len(durations_ns), self.time_ns + sum(durations_ns)

    def fade(self) -> None:
        """Reduce the weight of the tokens counted so far."""
        self.count, self.time_ns = REMEMBERED * self.count, REMEMBERED * self.time_ns


@dataclass
class Budget:
    """Decides when the costly levels go off and on; does nothing by itself.

    allowed: a slowdown, 0.1 for 10 %. besides: the part of it that the rest of the recording takes.
    """

    allowed: float
    besides: float = 0.0
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._with, self._without = Tokens(), Tokens()

    def slowdown(self) -> float | None:
        """Relative increase of the time per token while the levels are on: the median over the latest neighbouring windows."""
        known = [window for window in self.windows if window.token_ns]
        steps = [(a, b) if a.on else (b, a) for a, b in pairwise(known) if a.on != b.on]
        return statistics.median(on.token_ns / off.token_ns for on, off in steps) - 1 if steps else None

    def lost(self) -> float | None:
        """The share by which decode has recently been slower than without these levels, switching included."""
        if not self._without.count:
            return None
        undisturbed = self._without.time_ns / self._without.count * (self._with.count + self._without.count)
        return (self._with.time_ns + self._without.time_ns) / undisturbed - 1

    def observe(self, on: bool, durations_ns: list[int]) -> None:
        """Add decode tokens within the current window, in which the levels are on, or off."""
        self._tokens += durations_ns
        (self._with if on else self._without).add(durations_ns)

    def observe_change(self, durations_ns: list[int]) -> None:
        """Add decode tokens that began while probes were being attached or removed."""
        self._with.add(durations_ns)

    def is_over(self, on: bool, since_ns: int, now_ns: int) -> bool:
        """Whether the current window has lasted long enough; if so, it is kept and the next one begins.

        since_ns: when the change that began the window was completed.
        """
        lasted = now_ns - since_ns
        enough = len(self._tokens) >= WINDOW_TOKENS and lasted >= WINDOW_NS
        if lasted < PATIENCE_NS and not enough:
            return False
        if enough and (self._may_stay(lasted) if on else self._is_beyond(self._room())):
            return False
        self.windows.append(Window(on, statistics.median(self._tokens) if enough else 0.0))
        self._tokens = []
        if not on:
            self._with.fade()
            self._without.fade()
        return True

    def _room(self) -> float:
        """The part of the allowed slowdown that is left for the costly levels."""
        return max(AIM * self.allowed - self.besides, LEAST_SHARE * self.allowed)

    def _is_beyond(self, share: float) -> bool:
        lost = self.lost()
        return lost is not None and lost > share

    def _may_stay(self, lasted: int) -> bool:
        """Whether the levels stay on: until the required time off is long enough to make switching worthwhile.

        The time lost counts too, since a single disturbed window may have shown no cost.
        """
        if self._is_beyond(OVERDRAWN * self._room()):
            return False
        off_per_on = self._off_per_on()
        return lasted < (min(LOOK_AGAIN_NS, ON_WINDOWS * WINDOW_NS / off_per_on) if off_per_on > 0 else LOOK_AGAIN_NS)

    def _off_per_on(self) -> float:
        """Required time off per time on: time lost = room x time not lost."""
        slowdown, room = self.slowdown(), self._room()
        slowdown = ASSUMED if slowdown is None else slowdown
        return slowdown / (1 + slowdown) * (1 + room) / room - 1


class Sampling:
    """Carries out the budget's decisions. `spent_ns` returns the accounted cost so far of the rest of the recording."""

    def __init__(self, allowed: float, switch: Switch, spent_ns: Callable[[], int]):
        self.budget, self.switch, self._spent_ns = Budget(allowed), switch, spent_ns
        self.costly = sorted(switch.probes.levels - set(CHEAP))
        self._began_ns = 0
        self._looked = (0, 0)  # time of the last check, and the cost by then

    def turn(self, finished: np.ndarray, learning: bool) -> None:
        """Add the steps that ended and switch levels if due, but not while probes are still learning their sites."""
        if learning or not self.costly:
            return
        now = time.monotonic_ns()
        if not self._began_ns:
            self._began_ns = self.switch.settled_ns = now
            self._looked = now, self._spent_ns()
        whole = finished[finished["decode"] & finished["complete"]]
        durations = whole["end_ns"] - whole["begin_ns"]
        settled = np.full(len(whole), not self.switch.busy()) & (whole["begin_ns"] >= self.switch.settled_ns)
        self.budget.observe_change(durations[~settled].tolist())
        if self.switch.busy():
            return
        on = self.costly[0] in self.switch.levels_on()
        self.budget.observe(on, durations[settled].tolist())
        if self.budget.is_over(on, self.switch.settled_ns, now):
            self._look(now)
            token_ns = self.budget.windows[-1].token_ns
            tps, why = round(1e9 / token_ns, 3) if token_ns else 0.0, f"slowdown of at most {self.budget.allowed:.0%}"
            self.switch.begin([Change(now, level, not on, tps, why) for level in self.costly])

    def _look(self, now: int) -> None:
        """Determine what the rest of the recording has cost since the last check."""
        (before, spent_before), spent = self._looked, self._spent_ns()
        self._looked, self.budget.besides = (now, spent), (spent - spent_before) / (now - before)

    def to_json(self) -> dict[str, Any]:
        """The measured costs, for the manifest."""
        done = [row["done_ns"] for row in self.switch.changes if row["level"] in self.costly[:1] and row["done_ns"]]
        times = np.diff([self._began_ns, *done, time.monotonic_ns()]) if self._began_ns else np.zeros(1)
        slowdown, share = self.budget.slowdown(), times[::2].sum() / max(times.sum(), 1)
        seen = {"slowdown": self.budget.lost(), "slowdown_while_on": slowdown, "share_on": float(share)}
        seen["besides"] = self.budget.besides
        return {"allowed": self.budget.allowed, **seen}
