"""Decides while tokens are decoded whether prefetching pays: both ways take turns, and the quicker one is kept.

What a prefetch saves depends on the disk's speed and queue, on the compute that a read can hide behind, and on what predicting
costs the same processors. A token's whole time has all of it in it, so that is what is compared: a few tokens without and with
prefetching (A B B A), again and again until the means (rare slow tokens count in the sum) differ by more than chance explains.
That is a sequential test: looking LOOKS times, prefetching that saves nothing wins in at most one trial of twenty, and a saving
larger than the noise is found within some tens of tokens. In doubt prefetching keeps still. A rest with the quicker way follows,
then another trial; every one that confirms the last doubles the rest, and tokens that become clearly slower end it.
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
from runtime.telemetry.log import RunLog, Step
from runtime.telemetry.probes import Phase

WINDOW = 4  # tokens of one way in a row
SETTLING = 1  # of its tokens, which are not counted: loads of the other way still end, and the history fills
LOOKS = 8  # at the means of one trial, each behind four windows
KEPT = 2 * LOOKS * 2 * WINDOW  # tokens of each way that are compared: two trials
GAIN = 0.02  # share of a token's time that prefetching must save
SURE = 2.25  # standard errors of the saving that lie above that: Pocock's boundary for so many looks, 5 % one-sided
HOPELESS = 1.0  # standard errors above the saving that do not reach it: the trial ends early
SLOWER, RECENT = 1.25, 16  # by which so many recent tokens end a rest
REST, LONGEST_REST = 96, 1024  # tokens between two trials


@dataclass(frozen=True)
class Sample:
    """One decoded token: its time, and what of it layers waited for loads and predictions took, ns."""

    whole_ns: int
    wait_ns: int = 0
    predict_ns: int = 0


def kept() -> deque[Sample]:
    """The last tokens of one way."""
    return deque(maxlen=KEPT)


@dataclass
class Trial:
    """`on`: shall the next token be prefetched? `pays`: the last verdict, None before the first; `reason`: in one line, why."""

    with_it: deque[Sample] = field(default_factory=kept)
    without: deque[Sample] = field(default_factory=kept)
    pays: bool | None = None
    reason: str = "undecided: too few tokens were decoded to compare"

    def __post_init__(self) -> None:
        self._recent: deque[Sample] = deque(maxlen=RECENT)
        self._plan = self._schedule()
        self.on, self._counts = next(self._plan)

    def took(self, sample: Sample) -> None:
        """A token was decoded the way that `on` said."""
        self._recent.append(sample)
        if self._counts:
            (self.with_it if self.on else self.without).append(sample)
        self.on, self._counts = next(self._plan)

    def _schedule(self) -> Iterator[tuple[bool, bool]]:
        """(prefetch, count it) of every token."""
        rest = REST
        while True:
            verdict = None
            for _ in range(LOOKS):
                for way, tokens in ((False, WINDOW), (True, 2 * WINDOW), (False, WINDOW)):
                    yield from ((way, token >= SETTLING) for token in range(tokens))
                verdict = self._verdict()
                if verdict is not None:
                    break
            before, self.pays = self.pays, bool(verdict)
            self.reason = f"{'on' if self.pays else 'off'}: {self._means()}"
            confirmed = verdict is not None and verdict is before
            rest = min(2 * rest, LONGEST_REST) if confirmed else REST
            yield from self._resting(self.pays, rest)

    def _resting(self, way: bool, tokens: int) -> Iterator[tuple[bool, bool]]:
        """A rest; where it ends as all tokens became slower, what was known is forgotten.

        With prefetching its tokens count: a slow one may be too rare for a trial to meet.
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
        """Share of a token's time that prefetching saves, and its standard error."""
        usual = mean_ns(self.without)
        return 1 - mean_ns(self.with_it) / usual, hypot(*map(error_ns, (self.with_it, self.without))) / usual

    def _verdict(self) -> bool | None:
        """Does prefetching pay? None while undecided."""
        saved, error = self._saving()
        if saved - SURE * error > GAIN:
            return True
        return False if saved + HOPELESS * error < GAIN else None

    def _means(self) -> str:
        saved, error = self._saving()
        ways = f"{described(self.with_it)} with prefetching, {described(self.without)} without"
        counted = f"means of {len(self.with_it)} and {len(self.without)} tokens"
        return f"{ways} ({counted}, {saved:+.1%} saved, standard error {error:.1%})"


def mean_ns(samples: deque[Sample]) -> float:
    """Of whole tokens."""
    return fmean(sample.whole_ns for sample in samples)


def error_ns(samples: deque[Sample]) -> float:
    """Standard error of their mean."""
    return sqrt(variance(sample.whole_ns for sample in samples) / len(samples))


def described(samples: deque[Sample]) -> str:
    """Milliseconds per token, and what is known of them."""
    wait, predict = (fmean(times) / 1e6 for times in zip(*((s.wait_ns, s.predict_ns) for s in samples), strict=True))
    parts = f"{wait:.2f} waiting" + (f", {predict:.2f} predicting" if predict else "")
    return f"{mean_ns(samples) / 1e6:.2f} ms per token ({parts})"


class Prefetching:
    """Puts a Prefetcher among the engine's listeners, always or where a trial says so.

    While it keeps still, decoding is plain demand loading: no listener, and loads on the thread that asks for them. In prefill
    it always listens: the prompt fills the history, and a chunk sends for all its experts at once.
    """

    def __init__(
        self, prefetcher: Prefetcher, cache: CacheRule[Any], listeners: list[Listener], log: RunLog, trial: Trial | None
    ):
        self.prefetcher, self.cache, self.listeners, self.log, self.trial = prefetcher, cache, listeners, log, trial
        self._waited = self._predicted = 0

    def step_begins(self, step: Step) -> None:
        """Ahead of the listeners' own notice."""
        self.cache.background = on = self.trial is None or self.trial.on or step.phase == Phase.PREFILL
        if on != (self.prefetcher in self.listeners):
            (self.listeners.append if on else self.listeners.remove)(self.prefetcher)
        self._waited, self._predicted = self.log.stall_ns, self.prefetcher.spent_ns

    def step_ends(self, step: Step) -> None:
        """A decoded token counts in the trial."""
        if self.trial and step.phase == Phase.DECODE and step.n_tokens == 1:
            predicted = self.prefetcher.spent_ns - self._predicted
            self.trial.took(Sample(step.duration_ns, self.log.stall_ns - self._waited, predicted))
            self.log.prefetching = self.trial.reason
