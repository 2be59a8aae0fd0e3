"""Chooses the next token from logits."""

import math
from dataclasses import dataclass

import numpy as np

from runtime.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How to choose: temperature 0 takes the most likely token; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise RequestError("temperature and top-k must be finite and 0 or more, top-p between 0 and 1")


class Sampler:
    """Draws tokens; the same seed gives the same tokens."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray) -> int:
        """A token id from logits [V]."""
        s = self.sampling
        if s.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        if s.top_k:
            order = order[: s.top_k]
        scaled = logits[order].astype(np.float64) / s.temperature
        chances = np.exp(scaled - scaled.max())
        chances /= chances.sum()
        count = int(np.searchsorted(np.cumsum(chances), s.top_p)) + 1
        chances = chances[:count] / chances[:count].sum()
        return int(self._random.choice(order[:count], p=chances))
