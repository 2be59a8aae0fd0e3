"""The runtime's policies, without its sessions: expert cache, token buffers, and a predictor for prefetching.

Kept apart from the runtime on purpose (the analyzer imports no engine); tests hold both against each other on the same routes.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np


class Form(NamedTuple):
    """An expert in the shape that one unit runs; `tier` 0 is dynamic."""

    layer: int
    expert: int
    unit: str
    tier: int


class Cache:
    """Least recently used, in bytes. Hits count by what was held when the layer began; the running layer's forms go last."""

    def __init__(self, budget: int | None, sizes: dict[str, int]):
        self.budget, self.sizes = budget, sizes
        self.resident = self.peak = 0
        self.hits = self.misses = 0
        self.held: OrderedDict[Form, None] = OrderedDict()
        self._found: frozenset[Form] = frozenset()
        self._named: set[Form] = set()
        self._counted: set[Form] = set()

    def begin(self, layer: int) -> None:
        """A layer begins."""
        self._found = frozenset(form for form in self.held if form.layer == layer)
        self._named.clear()
        self._counted.clear()

    def name(self, forms: list[Form]) -> None:
        """The layer will run these."""
        self._named.update(forms)

    def count(self, form: Form) -> bool:
        """Was it there when the layer began? Counts a form once a layer."""
        hit = form in self._found
        if form not in self._counted:
            self._counted.add(form)
            self.hits += hit
            self.misses += not hit
        return hit

    def touch(self, form: Form) -> bool:
        """Use a form: True where it is held."""
        self._named.add(form)
        if form not in self.held:
            return False
        self.held.move_to_end(form)
        return True

    def insert(self, form: Form, speculative: bool = False) -> bool:
        """Hold a form, evicting for it; a speculative one never evicts what the running layer named."""
        size = self.sizes[form.unit]
        while self.budget is not None and self.resident + size > self.budget and self.held:
            victim = next((held for held in self.held if held not in self._named), None)
            if victim is None and speculative:
                return False
            gone = victim or next(iter(self.held))
            del self.held[gone]
            self.resident -= self.sizes[gone.unit]
        self.held[form] = None
        self.resident += size
        self.peak = max(self.peak, self.resident)
        return True


class Buffers:
    """Rows that wait with their expert until `tier` of them make a batch; None: until the flush."""

    def __init__(self, experts: int, tier: int | None):
        self.tier = tier
        self._waiting = np.zeros(experts, np.int64)

    def add(self, chosen: np.ndarray) -> list[tuple[int, int]]:
        """Batches (expert, rows) that became full by a chunk's choices [rows, k]."""
        experts, counts = np.unique(chosen, return_counts=True)
        full = []
        self._waiting[experts] += counts
        if self.tier is not None:
            for expert in experts.tolist():
                whole = int(self._waiting[expert]) // self.tier
                self._waiting[expert] -= whole * self.tier
                full += [(expert, self.tier)] * whole
        return full

    def flush(self) -> list[tuple[int, int]]:
        """What still waits, one batch for each expert."""
        left = [(expert, int(rows)) for expert, rows in enumerate(self._waiting) if rows]
        self._waiting[:] = 0
        return left


class Predictor:
    """Experts of the next layer from those of this one: how often they followed each other so far in the trace."""

    def __init__(self, layers: int, experts: int):
        self._followed = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))

    def probabilities(self, layer: int, chosen: np.ndarray) -> np.ndarray:
        """Share of the time [experts] that layer + 1 used each expert when `chosen` ran in `layer`, averaged over `chosen`."""
        used = np.unique(chosen)
        seen = self._seen[layer, used][:, None]
        return np.asarray(
            np.divide(self._followed[layer, used], seen, where=seen > 0, out=np.zeros_like(self._followed[layer, used])).mean(0)
        )

    def learn(self, layer: int, chosen: np.ndarray, following: np.ndarray) -> None:
        """Layer + 1 used `following`."""
        used = np.unique(chosen)
        self._seen[layer, used] += 1
        self._followed[layer][np.ix_(used, np.unique(following))] += 1
