"""Fits the predictor to a model's own routing: runs text through the engine, one segment at a time, and keeps only sums."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.experts.predictor import VIEWS, View, log_odds, normalise_rows, probability_of, routers_of, top_k_margins
from runtime.experts.routing import History, RouterScores, multi_hot
from runtime.package.convert import Progress
from runtime.step.engine import Engine
from runtime.step.sampling import Sampler, Sampling

RIDGE = 1e-3
BINS = 10
NEVER = -30.0  # log odds


@dataclass
class Routed:
    """One segment's forward pass: states [n, H] that enter each layer (the first: the embedding).

    scores, hot: a layer's scores and choices [n, E]; layers without experts have none.
    """

    states: list[np.ndarray] = field(default_factory=list)
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    hot: dict[int, np.ndarray] = field(default_factory=dict)

    def features(self, view: str, layer: int) -> np.ndarray | None:
        """The view's features for the layer [n, F]; None if it has none (`next` of the first layer)."""
        if view == "token":
            return np.concatenate([normalise_rows(self.states[0]), History.features_of(self.hot[layer])], axis=1)
        source = layer if view == "near" else layer - 1
        return normalise_rows(self.states[source]) if source >= 0 else None


class Collector:
    """Listens to the engine and keeps the segment's routing (runtime.experts.routing.Listener)."""

    def __init__(self, routers: dict[int, RouterScores], experts: int):
        self.routers, self.experts = routers, experts
        self.routed_chunks: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.states: list[np.ndarray] = []

    def step_begins(self, embedded: np.ndarray) -> None:
        """A segment begins."""
        self.states, self.routed_chunks = [], {}

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """Keep the state that enters the layer."""
        self.states.append(hidden.copy())

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """Keep scores and choices of a chunk."""
        pair = (self.routers[layer](attended), multi_hot(chosen, self.experts))
        self.routed_chunks.setdefault(layer, []).append(pair)

    def segment(self) -> Routed:
        """The routing of the whole segment."""
        scores = {layer: np.concatenate([s for s, _ in parts]) for layer, parts in self.routed_chunks.items()}
        hot = {layer: np.concatenate([h for _, h in parts]) for layer, parts in self.routed_chunks.items()}
        return Routed(self.states, scores, hot)


def collect_routing(engine: Engine, segments: list[list[int]], progress: Progress | None = None) -> Iterator[Routed]:
    """Run the segments and yield the routing of each, as computed by the engine."""
    collector = Collector(routers_of(engine.package), engine.family.experts)
    engine.listeners.append(collector)
    try:
        for done, segment in enumerate(segments, 1):
            engine.step(engine.begin_sequence(len(segment)), segment, Sampler(Sampling()))
            yield collector.segment()
            if progress:
                progress(done, len(segments))
    finally:
        engine.listeners.remove(collector)


class Sums:
    """Normal equations of one view, per layer: products of features with features and with scores."""

    def __init__(self, layers: int):
        self.products: list[Any] = [0] * layers
        self.targets: list[Any] = [0] * layers
        self.rows = [0] * layers

    def add(self, layer: int, features: np.ndarray, scores: np.ndarray) -> None:
        """Add the rows of one segment."""
        rows = np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1)
        self.products[layer] = self.products[layer] + rows.T @ rows
        self.targets[layer] = self.targets[layer] + rows.T @ scores
        self.rows[layer] += len(rows)

    def solve(self) -> np.ndarray:
        """Maps [layers, F + 1, E]; a layer without rows maps to zero."""
        fitted_layer = next((layer for layer, rows in enumerate(self.rows) if rows), None)
        if fitted_layer is None:
            return np.zeros((len(self.rows), 1, 1), np.float32)
        maps = [
            np.linalg.solve(product + RIDGE * rows * np.eye(len(product)), target)
            if rows
            else np.zeros(self.targets[fitted_layer].shape)
            for product, target, rows in zip(self.products, self.targets, self.rows, strict=True)
        ]
        return np.stack(maps).astype(np.float32)


