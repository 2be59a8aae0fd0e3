"""One regressor of log time for each kernel, from a law and sizes: the best by cross-validation, with its environment."""

import json
import platform
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

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
from analyzer.predict.kernels.fusion import kernel_name, split_chain
from analyzer.predict.kernels.graphs import OPERATORS, Link, Shape
from analyzer.predict.kernels.law import TermLaw, cost_terms, weight_passes
from moescope.answers import note_emulator

SIZES = 6
"""Number of columns of `feature_matrix` before the law's terms."""
FORMAT = 1
"""Version of the file format that `Predictors.save` writes."""
LARGEST = 1 << 31
"""Upper bound of every size of a shape."""


def feature_matrix(kernel: str, shapes: list[Shape], footprints: np.ndarray | None = None) -> np.ndarray:
    """[shapes, SIZES + terms] of the kernel's first operator; `footprints`: bytes of weights in the model, else in the copies.

    Logarithms of rows, k, n, of the bytes between two uses of the same byte and of the passes over the weights
    (tiles of six rows), whether there is a single row; then the terms of the law.
    """
    first = kernel.split("+")[0]
    own_shapes = [s.of(first) for s in shapes]
    sizes_in_use = [s.weights(first) * s.copies for s in own_shapes] if footprints is None else footprints
    return np.array([_shape_features(first, s, float(b)) for s, b in zip(own_shapes, sizes_in_use, strict=True)])


def _shape_features(operator: str, s: Shape, footprint: float) -> list[float]:
    used = footprint if OPERATORS[operator].weight == "matrix" else s.bytes(operator)
    sizes = np.log([s.rows, s.k, s.n, used, weight_passes(s.rows, (6,))])
    return [*sizes.tolist(), float(s.rows == 1), *cost_terms(operator, s, used)]


def _size_features(inputs: np.ndarray) -> np.ndarray:
    return inputs[:, :SIZES]


def _term_features(inputs: np.ndarray) -> np.ndarray:
    return inputs[:, SIZES:]


def fit_law() -> Any:
    """The regressor `law`: a sum of terms."""
    return make_pipeline(FunctionTransformer(_term_features), TermLaw())


def fit_forest() -> Any:
    """The regressor `forest`: trees on the sizes."""
    return make_pipeline(FunctionTransformer(_size_features), ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0))


def fit_gaussian_process() -> Any:
    """A Gaussian process on the sizes: smooth between similar shapes, with measurement noise."""
    kernel = ConstantKernel(1.0) * RBF(np.ones(SIZES), (0.05, 1e3)) + WhiteKernel(1e-3, (1e-6, 1.0))
    return make_pipeline(
        FunctionTransformer(_size_features), StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    )


