"""How a step is split: chunks of rows, tiers of static shapes, and buffers that collect rows until a full tier can run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Rows of one expert that run together: the expert is choice number `slots[i]` of token `tokens[i]`."""

    expert: int
    tokens: np.ndarray
    slots: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


class TokenBuffers:
    """One buffer per expert; `tier` rows make a full batch (None: rows wait until the flush).

    `early`: how many experts may run before the flush (None: all), the first that fill a batch. The others run each in one go, so
    that a cache that holds only `early` and one more loads each expert once.
    """

    def __init__(self, experts: int, tier: int | None, early: int | None = None):
        self.tier, self.early = tier, experts if early is None else early
        self._begun: set[int] = set()
        self._waiting: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(experts)]

    def add(self, first_token: int, chosen: np.ndarray) -> list[Batch]:
        """Add the experts [n, k] chosen by tokens first_token …; returns the batches that became full, by expert."""
        k = chosen.shape[1]
        order = np.argsort(chosen.reshape(-1), kind="stable")
        experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
        full: list[Batch] = []
        for expert, entries in zip(experts.tolist(), np.split(order, starts[1:]), strict=True):
            self._waiting[expert].append((entries // k + first_token, entries % k))
            full.extend(self._full(expert))
        return full

    def flush(self) -> list[Batch]:
        """All waiting rows: per expert the full batches, if it had to wait, and one partial batch."""
        return [part for expert, waiting in enumerate(self._waiting) if waiting for part in self._split(self._take(expert))]

    def _full(self, expert: int) -> Iterator[Batch]:
        tier = self.tier
        if tier is None or sum(len(tokens) for tokens, _ in self._waiting[expert]) < tier:
            return
        if expert not in self._begun and len(self._begun) >= self.early:
            return
        self._begun.add(expert)
        for batch in self._split(self._take(expert)):
            if len(batch) == tier:
                yield batch
            else:
                self._waiting[expert].append((batch.tokens, batch.slots))

    def _split(self, batch: Batch) -> Iterator[Batch]:
        tier = self.tier or len(batch)
        for start in range(0, len(batch), tier):
            yield Batch(batch.expert, batch.tokens[start : start + tier], batch.slots[start : start + tier])

    def _take(self, expert: int) -> Batch:
        waiting, self._waiting[expert] = self._waiting[expert], []
        return Batch(expert, np.concatenate([tokens for tokens, _ in waiting]), np.concatenate([slots for _, slots in waiting]))


def slice_chunks(n: int, rows: int, static: bool) -> Iterator[slice]:
    """Slices of a step's n rows, `rows` at a time. With dynamic shapes a single row joins its neighbours: matrix kernels sum one
    row in another order than several, and results must not depend on the chunk."""
    if not static and n > 1:
        rows = max(rows, 2)
    first = 0
    while first < n:
        last = min(first + rows, n)
        if not static and n - last == 1:
            last = n
        yield slice(first, last)
        first = last


def early_experts(budget: int | None, form_bytes: int) -> int | None:
    """How many experts may run before a layer's flush if a cache of `budget` bytes is to load each once; None: any number."""
    return None if budget is None else max(budget // max(form_bytes, 1) - 1, 0)


def smallest_tier(tiers: Iterable[int], rows: int, loaded: Iterable[int] = ()) -> int:
    """The smallest static shape that holds `rows`, of those `loaded` if one does; 0 (dynamic) if there are no tiers."""
    fitting = (min((tier for tier in shapes if tier >= rows), default=0) for shapes in (loaded, tiers))
    return next(filter(None, fitting), 0)
