"""Trains kernel predictors on a backend: fusion rules, measured shapes, and accuracy on held-out shapes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from analyzer.errors import PredictError
from analyzer.predict.kernels import fusion, graphs, regressors, sampling
from analyzer.predict.kernels.backends import Backend

PAIRS = [
    ("Gemm", "Relu"), ("Gemm", "Sigmoid"), ("Gemm", "Tanh"), ("Gemm", "Softmax"), ("MatMul", "Add"), ("MatMul", "Relu"),
    ("MatMul", "Softmax"), ("Add", "Relu"), ("Mul", "Sigmoid"), ("Relu", "Softmax"),
]  # fmt: skip
CHAINS = [["Gemm", "Relu", "Gemm"], ["MatMul", "Sigmoid", "MatMul"], ["Gemm", "Tanh", "Gemm", "Softmax"]]
PRIOR = [(256, 512), (512, 256), (512, 1024), (1024, 512), (768, 768), (2048, 768), (768, 2048), (384, 1536)]
BATCH = 12
"""Number of models kept in memory at once."""
SHORTEST = {"s": 1e-6, "us": 1.0, "cycles": 1.0}
"""Unit → shortest time of a model that is used: below it, the fixed overhead of a run dominates, and the shape is neither
learned from nor evaluated."""
FEWEST = 5
"""Minimum number of shapes for choosing a regressor."""
UNSEEN = 99
"""Random seed of the held-out shapes."""


@dataclass(frozen=True)
class TrainingPlan:
    """Measurement plan: kernels of these chains, in shapes near the (k, n) of `prior`, up to `limit` wide, none in `left_out`.

    `start` shapes, then `rounds` times `extra` more near large errors; `held_out` shapes for the test.
    """

    chains: list[list[str]]
    prior: list[tuple[int, int]]
    start: int = 60
    rounds: int = 2
    extra: int = 20
    held_out: int = 30
    limit: int = 2304
    left_out: sampling.Widths = frozenset()


@dataclass(frozen=True)
class TrainedKernel:
    """A trained kernel: its shapes and times, and the held-out shapes, measured twice and predicted.

    `judged`: which of those take long enough to count. `again`: retrained after an earlier training on a slower machine.
    """

    kernel: str
    shapes: list[graphs.Shape]
    times: np.ndarray
    unseen: list[graphs.Shape]
    measured: np.ndarray
    repeated: np.ndarray
    predicted: np.ndarray
    judged: np.ndarray
    again: bool = False

    def figures(self) -> dict[str, float]:
        """Accuracy on held-out shapes; `repeated_…`: that of a repeated measurement, the limit for any predictor."""
        measured = self.measured[self.judged]
        accuracy, repeated = (regressors.accuracy(times[self.judged], measured) for times in (self.predicted, self.repeated))
        return accuracy | {f"repeated_{name}": value for name, value in repeated.items() if name != "shapes"}


def fusion_verdicts(backend: Backend, shape: graphs.Shape) -> Iterator[fusion.Verdict]:
    """Every pair, with one output and with many."""
    fixed_times = {many: fusion.fixed_saving(backend, shape, many) for many in (False, True)}
    for pair, many in itertools.product(PAIRS, (False, True)):
        yield fusion.detect_fusion(backend, *pair, shape, many, fixed_times[many])


def measured_times(backend: Backend, makers: list[Callable[[], bytes]]) -> np.ndarray:
    """Measured times of models, which are made in batches to limit memory."""
    batches = (makers[i : i + BATCH] for i in range(0, len(makers), BATCH))
    return np.array([t for batch in batches for t in backend.times([make() for make in batch])])


def kernels_of(chains: list[list[str]], fused: set[tuple[str, str]]) -> list[str]:
    """The kernels of the chains."""
    shape = graphs.Shape(8, 64, 64)
    parts = [fusion.split_chain(graphs.chain(chain, shape), fused) for chain in chains]
    return sorted({fusion.kernel_name(kernel) for chain in parts for kernel in chain})


def repetitions_of(kernel: str, shapes: list[graphs.Shape]) -> np.ndarray:
    """The number of kernels in the model of each shape."""
    return np.array([graphs.kernel_repetitions(kernel.split("+"), shape) for shape in shapes])


def train_kernel(
    backend: Backend, kernel: str, predictors: regressors.Predictors, plan: TrainingPlan, again: bool = False
) -> TrainedKernel:
    """Sample shapes, train on them, and measure held-out shapes twice."""
    operators = kernel.split("+")

    def measure(shapes: list[graphs.Shape]) -> np.ndarray:
        model_times = measured_times(backend, [partial(graphs.repeated_model, operators, shape) for shape in shapes])
        return np.asarray(model_times / repetitions_of(kernel, shapes))

    def long_enough(shapes: list[graphs.Shape], kernel_times: np.ndarray) -> np.ndarray:
        return np.asarray(kernel_times * repetitions_of(kernel, shapes) >= SHORTEST[backend.unit])

    fit = regressors.quick_fit(kernel)
    sizes = plan.start, plan.rounds, plan.extra
    shapes, measured = sampling.sample_adaptively(plan.prior, measure, fit, *sizes, limit=plan.limit, left_out=plan.left_out)
    learned = np.flatnonzero(long_enough(shapes, measured))
    if len(learned) < FEWEST:
        raise PredictError(f"of {len(shapes)} shapes of {kernel} only {len(learned)} take long enough: start with more")
    shapes, measured = [shapes[i] for i in learned], measured[learned]
    predictors.train(kernel, shapes, measured)
    unseen = sampling.draw_shapes(plan.prior, plan.held_out, np.random.default_rng(UNSEEN), plan.limit, plan.left_out)
    first, second = measure(unseen), measure(unseen)
    predicted, judged = predictors.kernel(kernel, unseen), long_enough(unseen, first)
    return TrainedKernel(kernel, shapes, measured, unseen, first, second, predicted, judged, again)


def train_all(backend: Backend, predictors: regressors.Predictors, plan: TrainingPlan) -> Iterator[TrainedKernel]:
    """Train every kernel, and retrain those measured before the machine reached its usual pace."""
    epochs: dict[str, int] = {}
    for again in (False, True):
        for kernel in kernels_of(plan.chains, predictors.fused):
            if not again or epochs[kernel] != backend.epoch:
                epochs[kernel] = backend.epoch
                yield train_kernel(backend, kernel, predictors, plan, again)
