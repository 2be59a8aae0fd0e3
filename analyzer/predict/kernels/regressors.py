"""One regressor for each kernel, log time from sizes and tiles: the best of several by cross-validation, with its environment."""

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
from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from analyzer.predict.errors import PredictError
from analyzer.predict.kernels.fusion import kernel_name, split
from analyzer.predict.kernels.graphs import Link, Shape

FEATURES = 11
TILES = {"rows": (4, 6), "n": (16,)}
"""Rows and columns that matrix kernels work on at once; what is left over costs as much as a whole tile."""


def features(kernel: str, shapes: list[Shape]) -> np.ndarray:
    """[shapes, FEATURES] of the kernel's first operator.

    Logarithms of rows, k, n, operations, bytes, operations per byte and operations on whole tiles; shares of tiles that are left
    over; whether there is a single row.
    """
    first = kernel.split("+")[0]
    return np.array([_features(first, s) for s in shapes])


def _features(operator: str, s: Shape) -> list[float]:
    flops, moved = s.flops(operator), s.bytes(operator)
    rows, columns = (-(-size // tiles[-1]) * tiles[-1] for size, tiles in ((s.rows, TILES["rows"]), (s.n, TILES["n"])))
    sizes = np.log([s.rows, s.k, s.n, flops, moved, flops / moved, flops / (s.rows * s.n) * rows * columns])
    over = [-s.rows % tile / s.rows for tile in TILES["rows"]] + [-s.n % tile / s.n for tile in TILES["n"]]
    return [*sizes.tolist(), *over, float(s.rows == 1)]


def smooth(degree: int = 2) -> Any:
    """A polynomial surface."""
    return make_pipeline(StandardScaler(), PolynomialFeatures(degree), RidgeCV(np.logspace(-4, 3, 8)))


class Corrected(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A polynomial surface, and a forest of what it leaves: the law by the one, its steps by the other."""

    def fit(self, given: np.ndarray, wanted: np.ndarray) -> "Corrected":
        """Learn."""
        self.surface_ = smooth().fit(given, wanted)
        self.steps_ = ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0)
        self.steps_.fit(given, wanted - self.surface_.predict(given))
        return self

    def predict(self, given: np.ndarray) -> np.ndarray:
        """Log times."""
        return np.asarray(self.surface_.predict(given) + self.steps_.predict(given))


def process() -> Any:
    """A Gaussian process: smooth where shapes lie near each other, with the noise of a measurement."""
    law = ConstantKernel(1.0) * RBF(np.ones(FEATURES), (0.05, 1e3)) + WhiteKernel(1e-3, (1e-6, 1.0))
    return make_pipeline(StandardScaler(), GaussianProcessRegressor(law, normalize_y=True, random_state=0))


CANDIDATES: dict[str, Callable[[], Any]] = {
    "surface": smooth,
    "forest": lambda: ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0),
    "surface and forest": Corrected,
    "boosting": lambda: GradientBoostingRegressor(n_estimators=300, learning_rate=0.05, subsample=0.7, random_state=0),
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
    """The surface alone, as sampling wants it: shapes and times → a function of shapes."""

    def fitted(shapes: list[Shape], times: np.ndarray) -> Callable[[list[Shape]], np.ndarray]:
        made = smooth().fit(features(kernel, shapes), np.log(times))
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
        given = np.array([[s.rows, s.k, s.n] for s in shapes])
        self.ranges[kernel] = (given.min(0), given.max(0))

    def kernel(self, kernel: str, shapes: list[Shape]) -> np.ndarray:
        """Predicted times."""
        if kernel not in self.models:
            raise PredictError(f"kernel {kernel} was never measured: train it, known are {', '.join(sorted(self.models))}")
        return np.asarray(np.exp(self.models[kernel].predict(features(kernel, shapes))))

    def chain(self, links: list[Link]) -> tuple[float, list[str]]:
        """(time of a chain as the sum over its kernels, warnings of shapes beyond what was measured)."""
        total, told = 0.0, []
        for part in split(links, self.fused):
            name, shape = kernel_name(part), part[0][1]
            total += float(self.kernel(name, [shape])[0])
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
