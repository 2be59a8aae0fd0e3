"""Loads experts before their router asks: a threshold on predicted chances, in two stages.

1. When a token enters the model, its embedding and the layers' recent choices say what the whole token may need (view `token`).
2. When a layer begins, the state that enters it says it again for this layer (`near`) and for the next (`next`): loads that have
   not begun and look needless now are cancelled, the others move forward in the queue, and new ones join. They overlap attention.

Prefill is left alone: its chunks choose nearly every expert, and the cache sends for all of them at once.
"""

from typing import Protocol

import numpy as np

from runtime.cache import ExpertCache
from runtime.models import Family
from runtime.policies import Form
from runtime.predictor import Predictor
from runtime.routing import History

THRESHOLDS = {"token": 0.9, "next": 0.7, "near": 0.4}
NEEDLESS = 0.1


class Chances(Protocol):
    """What a Prefetcher asks of a predictor."""

    def tokens(self, embedded: np.ndarray, history: History) -> np.ndarray | None:
        """Chances [layers, E] for the token whose embedding is [1, H]; None where nothing is known so early."""

    def ahead(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """Chances [2, E] of this layer and the next ([1, E]: of the last) from the state [1, H] that enters this one."""


class Prefetcher:
    """Listens to the engine's steps and asks the cache for loads (runtime.routing.Listener)."""

    def __init__(
        self,
        predictor: "Chances | Predictor",
        cache: ExpertCache,  # type: ignore[type-arg]
        family: Family,
        backend: int,
        thresholds: dict[str, float] | None = None,
    ):
        self.predictor, self.cache = predictor, cache
        self._forms = [[Form(layer, expert, backend, 0) for expert in range(family.experts)] for layer in range(family.layers)]
        self.thresholds = THRESHOLDS | (thresholds or {})
        self.history = History(family.layers, family.experts)
        self._decoding = False

    def step_begins(self, embedded: np.ndarray) -> None:
        """Stage one, for a decoded token."""
        self._decoding = len(embedded) == 1
        chances = self.predictor.tokens(embedded, self.history) if self._decoding else None
        if chances is not None:
            layers, experts = np.nonzero(chances > self.thresholds["token"])
            for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True):
                self.cache.prefetch(self._forms[layer][expert], 3.0 + layer - float(chances[layer, expert]))

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """Stage two, for this layer and the next."""
        if not self._decoding:
            return
        for distance, chances in enumerate(self.predictor.ahead(layer, hidden)):
            self._stage(layer + distance, chances, ("near", "next")[distance], float(distance))

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """Remember what was chosen."""
        self.history.add(layer, chosen)

    def _stage(self, layer: int, chances: np.ndarray, view: str, distance: float) -> None:
        for expert in self.cache.waiting(layer):
            if chances[expert] < NEEDLESS:
                self.cache.cancel(self._forms[layer][expert])
        forms, ready = self._forms[layer], self.cache.ready
        missing = [expert for expert in np.nonzero(chances > self.thresholds[view])[0].tolist() if not ready(forms[expert])]
        for expert in sorted(missing, key=lambda expert: -chances[expert]):
            self.cache.prefetch(forms[expert], distance + 1 - float(chances[expert]))
