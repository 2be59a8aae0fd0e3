"""Shapes to measure: first those that models have, then more of them where the predictor errs."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from analyzer.model import Model
from analyzer.predict.kernels.graphs import Shape

ROWS = (1, 2, 4, 8, 16, 32, 64)
SPREAD = 0.35
"""Standard deviation, in natural logarithm, of a new shape around a shape of the prior or one with a large error."""

FOLDS = 4
COPIES = (1, 2, 4, 8, 16)
"""Kernels in a measured model: weights that a run meets again in a cache, and others that have left it meanwhile."""
MOST = 48 << 20
"""fp32 bytes of weights in a measured model, unless a single kernel has more."""

Measure = Callable[[list[Shape]], np.ndarray]
Fit = Callable[[list[Shape], np.ndarray], Callable[[list[Shape]], np.ndarray]]


def widths_of(models: list[Model]) -> list[tuple[int, int]]:
    """(k, n) of the products that these models' layers hold: the prior."""
    widths: list[tuple[int, int]] = []
    for model in models:
        inner = [model.dense_width] if not model.mixture else [model.mixture.width]
        heads = model.attention.heads * model.attention.head_dim
        widths += [(model.hidden, width) for width in inner] + [(width, model.hidden) for width in inner]
        widths += [(model.hidden, heads), (heads, model.hidden)]
    return widths


def draw(prior: list[tuple[int, int]], count: int, random: np.random.Generator, limit: int = 4096) -> list[Shape]:
    """Shapes near the prior's, alone and among copies."""
    picked = random.integers(len(prior), size=count)
    rows = random.choice(ROWS, count)
    shapes = [_near(Shape(int(r), *prior[i]), random, limit) for r, i in zip(rows, picked, strict=True)]
    return [_with_copies(shape, int(copies)) for shape, copies in zip(shapes, random.choice(COPIES, count), strict=True)]


def adaptive(
    prior: list[tuple[int, int]],
    measure: Measure,
    fit: Fit,
    start: int,
    rounds: int,
    extra: int,
    seed: int = 0,
    limit: int = 4096,
) -> tuple[list[Shape], np.ndarray]:
    """(shapes, times): `start` from the prior, then `rounds` times `extra` more around the shapes that are predicted worst."""
    random = np.random.default_rng(seed)
    shapes = draw(prior, start, random, limit)
    times = measure(shapes)
    for _ in range(rounds):
        least_accurate = np.argsort(-held_out_errors(shapes, times, fit, random))[: max(extra // 2, 1)]
        finer = [_near(shapes[i], random, limit) for i in random.choice(least_accurate, extra)]
        shapes, times = shapes + finer, np.concatenate([times, measure(finer)])
    return shapes, times


def held_out_errors(shapes: list[Shape], times: np.ndarray, fit: Fit, random: np.random.Generator) -> np.ndarray:
    """|relative error| of each shape, predicted by a regressor that has not seen it."""
    fold = random.permutation(len(shapes)) % FOLDS
    errors = np.empty(len(shapes))
    for i in range(FOLDS):
        inside, outside = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
        predict = fit([shapes[j] for j in inside], times[inside])
        errors[outside] = np.abs(predict([shapes[j] for j in outside]) / times[outside] - 1)
    return errors


def _near(shape: Shape, random: np.random.Generator, limit: int) -> Shape:
    k, n = (int(np.clip(round(v * np.exp(random.normal(0, SPREAD)) / 8) * 8, 8, limit)) for v in (shape.k, shape.n))
    rows = int(np.clip(round(shape.rows * np.exp(random.normal(0, SPREAD))), 1, limit))
    return _with_copies(Shape(rows, k, n), shape.copies)


def _with_copies(shape: Shape, copies: int) -> Shape:
    return replace(shape, copies=max(min(copies, MOST // (4 * shape.k * shape.n)), 1))
