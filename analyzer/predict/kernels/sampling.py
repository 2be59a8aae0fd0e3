"""Selects shapes to measure: first shapes of models, then more near those with large prediction errors."""

from collections.abc import Callable

import numpy as np

from analyzer.model import Model
from analyzer.predict.kernels.graphs import Shape

ROWS = (1, 2, 4, 8, 16, 32, 64)
SPREAD = 0.35
"""Standard deviation, in natural logarithm, of new shapes around a shape of the prior or one with a large error."""

FOLDS = 4
ROUND = (8, 128, 1024)
"""Widths are multiples of one of these: most models' are round, and a library may handle others differently."""
COPIES = (1, 2, 4, 8, 16)
"""Numbers of kernels in a measured model: with few, a run finds its weights in a cache; with many, it does not."""
MOST = 48 << 20
"""Maximum fp32 bytes of weights in a measured model, unless a single kernel has more."""

Measure = Callable[[list[Shape]], np.ndarray]
Fit = Callable[[list[Shape], np.ndarray], Callable[[list[Shape]], np.ndarray]]


def widths_of(models: list[Model]) -> list[tuple[int, int]]:
    """(k, n) of the products in these models' layers: the prior."""
    widths: list[tuple[int, int]] = []
    for model in models:
        inner = model.mixture.width if model.mixture else model.dense_width
        for width in (inner, model.attention.heads * model.attention.head_dim):
            widths += [(model.hidden, width), (width, model.hidden)]
    return widths


Widths = frozenset[tuple[int, int]]


def draw_shapes(
    prior: list[tuple[int, int]], count: int, random: np.random.Generator, limit: int = 4096, left_out: Widths = frozenset()
) -> list[Shape]:
    """Shapes near the prior's, with one or several copies; none has a (k, n) in `left_out`."""
    picked = random.integers(len(prior), size=count)
    rows, copies = random.choice(ROWS, count), random.choice(COPIES, count)
    given = (Shape(int(r), prior[i][0], prior[i][1], int(c)) for r, i, c in zip(rows, picked, copies, strict=True))
    return [_shape_near(shape, random, limit, left_out) for shape in given]


def sample_adaptively(
    prior: list[tuple[int, int]],
    measure: Measure,
    fit: Fit,
    start: int,
    rounds: int,
    extra: int,
    seed: int = 0,
    limit: int = 4096,
    left_out: Widths = frozenset(),
) -> tuple[list[Shape], np.ndarray]:
    """(shapes, times): `start` from the prior, then `rounds` times `extra` more near the shapes with the largest errors."""
    random = np.random.default_rng(seed)
    shapes = draw_shapes(prior, start, random, limit, left_out)
    times = measure(shapes)
    for _ in range(rounds):
        least_accurate = np.argsort(-held_out_errors(shapes, times, fit, random))[: max(extra // 2, 1)]
        finer = [_shape_near(shapes[i], random, limit, left_out) for i in random.choice(least_accurate, extra)]
        shapes, times = shapes + finer, np.concatenate([times, measure(finer)])
    return shapes, times


def held_out_errors(shapes: list[Shape], times: np.ndarray, fit: Fit, random: np.random.Generator) -> np.ndarray:
    """|relative error| of each shape, predicted by a regressor trained without it."""
    fold = random.permutation(len(shapes)) % FOLDS
    errors = np.empty(len(shapes))
    for i in range(FOLDS):
        inside, outside = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
        predict = fit([shapes[j] for j in inside], times[inside])
        errors[outside] = np.abs(predict([shapes[j] for j in outside]) / times[outside] - 1)
    return errors


def _shape_near(shape: Shape, random: np.random.Generator, limit: int, left_out: Widths) -> Shape:
    rows = int(np.clip(round(shape.rows * np.exp(random.normal(0, SPREAD))), 1, limit))
    while True:
        k, n = (_width_near(width, random, limit) for width in (shape.k, shape.n))
        if (k, n) not in left_out:
            return Shape(rows, k, n, max(min(shape.copies, MOST // (4 * k * n)), 1))


def _width_near(width: int, random: np.random.Generator, limit: int) -> int:
    """A width near another: a multiple of a number in ROUND not larger than the width."""
    near = width * np.exp(random.normal(0, SPREAD))
    step = int(random.choice([multiple for multiple in ROUND if multiple <= max(near, ROUND[0])]))
    return int(np.clip(round(near / step) * step, ROUND[0], limit))
