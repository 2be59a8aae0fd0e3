"""Selects a small subset of a prompt file with the same distribution of token lengths, by Kullback-Leibler divergence."""

import numpy as np

from analyzer.errors import PredictError

BINS = 16
CANDIDATES = 200
SMOOTH = 1e-6


def length_divergence(part: np.ndarray, whole: np.ndarray) -> float:
    """KL divergence, in nats, of the part's lengths from the whole's, over bins with equal shares of the whole."""
    edges = np.unique(np.quantile(whole, np.linspace(0, 1, BINS + 1)))
    if len(edges) < 2:
        return 0.0
    p, q = (np.histogram(lengths, edges)[0] / len(lengths) + SMOOTH for lengths in (part, whole))
    return float(np.sum(p / p.sum() * np.log((p / p.sum()) / (q / q.sum()))))


def matched_subset(lengths: np.ndarray, size: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """(sorted row numbers, divergence) of the best of many stratified draws.

    One prompt is drawn from each of `size` equal slices of the sorted lengths; equal lengths are shuffled, to mix subjects.
    """
    if not 1 <= size <= len(lengths):
        raise PredictError(f"a subset of {size} out of {len(lengths)} prompts is not possible: ask for 1 to {len(lengths)}")
    random = np.random.default_rng(seed)
    best: tuple[float, np.ndarray] | None = None
    for _ in range(CANDIDATES):
        order = np.lexsort((random.random(len(lengths)), lengths))
        slices = np.linspace(0, len(lengths), size + 1).astype(int)
        chosen = order[random.integers(slices[:-1], slices[1:])]
        distance = length_divergence(lengths[chosen], lengths)
        if best is None or distance < best[0]:
            best = distance, np.sort(chosen)
    assert best is not None
    return best[1], best[0]