class LawWithResiduals(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The law, with another regressor for its residuals."""

    def __init__(self, rest: Callable[[], Any] = fit_forest):
        self.rest = rest

    def fit(self, inputs: np.ndarray, log_times: np.ndarray) -> "LawWithResiduals":
        """Learn."""
        self.law_ = fit_law().fit(inputs, log_times)
        self.rest_ = self.rest().fit(inputs, log_times - self.law_.predict(inputs))
        return self

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Log times."""
        return np.asarray(self.law_.predict(inputs) + self.rest_.predict(inputs))


CANDIDATES: dict[str, Callable[[], Any]] = {
    "law": fit_law,
    "law and forest": lambda: LawWithResiduals(fit_forest),
    "law and process": lambda: LawWithResiduals(fit_gaussian_process),
    "forest": fit_forest,
    "process": fit_gaussian_process,
}


def choose_regressor(kernel: str, shapes: list[Shape], times: np.ndarray, candidates: tuple[str, ...]) -> str:
    """The candidate regressor of log time with the smallest 5-fold error."""
    inputs, log_times = feature_matrix(kernel, shapes), np.log(times)
    folds = KFold(5, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        scores = {
            name: cross_val_score(CANDIDATES[name](), inputs, log_times, cv=folds, scoring="neg_mean_absolute_error").mean()
            for name in candidates
        }
    return max(scores, key=scores.__getitem__)


def quick_fit(kernel: str) -> Callable[[list[Shape], np.ndarray], Callable[[list[Shape]], np.ndarray]]:
    """The law only, for sampling: shapes and times → a function of shapes."""

    def fitted(shapes: list[Shape], times: np.ndarray) -> Callable[[list[Shape]], np.ndarray]:
        fitted_law = fit_law().fit(feature_matrix(kernel, shapes), np.log(times))
        return lambda unseen: np.exp(fitted_law.predict(feature_matrix(kernel, unseen)))

    return fitted


@dataclass(frozen=True)
class Kernel:
    """The measurements of a kernel, and its chosen regressor. times: [shapes]."""

    name: str
    shapes: list[Shape]
    times: np.ndarray
    chosen: str

    @cached_property
    def regressor(self) -> Any:
        """The chosen regressor of log time, fitted to all measurements."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return CANDIDATES[self.chosen]().fit(feature_matrix(self.name, self.shapes), np.log(self.times))

    def knows(self, shape: Shape) -> bool:
        """Whether the shape is within the measured range."""
        own_shapes = [s.of(self.name.split("+")[0]) for s in self.shapes]
        measured = np.array([[s.rows, s.k, s.n] for s in own_shapes])
        sizes = np.array([shape.rows, shape.k, shape.n])
        return bool((sizes >= measured.min(0)).all() and (sizes <= measured.max(0)).all())


@dataclass
class Predictors:
    """Kernels by name, the pairs that fuse, and the environment of the measurements."""

    unit: str
    fused: set[tuple[str, str]]
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def train(self, kernel: str, shapes: list[Shape], times: np.ndarray) -> None:
        """Train one kernel on measured shapes."""
        self.kernels[kernel] = Kernel(kernel, shapes, times, choose_regressor(kernel, shapes, times, self.candidates))

    def kernel(self, kernel: str, shapes: list[Shape], footprints: np.ndarray | None = None) -> np.ndarray:
        """Predicted times; `footprints`: bytes of weights in the whole model."""
        if kernel not in self.kernels:
            raise PredictError(f"kernel {kernel} was never measured: train it; known: {', '.join(sorted(self.kernels))}")
        return np.asarray(np.exp(self.kernels[kernel].regressor.predict(feature_matrix(kernel, shapes, footprints))))

    def parts(self, links: list[Link]) -> list[tuple[str, Shape, float]]:
        """The kernels of a chain: (name, shape, time)."""
        footprints = np.array([sum(shape.weights(name) for name, shape in links)])
        kernels = [(kernel_name(part), part[0][1]) for part in split_chain(links, self.fused)]
        return [(name, shape, float(self.kernel(name, [shape], footprints)[0])) for name, shape in kernels]

    def chain(self, links: list[Link]) -> tuple[float, list[str]]:
        """(time of a chain as the sum over its kernels, warnings about shapes outside the measured range)."""
        parts = self.parts(links)
        unknown = [(name, shape) for name, shape, _ in parts if not self.kernels[name].knows(shape)]
        messages = [f"{name} at {s.rows} x {s.k} x {s.n} is outside the measured shapes" for name, s in unknown]
        return sum(time for *_, time in parts), messages

    def save(self, file: Path, backend: str) -> None:
        """Write measurements, chosen regressors and environment as JSON; `load_predictors` fits the same regressors again."""
        self.environment = measuring_environment(backend)
        kernels = {
            name: {"regressor": k.chosen, "shapes": [astuple(s) for s in k.shapes], "times": k.times.tolist()}
            for name, k in self.kernels.items()
        }
        facts = {"format": FORMAT, "unit": self.unit, "fused": sorted(self.fused), "measured_on": self.environment}
        file.write_text(json.dumps(facts | {"kernels": kernels}) + "\n")


def load_predictors(file: Path) -> Predictors:
    """Read saved predictors; the file contains no code. A regressor is fitted when its kernel is first used."""
    try:
        facts = json.loads(file.read_text())
        if facts["format"] != FORMAT:
            raise PredictError(f"{file} is of format {facts['format']}, this program reads {FORMAT}: train again")
        kernels = {str(name): _kernel_from(str(name), entry) for name, entry in facts["kernels"].items()}
        fused = {(str(first), str(second)) for first, second in facts["fused"]}
        measured_on = {str(key): str(value) for key, value in facts["measured_on"].items()}
        note_emulator("emulator" in measured_on.get("backend", ""))
        return Predictors(str(facts["unit"]), fused, kernels=kernels, environment=measured_on)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PredictError(f"{file} holds no predictors ({error!r}): train again") from None


def _kernel_from(name: str, facts: dict[str, Any]) -> Kernel:
    shapes = [Shape(*map(int, sizes)) for sizes in facts["shapes"]]
    times, chosen = np.array(facts["times"], float), facts["regressor"]
    sizes = np.array([astuple(shape) for shape in shapes])
    if not set(name.split("+")) <= OPERATORS.keys() or chosen not in CANDIDATES or times.shape != (len(shapes),):
        raise ValueError(f"kernel {name}")
    if not len(shapes) or sizes.min() < 1 or sizes.max() > LARGEST or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"sizes or times of kernel {name}")
    return Kernel(name, shapes, times, chosen)


def measuring_environment(backend: str) -> dict[str, str]:
    """The environment in which predictors are valid."""
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
