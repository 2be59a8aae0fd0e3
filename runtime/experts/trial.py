"""Decides during decoding whether prefetching pays: both ways alternate, and the faster one is kept.

What a prefetch saves depends on the disk's speed and queue, on the computation that a read can overlap, and on the processor
time of predicting. A token's total time includes all of these, so it is compared: a few tokens without and with prefetching
(A B B A), repeatedly, until the means (in which rare slow tokens count) differ by more than chance explains. That is a
sequential test: with LOOKS looks, prefetching that saves nothing wins in at most one trial of twenty, and a saving larger than
the noise is detected within some tens of tokens. If in doubt, prefetching stays off. A rest with the faster way follows, then
another trial; each one that confirms the last doubles the rest, and tokens that become clearly slower end it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import hypot, sqrt
from statistics import fmean, variance
from typing import Any

from runtime.cache_rules.rule import CacheRule
from runtime.experts.prefetch import Prefetcher
from runtime.experts.routing import Listener
from runtime.experts.slots import SlotCache
from runtime.telemetry.log import RunLog, Step
from runtime.telemetry.probes import Phase

WINDOW = 4  # consecutive tokens of one way
SETTLING = 1  # first tokens of a window, not counted: loads of the other way still finish, and the history fills
LOOKS = 8  # comparisons of the means in one trial, each after four windows
KEPT = 2 * LOOKS * 2 * WINDOW  # latest tokens of each way that are compared: two trials
GAIN = 0.02  # share of a token's time that prefetching must save
SURE = 2.25  # standard errors by which the saving must exceed that: Pocock's boundary for this number of looks, 5 % one-sided
HOPELESS = 1.0  # the trial ends early if the saving plus this many standard errors does not reach GAIN
PATIENCE = 2  # looks after which it also ends if prefetching saves nothing so far: rare slow tokens make the error wide
SLOWER, RECENT = 1.25, 16  # factor, and number of recent tokens that must be slower by it to end a rest
REST, LONGEST_REST = 96, 1024  # tokens between two trials


@dataclass(frozen=True)
class Sample:
    """One decoded token: its time, and the parts of it that layers waited for loads and that predictions took, ns."""

    whole_ns: int
    wait_ns: int = 0
    predict_ns: int = 0


def last_samples() -> deque[Sample]:
    """An empty queue for the last tokens of one way."""
    return deque(maxlen=KEPT)


@dataclass
class Trial:
    """`on`: whether to prefetch for the next token; `pays`: the last verdict, None before the first; `reason`: why, one line.

    `cheap`: predicting takes next to no time, so that whatever saves anything is kept, in doubt too.
    """

    cheap: bool = False
    with_it: deque[Sample] = field(default_factory=last_samples)
    without: deque[Sample] = field(default_factory=last_samples)
    pays: bool | None = None
    reason: str = "undecided: too few tokens were decoded to compare"

    def __post_init__(self) -> None:
        self._recent: deque[Sample] = deque(maxlen=RECENT)
        self._plan = self._schedule()
        self.on, self._counts = next(self._plan)

    def took(self, sample: Sample) -> None:
        """Add a token that was decoded with or without prefetching, as `on` said."""
        self._recent.append(sample)
        if self._counts:
            (self.with_it if self.on else self.without).append(sample)
        self.on, self._counts = next(self._plan)

    def _schedule(self) -> Iterator[tuple[bool, bool]]:
        """(prefetch, count it) of every token."""
        rest = REST
        while True:
            verdict = None
            for look in range(1, LOOKS + 1):
                for way, tokens in ((False, WINDOW), (True, 2 * WINDOW), (False, WINDOW)):
                    yield from ((way, token >= SETTLING) for token in range(tokens))
                verdict = self._verdict(look)
                if verdict is not None:
                    break
            before, self.pays = self.pays, self.cheap and self._saving()[0] > 0 if verdict is None else verdict
            self.reason = f"{'on' if self.pays else 'off'}: {self._means()}"
            confirmed = verdict is not None and verdict is before
            rest = min(2 * rest, LONGEST_REST) if confirmed else REST
            yield from self._resting(self.pays, rest)

    def _resting(self, way: bool, tokens: int) -> Iterator[tuple[bool, bool]]:
        """A rest; if it ends because all tokens became slower, earlier samples are dropped.

        With prefetching its tokens count: slow ones may be too rare to occur in a trial.
        """
        usual = mean_ns(self.with_it if way else self.without)
        for token in range(tokens):
            yield way, way
            if token % WINDOW == 0 and token > RECENT and mean_ns(self._recent) > SLOWER * usual:
                self.with_it.clear()
                self.without.clear()
                return
            if way and token % WINDOW == 0 and self._saving()[0] < 0:
                return

    def _saving(self) -> tuple[float, float]:
        """(share of a token's time that prefetching saves, its standard error)."""
        usual = mean_ns(self.without)
        return 1 - mean_ns(self.with_it) / usual, hypot(*map(error_ns, (self.with_it, self.without))) / usual

    def _verdict(self, look: int) -> bool | None:
        """Whether prefetching pays, at this look of the trial; None while undecided."""
        saved, error = self._saving()
        gain = 0 if self.cheap else GAIN
        if saved - SURE * error > gain:
            return True
        return False if saved + HOPELESS * error < gain or (look >= PATIENCE and saved <= 0) else None

    def _means(self) -> str:
        saved, error = self._saving()
        ways = f"{describe_samples(self.with_it)} with prefetching, {describe_samples(self.without)} without"
        counted = f"means of {len(self.with_it)} and {len(self.without)} tokens"
        saving = f"saves {saved:.1%}" if saved >= 0 else f"costs {-saved:.1%}"
        return f"{ways} ({counted}, {saving}, standard error {error:.1%})"


def mean_ns(samples: deque[Sample]) -> float:
    """Mean time of whole tokens."""
    return fmean(sample.whole_ns for sample in samples)


def error_ns(samples: deque[Sample]) -> float:
    """Standard error of the mean time."""
    return sqrt(variance(sample.whole_ns for sample in samples) / len(samples))


def describe_samples(samples: deque[Sample]) -> str:
    """Milliseconds per token and their parts, as text."""
    wait, predict = (fmean(times) / 1e6 for times in zip(*((s.wait_ns, s.predict_ns) for s in samples), strict=True))
    parts = f"{wait:.2f} waiting" + (f", {predict:.2f} predicting" if predict else "")
    return f"{mean_ns(samples) / 1e6:.2f} ms per token ({parts})"


class Prefetching:
    """Turns prediction on, always or by the decision of a trial: the extension's, or a Prefetcher among the engine's listeners.

    While it is off, decoding is plain demand loading: no listener, and the cache loads as the engine has set it for the step. In
    prefill a Prefetcher always listens: the prompt fills the history, and a chunk requests all its experts at once.
    """

    def __init__(
        self,
        prefetcher: Prefetcher | SlotCache,
        cache: CacheRule[Any],
        listeners: list[Listener],
        log: RunLog,
        trial: Trial | None,
    ):
        self.prefetcher, self.cache, self.listeners, self.log, self.trial = prefetcher, cache, listeners, log, trial
        self._waited = self._predicted = 0

    def step_begins(self, step: Step) -> None:
        """Called before the listeners are notified."""
        on = self.trial is None or self.trial.on or step.phase == Phase.PREFILL
        self.cache.background |= on
        if isinstance(self.prefetcher, SlotCache):
            self.prefetcher.predict(on)
        elif on != (self.prefetcher in self.listeners):
            (self.listeners.append if on else self.listeners.remove)(self.prefetcher)
        self._waited, self._predicted = self.log.stall_ns, self.prefetcher.spent_ns

    def step_ends(self, step: Step) -> None:
        """Add a decoded token to the trial."""
        if self.trial and step.phase == Phase.DECODE and step.n_tokens == 1:
            predicted = self.prefetcher.spent_ns - self._predicted
            self.trial.took(Sample(step.duration_ns, self.log.stall_ns - self._waited, predicted))
            self.log.prefetching = self.trial.reason
