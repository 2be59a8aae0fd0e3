"""Loads experts before their router asks for them, by a threshold on predicted probabilities, in two stages.

1. When a token enters the model, its embedding and the layers' recent choices predict what the token may need (view `token`).
2. When a layer begins, the state that enters it predicts again for this layer (`near`) and for the next (`next`): loads that have
   not begun and have become unlikely are cancelled, the others move forward in the queue, and new ones join, during attention.

Prefill has no prefetching: its chunks choose nearly every expert, and the cache requests all of them at once.
"""

from collections.abc import Iterable
from math import log
from time import monotonic_ns
from typing import Protocol

import numpy as np

from runtime.cache_rules.forms import Form
from runtime.experts.predictor import probability_of
from runtime.experts.routing import History
from runtime.models import Family

# Least probabilities for loading an expert while a loading thread is idle, and while all of them are busy, when a useless load
# delays those that the router will ask for. Below the third, a waiting load is cancelled.
SPARE, SCARCE, NEEDLESS = 0.45, 0.6, 0.1
# Share of a new measurement in the mean time of a prediction.
FRESH = 1 / 16
# Factor on that mean at each layer without a prediction, so that one slow prediction does not count for ever.
FORGOTTEN = 0.998
# Loads of a nearer layer come first; within a layer, log odds decide.
LAYER_AHEAD = 100.0


class Odds(Protocol):
    """The interface of a predictor for a Prefetcher."""

    def tokens(self, embedded: np.ndarray, history: History) -> np.ndarray | None:
        """Log odds [layers, E] for the token with embedding [1, H]; None if nothing can be predicted so early."""

    def ahead(self, layer: int, hidden: np.ndarray) -> Iterable[np.ndarray]:
        """Log odds [E] of this layer and of the next from the state [1, H] that enters this one."""


class Loads(Protocol):
    """The interface of a cache for a Prefetcher; see CacheRule."""

    @property
    def load_ns(self) -> float:
        """Mean time of a load."""

    @property
    def idle(self) -> bool:
        """Whether no load is waiting."""

    @property
    def busy(self) -> bool:
        """Whether another load would have to wait."""

    def absent(self, layers: int, experts: int) -> np.ndarray:
        """[layers, E] bool, kept up to date: neither held nor being loaded."""

    def waiting(self, layer: int) -> list[int]:
        """Experts of the layer whose load can be cancelled."""

    def ready(self, form: Form) -> bool:
        """Whether the form needs no load."""

    def prefetch(self, form: Form, urgency: float) -> bool:
        """Load the form in the background."""

    def cancel(self, form: Form) -> bool:
        """Cancel a load that has not begun."""


class Prefetcher:
    """Listens to the engine's steps and requests loads from the cache (runtime.experts.routing.Listener).

    `frugal`: stage two skips a layer if predicting takes longer than the loads that stage one expects there.
    `spare`, `scarce`: least probabilities of a load while a loading thread is idle, and while all are busy; stage one requests
    loads for the whole token at once and keeps all threads busy. `spent_ns`: time spent on predicting so far.
    """

    def __init__(
        self,
        predictor: Odds,
        cache: Loads,
        family: Family,
        backend: int,
        frugal: bool = True,
        spare: float = SPARE,
        scarce: float = SCARCE,
    ):
        self.predictor, self.cache, self.absent = predictor, cache, cache.absent(family.layers, family.experts)
        self._forms = {layer: [Form(layer, expert, backend, 0) for expert in range(family.experts)] for layer in family.routed}
        self._spare, self._scarce, self._needless = map(log_odds_of, (spare, scarce, NEEDLESS))
        self.frugal, self._look_ns, self.spent_ns = frugal, 0.0, 0
        self.history = History(family.layers, family.experts)
        self._layers, self._chosen = np.array(family.routed), np.zeros((family.layers, family.top_k), np.int64)
        self._worth = [True] * family.layers + [False]
        self._decoding = self._unlearnt = False

    def step_begins(self, embedded: np.ndarray) -> None:
        """Stage one, for a decoded token."""
        if self._unlearnt:
            self.history.add_token(self._layers, self._chosen[self._layers])
            self._unlearnt = False
        self._decoding = len(embedded) == 1
        began = monotonic_ns()
        odds = self.predictor.tokens(embedded, self.history) if self._decoding else None
        if odds is not None:
            layers, experts = ((odds > self._scarce) & self.absent).nonzero()
            for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True):
                if layer in self._forms:
                    self._ask(self._forms[layer][expert], layer + 2, odds[layer, expert])
            if self.frugal:
                expected_ns = (probability_of(odds) * self.absent).sum(axis=1) * self.cache.load_ns
                self._worth[:-1] = (expected_ns > self._look_ns).tolist()
        self.spent_ns += monotonic_ns() - began

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """Stage two, for this layer and the next."""
        if not self._decoding:
            return
        began = monotonic_ns()
        if not (self._worth[layer] or self._worth[layer + 1]):
            self._look_ns *= FORGOTTEN
            return
        for distance, odds in enumerate(self.predictor.ahead(layer, hidden)):
            if self._worth[layer + distance] and layer + distance in self._forms:
                self._stage(layer + distance, odds, distance)
        took = monotonic_ns() - began
        self.spent_ns += took
        self._look_ns += FRESH * (took - self._look_ns)

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """Remember the choice; a decoded token's layers are added together when the next token begins."""
        if self._decoding:
            self._chosen[layer] = chosen[0]
            self._unlearnt = True
        else:
            self.history.add(layer, chosen)

    def _stage(self, layer: int, odds: np.ndarray, distance: int) -> None:
        forms, least = self._forms[layer], self._scarce if self.cache.busy else self._spare
        for expert in self.cache.waiting(layer):
            if odds[expert] < self._needless:
                self.cache.cancel(forms[expert])
        if self.cache.idle:
            likely = ((odds > least) & self.absent[layer]).nonzero()[0].tolist()
        else:
            # Loads in the queue move forward.
            likely = [expert for expert in (odds > least).nonzero()[0].tolist() if not self.cache.ready(forms[expert])]
        for expert in sorted(likely, key=odds.__getitem__, reverse=True):
            self._ask(forms[expert], distance, odds[expert])

    def _ask(self, form: Form, distance: int, odds: float) -> None:
        self.cache.prefetch(form, distance * LAYER_AHEAD - float(odds))


def log_odds_of(chance: float) -> float:
    """Log odds of a probability between 0 and 1; infinite at the ends."""
    if chance <= 0 or chance >= 1:
        return float("inf") if chance >= 1 else -float("inf")
    return log(chance / (1 - chance))
