"""The terms of a kernel's time: whole tiles, weights by memory level, rows in and out, and a call."""

import numpy as np
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin

from analyzer.predict.kernels.graphs import OPERATORS, Shape

TILE_ROWS = ((4,), (6,), (12, 6))
"""Tile heights into which libraries cut rows, largest first; the remaining rows take one more pass over the weights."""
COLUMNS, DEPTH = 16, 256
"""Columns are padded to whole tiles; sums over more than DEPTH values are taken up again from the output."""
PAGE, TALL = 4096, 12
"""Bytes of a set-associative first cache's way: rows that lie this far apart, or a multiple, fall into one set. A tile of TALL
such rows does not fit into its ways, one of half as many does."""
LEVELS = tuple(1 << power for power in range(14, 26))
"""Possible cache sizes in bytes: above each, the cost of weights (without weights: of elements) rises with every doubling up to
the next level."""


def weight_passes(rows: int, tiles: tuple[int, ...]) -> int:
    """The number of passes over the weights for rows split into tiles."""
    count = 0
    for tile in tiles:
        count, rows = count + rows // tile, rows % tile
    return count + (rows > 0)


def cost_terms(operator: str, s: Shape, footprint: float) -> list[float]:
    """The terms that a kernel's time may be proportional to; `footprint`: bytes between two uses of the same byte."""
    beyond = [float(np.clip(np.log2(footprint / level), 0, 1)) for level in LEVELS]
    if OPERATORS[operator].weight != "matrix":
        return [1.0, s.rows, s.rows * s.n, *(s.rows * s.n * share for share in beyond)]
    n = -(-s.n // COLUMNS) * COLUMNS
    tiles = [weight_passes(s.rows, tiles) * s.k * n for tiles in TILE_ROWS]
    crowded = s.rows // TALL * s.k * n * (4 * s.k % PAGE == 0)
    sums = s.rows * s.n * -(-s.k // DEPTH)
    weights = [s.k * n, *(s.k * n * share for share in beyond)]
    return [1.0, s.rows * s.k, s.rows * s.n, sums, s.rows * s.k * n, *tiles, crowded, *weights]


class TermLaw(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Log time as the logarithm of a non-negative sum of terms, fitted by least relative errors."""

    def fit(self, inputs: np.ndarray, log_times: np.ndarray) -> "TermLaw":
        """Fit. inputs: [n, terms]; log_times: [n]."""
        relative = inputs / np.exp(log_times)[:, None]
        scale = np.maximum(np.abs(relative).max(0), 1e-300)
        self.weights_ = nnls(relative / scale, np.ones(len(inputs)))[0] / scale
        return self

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """[n] log times."""
        return np.log(np.maximum(inputs @ self.weights_, 1e-12))
