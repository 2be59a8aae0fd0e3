"""Perplexity: how well a model predicts a text, in sliding windows as transformers' documentation defines it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runtime.errors import RequestError
from runtime.package.convert import Progress
from runtime.step.engine import Engine
from runtime.step.sampling import log_probabilities
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase

ROWS = 64
"""Rows of logits computed at once: a vocabulary of 200,000 takes 100 MB of float64."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity over `tokens` predicted tokens, with its standard error, which treats tokens as independent; None for one."""

    perplexity: float
    error: float | None
    tokens: int

    @classmethod
    def of(cls, losses: np.ndarray) -> "Perplexity":
        """Perplexity from losses [n] in nats."""
        value = float(np.exp(losses.mean()))
        error = value * float(losses.std() / np.sqrt(len(losses))) if len(losses) > 1 else None
        return cls(value, error, len(losses))


def token_losses(engine: Engine, ids: list[int], window: int, stride: int, progress: Progress | None = None) -> np.ndarray:
    """Negative log-likelihoods [n - 1] in nats of all tokens except the first.

    Windows of `window` tokens begin `stride` tokens apart; a token counts in the first window that contains it.
    """
    if window > engine.family.context:
        raise RequestError(f"a window of {window} tokens exceeds the model's context of {engine.family.context}")
    parts, counted = [], 1
    for first in range(0, len(ids), stride):
        part = ids[first : first + window]
        parts.append(_window_losses(engine, part, counted - first))
        counted = first + len(part)
        if progress:
            progress(counted, len(ids))
        if counted == len(ids):
            break
    return np.concatenate(parts)


def _window_losses(engine: Engine, ids: list[int], first: int) -> np.ndarray:
    """Losses of the tokens from `first` on."""
    sequence = engine.begin_sequence(len(ids))
    hidden = engine.hidden(sequence, ids[:-1], Step(0, Phase.PREFILL, len(ids) - 1, 0, 0))[first - 1 :]
    targets = np.array(ids[first:])
    return np.concatenate(list(losses_of(engine, hidden, targets)))


def losses_of(engine: Engine, hidden: np.ndarray, targets: np.ndarray) -> Iterator[np.ndarray]:
    """Losses of targets [n] after hidden [n, H], a part of the rows at a time."""
    for begin in range(0, len(hidden), ROWS):
        logs = log_probabilities(engine.logits(hidden[begin : begin + ROWS]))
        yield -logs[np.arange(len(logs)), targets[begin : begin + ROWS]]
