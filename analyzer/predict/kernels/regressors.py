"""One regressor for each kernel, log time from log sizes: the better of two in cross-validation, kept with its environment."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnxruntime
import sklearn
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from analyzer.predict.errors import PredictError
from analyzer.predict.kernels.fusion import kernel_name, split
from analyzer.predict.kernels.graphs import Link, Shape


def features(kernel: str, shapes: list[Shape]) -> np.ndarray:
    """[shapes, 5]: logarithms of rows, k, n, operations and bytes of the kernel's first operator."""
    first = kernel.split("+")[0]
    return np.log([[s.rows, s.k, s.n, s.flops(first), s.bytes(first)] for s in shapes])


def fit(kernel: str, shapes: list[Shape], times: np.ndarray) -> Any:
    """The better of a smooth surface and a forest, by 4-fold error of log time."""
    smooth = make_pipeline(StandardScaler(), PolynomialFeatures(2), RidgeCV(np.logspace(-4, 2, 7)))
    candidates = (smooth, ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0))
    given, wanted = features(kernel, shapes), np.log(times)
    scores = [cross_val_score(one, given, wanted, cv=4, scoring="neg_mean_absolute_error").mean() for one in candidates]
    return candidates[int(np.argmax(scores))].fit(given, wanted)


def quick_fit(kernel: str) -> Callable[[list[Shape], np.ndarray], Callable[[list[Shape]], np.ndarray]]:
    """The smooth candidate alone, as sampling wants it: shapes and times → a function of shapes."""

    def fitted(shapes: list[Shape], times: np.ndarray) -> Callable[[list[Shape]], np.ndarray]:
        made = make_pipeline(StandardScaler(), PolynomialFeatures(2), RidgeCV(np.logspace(-4, 2, 7)))
        made.fit(features(kernel, shapes), np.log(times))
        return lambda asked: np.exp(made.predict(features(kernel, asked)))

    return fitted


@dataclass
class Predictors:
    """Regressors by kernel, the pairs that fuse, and where all of it was measured."""

    unit: str
    fused: set[tuple[str, str]]
    models: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def train(self, kernel: str, shapes: list[Shape], times: np.ndarray) -> None:
        """Learn one kernel from measured shapes."""
        self.models[kernel] = fit(kernel, shapes, times)
        given = features(kernel, shapes)
        self.ranges[kernel] = (given.min(0), given.max(0))

    def kernel(self, kernel: str, shapes: list[Shape]) -> np.ndarray:
        """Predicted times."""
        if kernel not in self.models:
            raise PredictError(f"kernel {kernel} was never measured: train it, known are {', '.join(sorted(self.models))}")
        return np.asarray(np.exp(self.models[kernel].predict(features(kernel, shapes))))

    def chain(self, links: list[Link]) -> tuple[float, list[str]]:
        """(time of a chain as the sum over its kernels, warnings of shapes beyond what was measured)."""
        total, warnings = 0.0, []
        for part in split(links, self.fused):
            name, shape = kernel_name(part), part[0][1]
            total += float(self.kernel(name, [shape])[0])
            low, high = self.ranges[name]
            given = features(name, [shape])[0]
            if (given < low - 1e-9).any() or (given > high + 1e-9).any():
                warnings.append(f"{name} at {shape.rows} x {shape.k} x {shape.n} is outside the measured shapes")
        return total, warnings

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
