"""What a model loses on a text, window by window."""

from collections.abc import Iterator

import numpy as np

from runtime.moe import MoE
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase


def windows(ids: list[int], size: int) -> Iterator[list[int]]:
    """Windows of the text, one behind the other."""
    for first in range(0, len(ids) - 1, size - 1):
        if len(ids) - first > 1:
            yield ids[first : first + size]


def negative_log_likelihoods(model: MoE, ids: list[int]) -> np.ndarray:
    """Of every token but the first, in nats."""
    engine = model.engine
    sequence = engine.begin_sequence(len(ids))
    hidden = engine.hidden(sequence, ids[:-1], Step(0, Phase.PREFILL, len(ids) - 1, 0, 0))
    logits = engine.logits(hidden).astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    normal = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return np.asarray(normal - logits[np.arange(len(logits)), ids[1:]])
