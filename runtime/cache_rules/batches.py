"""How a step is split: chunks of rows, tiers of static shapes, and buffers that collect rows until a full tier can run."""

from collections.abc import Iterator
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
    """One buffer per expert; `tier` rows make a full batch (None: rows wait until the flush)."""

    def __init__(self, experts: int, tier: int | None):
        self.tier = tier
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
        """All waiting rows, as one partial batch per expert."""
        return [self._take(expert) for expert, waiting in enumerate(self._waiting) if waiting]

    def _full(self, expert: int) -> Iterator[Batch]:
        tier = self.tier
        if tier is None or sum(len(tokens) for tokens, _ in self._waiting[expert]) < tier:
            return
        batch = self._take(expert)
        whole = len(batch) // tier * tier
        if whole < len(batch):
            self._waiting[expert].append((batch.tokens[whole:], batch.slots[whole:]))
        for start in range(0, whole, tier):
            yield Batch(expert, batch.tokens[start : start + tier], batch.slots[start : start + tier])

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


def smallest_tier(tiers: tuple[int, ...], rows: int) -> int:
    """The smallest static shape that holds `rows`; 0 (dynamic) if there are no tiers."""
    return min((tier for tier in tiers if tier >= rows), default=0)
