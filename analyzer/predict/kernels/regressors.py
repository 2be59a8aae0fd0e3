"""One regressor for each kernel, log time from a law and sizes: of several the best by cross-validation, with its environment."""

import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnxruntime
import sklearn
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from analyzer.errors import PredictError
from analyzer.predict.kernels.fusion import kernel_name, split
from analyzer.predict.kernels.graphs import OPERATORS, Link, Shape
from analyzer.predict.kernels.law import Law, passes, terms

SIZES = 6
"""Columns of `features` before the law's terms."""


def features(kernel: str, shapes: list[Shape], held: np.ndarray | None = None) -> np.ndarray:
    """[shapes, SIZES + terms] of the kernel's first operator; `held`: bytes of weights in the whole model, else in the copies.

    Logarithms of rows, k, n, of the bytes that are used between two uses of the same byte and of the passes over the weights
    (tiles of six rows), whether there is a single row; then the terms of the law.
    """
    first = kernel.split("+")[0]
    own = [s.of(first) for s in shapes]
    around = [s.weights(first) * s.copies for s in own] if held is None else held
    return np.array([_features(first, s, float(b)) for s, b in zip(own, around, strict=True)])


def _features(operator: str, s: Shape, held: float) -> list[float]:
    used = held if OPERATORS[operator].weight == "matrix" else s.bytes(operator)
    sizes = np.log([s.rows, s.k, s.n, used, passes(s.rows, (6,))])
    return [*sizes.tolist(), float(s.rows == 1), *terms(operator, s, used)]


def _sizes(given: np.ndarray) -> np.ndarray:
    return given[:, :SIZES]


def _terms(given: np.ndarray) -> np.ndarray:
    return given[:, SIZES:]


def law() -> Any:
    """The sum of terms."""
    return make_pipeline(FunctionTransformer(_terms), Law())


def forest() -> Any:
    """Trees on the sizes."""
    return make_pipeline(FunctionTransformer(_sizes), ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0))


def process() -> Any:
    """A Gaussian process on the sizes: smooth where shapes lie near each other, with the noise of a measurement."""
    kernel = ConstantKernel(1.0) * RBF(np.ones(SIZES), (0.05, 1e3)) + WhiteKernel(1e-3, (1e-6, 1.0))
    return make_pipeline(
        FunctionTransformer(_sizes), StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    )


class Corrected(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The law, and what it leaves by another regressor."""

    def __init__(self, rest: Callable[[], Any] = forest):
        self.rest = rest

    def fit(self, given: np.ndarray, wanted: np.ndarray) -> "Corrected":
        """Learn."""
        self.law_ = law().fit(given, wanted)
        self.rest_ = self.rest().fit(given, wanted - self.law_.predict(given))
        return self

    def predict(self, given: np.ndarray) -> np.ndarray:
        """Log times."""
        return np.asarray(self.law_.predict(given) + self.rest_.predict(given))


CANDIDATES: dict[str, Callable[[], Any]] = {
    "law": law,
    "law and forest": lambda: Corrected(forest),
    "law and process": lambda: Corrected(process),
    "forest": forest,
    "process": process,
}


def fit(kernel: str, shapes: list[Shape], times: np.ndarray, candidates: tuple[str, ...]) -> tuple[str, Any]:
    """(name, regressor of log time): of these candidates the one with the least 5-fold error."""
    given, wanted = features(kernel, shapes), np.log(times)
    folds = KFold(5, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        scores = {
            name: cross_val_score(CANDIDATES[name](), given, wanted, cv=folds, scoring="neg_mean_absolute_error").mean()
            for name in candidates
        }
        best = max(scores, key=scores.__getitem__)
        return best, CANDIDATES[best]().fit(given, wanted)


def quick_fit(kernel: str) -> Callable[[list[Shape], np.ndarray], Callable[[list[Shape]], np.ndarray]]:
    """The law alone, as sampling wants it: shapes and times → a function of shapes."""

    def fitted(shapes: list[Shape], times: np.ndarray) -> Callable[[list[Shape]], np.ndarray]:
        made = law().fit(features(kernel, shapes), np.log(times))
        return lambda asked: np.exp(made.predict(features(kernel, asked)))

    return fitted


@dataclass
class Predictors:
    """Regressors by kernel, the pairs that fuse, and where all of it was measured."""

    unit: str
    fused: set[tuple[str, str]]
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    models: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def train(self, kernel: str, shapes: list[Shape], times: np.ndarray) -> None:
        """Learn one kernel from measured shapes."""
        self.chosen[kernel], self.models[kernel] = fit(kernel, shapes, times, self.candidates)
        given = np.array([[s.rows, s.k, s.n] for s in (shape.of(kernel.split("+")[0]) for shape in shapes)])
        self.ranges[kernel] = (given.min(0), given.max(0))

    def kernel(self, kernel: str, shapes: list[Shape], held: np.ndarray | None = None) -> np.ndarray:
        """Predicted times; `held`: bytes of weights in the whole model."""
        if kernel not in self.models:
            raise PredictError(f"kernel {kernel} was never measured: train it, known are {', '.join(sorted(self.models))}")
        return np.asarray(np.exp(self.models[kernel].predict(features(kernel, shapes, held))))

    def chain(self, links: list[Link]) -> tuple[float, list[str]]:
        """(time of a chain as the sum over its kernels, warnings of shapes beyond what was measured)."""
        total, told = 0.0, []
        held = sum(shape.weights(name) for name, shape in links)
        for part in split(links, self.fused):
            name, shape = kernel_name(part), part[0][1]
            total += float(self.kernel(name, [shape], np.array([held]))[0])
            low, high = self.ranges[name]
            given = np.array([shape.rows, shape.k, shape.n])
            if (given < low).any() or (given > high).any():
                told.append(f"{name} at {shape.rows} x {shape.k} x {shape.n} is outside the measured shapes")
        return total, told

    def save(self, file: Path, backend: str) -> None:
        """Write everything, with what it was measured on."""
        self.environment = environment(backend)
        joblib.dump(self, file)


def load(file: Path) -> Predictors:
    """Read saved predictors; those of another scikit-learn are refused. Only files of your own: loading runs what they say."""
    try:
        found = joblib.load(file)
    except (OSError, ValueError, KeyError, EOFError, AttributeError, ModuleNotFoundError) as error:
        raise PredictError(f"{file} holds no predictors ({error!r}): train again") from None
    if not isinstance(found, Predictors) or found.environment.get("sklearn") != sklearn.__version__:
        raise PredictError(f"{file} was written by another version of scikit-learn or is something else: train again")
    return found


def environment(backend: str) -> dict[str, str]:
    """What predictors hold for."""
    return {
        "backend": backend,
        "machine": platform.machine(),
        "processor": platform.processor() or platform.node(),
        "kernel": platform.release(),
        "onnxruntime": onnxruntime.__version__,
        "sklearn": sklearn.__version__,
        "measured_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def accuracy(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """nn-Meter's figures: share within ±10 %, and root mean square of the relative error (RMSPE)."""
    errors = predicted / measured - 1
    return {
        "shapes": float(len(errors)),
        "within_10_percent": float(np.mean(np.abs(errors) <= 0.10)),
        "rmspe": float(np.sqrt(np.mean(errors**2))),
    }