def fit_views(passes: Iterator[Routed], layers: int) -> dict[str, View]:
    """Ridge regression of every view; until calibrated, the curves yield log odds NEVER."""
    sums = {view: Sums(layers) for view in VIEWS}
    for routed in passes:
        for view, layer, features in _all_features(routed):
            sums[view].add(layer, features, routed.scores[layer])
    return {view: View(sums[view].solve(), np.tile(np.array([0, NEVER], np.float32), (layers, 1))) for view in VIEWS}


def calibrate_views(views: dict[str, View], passes: Iterator[Routed], top_k: int) -> None:
    """Fit each logistic curve to segments not used for the maps."""
    samples: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    for routed in passes:
        for view, layer, features in _all_features(routed):
            margin = top_k_margins(views[view].scores(layer, features), top_k)
            samples.setdefault((view, layer), []).append((margin.ravel(), routed.hot[layer].ravel()))
    for (view, layer), pairs in samples.items():
        views[view].curves[layer] = fit_logistic(np.concatenate([m for m, _ in pairs]), np.concatenate([h for _, h in pairs]))


def fit_logistic(margin: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Slope and offset of the logistic curve of maximum likelihood, by Newton's method."""
    x = np.stack([margin.astype(np.float64), np.ones(len(margin))], axis=1)
    curve = np.array([1.0, 0.0])
    for _ in range(25):
        predicted = probability_of(x @ curve)
        gradient = x.T @ (chosen - predicted) - 1e-3 * curve
        hessian = (x * (predicted * (1 - predicted))[:, None]).T @ x + 1e-3 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        curve += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-6:
            break
    return curve


class Judgement:
    """The quality of one view on unseen segments, as sums over layers."""

    def __init__(self, layers: int, widths: tuple[int, ...]):
        self.widths, self.recalled, self.chosen = widths, np.zeros((layers, len(widths))), np.zeros(layers)
        self.bins = np.zeros((BINS, 3))

    def add(self, layer: int, predicted: np.ndarray, hot: np.ndarray) -> None:
        """Add one segment's probabilities and choices [n, E]."""
        ranked = np.take_along_axis(hot, np.argsort(-predicted, axis=1, kind="stable"), 1)
        self.recalled[layer] += [ranked[:, :width].sum() for width in self.widths]
        self.chosen[layer] += hot.sum()
        bins = np.minimum((predicted * BINS).astype(int), BINS - 1).ravel()
        for column, weight in enumerate((np.ones(predicted.size), predicted.ravel(), hot.ravel())):
            self.bins[:, column] += np.bincount(bins, weight, BINS)

    def report(self) -> dict[str, Any]:
        """Recall by width, total and by layer, and calibration: predicted and true chance in ten bins, and their mean gap."""
        count = np.maximum(self.bins[:, 0], 1)
        gap = np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / max(self.bins[:, 0].sum(), 1)
        return {
            "widths": list(self.widths),
            "recall": (self.recalled.sum(0) / max(self.chosen.sum(), 1)).tolist(),
            "recall_by_layer": [(f / c).tolist() if c else None for f, c in zip(self.recalled, self.chosen, strict=True)],
            "layers": int((self.chosen > 0).sum()),
            "calibration_error": float(gap),
            "calibration": [
                {"said": float(s), "true": float(t), "pairs": int(n)}
                for s, t, n in zip(self.bins[:, 1] / count, self.bins[:, 2] / count, self.bins[:, 0], strict=True)
            ],
        }


def judge(views: dict[str, View], passes: Iterator[Routed], layers: int, experts: int, top_k: int) -> dict[str, Any]:
    """Every view's report on held-out segments, at widths k, 2k and 4k."""
    widths = tuple(min(experts, top_k * factor) for factor in (1, 2, 4))
    judgements = {view: Judgement(layers, widths) for view in VIEWS}
    for routed in passes:
        for view, layer, features in _all_features(routed):
            fitted = views[view]
            odds = log_odds(fitted.scores(layer, features), top_k, fitted.curves[layer])
            judgements[view].add(layer, probability_of(odds), routed.hot[layer])
    return {view: judgement.report() for view, judgement in judgements.items()}


def _all_features(routed: Routed) -> Iterator[tuple[str, int, np.ndarray]]:
    for view in VIEWS:
        for layer in routed.hot:
            features = routed.features(view, layer)
            if features is not None:
                yield view, layer, features
