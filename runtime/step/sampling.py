"""Chooses the next token from logits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from runtime.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, with the meaning of transformers' settings of the same names.

    temperature 0 takes the most likely token; top_k 0, top_p 1 and min_p 0 keep every token. repetition_penalty: above 1 makes
    tokens of the prompt and of the answer less likely.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        real = self.temperature, self.top_p, self.min_p, self.repetition_penalty
        if not all(isinstance(value, Real) for value in real) or not isinstance(self.top_k, Integral):
            raise RequestError("sampling settings must be numbers, top-k a whole one")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise RequestError("temperature and top-k must be finite and 0 or more, top-p and min-p between 0 and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise RequestError("the repetition penalty must be finite and above 0")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise RequestError("the seed must be a whole number, 0 or more")


class Sampler:
    """Draws tokens after a prompt of `ids`; the same seed gives the same tokens."""

    def __init__(self, sampling: Sampling, ids: Iterable[int] = ()):
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen = set(ids)

    def choose(self, logits: np.ndarray) -> int:
        """Choose a token id from logits [V]."""
        if self.sampling.temperature == 0:
            chosen = int(np.argmax(self._penalized(logits)))
        else:
            ids, chances = self.candidates(logits)
            chosen = int(self._random.choice(ids, p=chances))
        self._seen.add(chosen)
        return chosen

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids to draw from at a temperature above 0, the most likely first; their probabilities)."""
        s, logits = self.sampling, self._penalized(logits)
        order = np.argsort(-logits, kind="stable")
        if s.top_k:
            order = order[: s.top_k]
        below = logits[order].astype(np.float64) - float(logits[order[0]])
        with np.errstate(over="ignore"):  # at a temperature near 0 only the most likely tokens are possible
            chances = np.exp(below / s.temperature)
        chances /= chances.sum()
        by_sum = int(np.searchsorted(np.cumsum(chances), s.top_p)) + 1
        by_least = int(np.count_nonzero(chances >= s.min_p * chances[0]))
        count = min(by_sum, by_least)
        return order[:count], chances[:count] / chances[:count].sum()

    def _penalized(self, logits: np.ndarray) -> np.ndarray:
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        logits, seen = logits.copy(), np.fromiter(self._seen, np.int64)
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
        return logits


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Natural log probabilities [.., V] of logits [.., V]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logs: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs
