"""Predicts which experts a layer will choose before its router runs.

Three views of the same question, the latest in the token last:

    token   the whole next token, from its embedding and each layer's recent choices (History), before the first layer runs
    next    layer l + 1, from the state that enters layer l
    near    layer l, from the state that enters it (before its attention)

Each view is one linear map per layer onto the router's centred scores, by ridge regression on normalised states: scores carry
more information than the choice of k. A score's margin over the middle of its row's k-th and (k+1)-th score becomes a
probability by a logistic curve fitted for each layer and view. Without training, `near` and `next` apply the layer's own router
to the current state. Stored as fp16: (3H + 2E + 3) * E * layers numbers.
"""

import io
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import PackageError
from runtime.experts.routing import History, LinearScores, RouterScores, normalise_rows
from runtime.package.layout import Package, file_entry, sha256

VIEWS = ("token", "next", "near")
UNTRAINED_CURVE = np.array([1.5, 0.0], np.float32)
FILE_PREFIX = "predictor_"
TINY = 1e-6


@dataclass
class View:
    """Linear maps [layers, F + 1, E] (the last row is the bias) and logistic curves [layers, 2] (slope, offset)."""

    maps: np.ndarray
    curves: np.ndarray

    def scores(self, layer: int, features: np.ndarray) -> np.ndarray:
        """Scores [n, E] of features [n, F]."""
        scores: np.ndarray = features @ self.maps[layer, :-1] + self.maps[layer, -1]
        return scores


def top_k_margins(scores: np.ndarray, k: int) -> np.ndarray:
    """Scores [n, E] minus the border that separates each row's best k from the rest."""
    ranked, last = scores.copy(), scores.shape[1] - k
    ranked.sort(axis=1)
    border = ranked[:, last, None] + ranked[:, max(last - 1, 0), None]
    border *= np.float32(0.5)
    over: np.ndarray = scores - border
    return over


def log_odds(scores: np.ndarray, k: int, curves: np.ndarray) -> np.ndarray:
    """Log odds [n, E] that an expert is among the k chosen; one curve [2] for all rows, or one per row [n, 2]."""
    odds: np.ndarray = curves[..., 0, None] * top_k_margins(scores, k) + curves[..., 1, None]
    return odds


def probability_of(odds: np.ndarray) -> np.ndarray:
    """Probability of log odds."""
    probability: np.ndarray = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
    return probability


class Predictor:
    """The package's trained views, or the layers' own routers."""

    def __init__(self, views: dict[str, View], top_k: int, routers: dict[int, RouterScores] | None = None):
        self.views, self.top_k, self._routers = views, top_k, routers or {}
        if views:
            near, following = views["near"], views["next"]
            pairs = range(len(near.maps) - 1)
            maps = [np.concatenate([near.maps[i], following.maps[i + 1]], axis=1) for i in pairs] + [near.maps[-1]]
            self._maps = [(np.ascontiguousarray(whole[:-1].T), whole[-1].reshape(-1, near.maps.shape[2])) for whole in maps]
            self._curves = [np.stack([near.curves[i], following.curves[i + 1]]) for i in pairs] + [near.curves[-1:]]

    @classmethod
    def of(cls, package: Package) -> "Predictor":
        """The package's predictor, or an untrained one."""
        path = predictor_path(package)
        family = package.family
        if path is None:
            return cls({}, family.top_k, routers_of(package))
        return cls(_read_views(path), family.top_k)

    @property
    def trained(self) -> bool:
        """Whether linear maps were fitted."""
        return bool(self.views)

    def linear(self, layer: int) -> tuple[LinearScores, np.ndarray] | None:
        """A layer's scores as a linear map of the state that its router reads, if they are one, and their curve [2]."""
        if self.views:
            view = self.views["near"]
            return LinearScores(view.maps[layer, :-1].T, view.maps[layer, -1]), view.curves[layer]
        scores = self._routers[layer].linear()
        return (scores, UNTRAINED_CURVE) if scores else None

    def tokens(self, embedded: np.ndarray, history: History) -> np.ndarray | None:
        """Log odds [layers, E] for a token with embedding [1, H], from recent tokens' choices; None if untrained."""
        if "token" not in self.views:
            return None
        view, recent = self.views["token"], history.features()
        seen = np.broadcast_to(normalise_rows(embedded), (len(recent), embedded.shape[1]))
        features = np.concatenate([seen, recent], axis=1)[:, None]
        scores = np.matmul(features, view.maps[:, :-1])[:, 0] + view.maps[:, -1]
        return log_odds(scores, self.top_k, view.curves)

    def ahead(self, layer: int, hidden: np.ndarray) -> Iterable[np.ndarray]:
        """Log odds [E] of this layer and of the next from the state [1, H] that enters this one, if they have experts."""
        if not self.views:
            return [self._untrained(near, hidden) for near in (layer, layer + 1)]
        maps, offsets = self._maps[layer]
        row = hidden[0]
        scores = (maps @ row).reshape(offsets.shape)
        scores *= (float(row @ row) / len(row) + TINY) ** -0.5
        scores += offsets
        return log_odds(scores, self.top_k, self._curves[layer])

    def _untrained(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        if layer not in self._routers:
            return np.empty(0, np.float32)
        return log_odds(self._routers[layer](hidden), self.top_k, UNTRAINED_CURVE)[0]


def routers_of(package: Package) -> dict[int, RouterScores]:
    """The scores of every layer that has experts."""
    return {layer: RouterScores(package, layer) for layer in package.family.routed}


def predictor_path(package: Package) -> Path | None:
    """The path of the package's predictor, if it has one."""
    name = next((name for name in package.manifest["files"] if name.startswith(FILE_PREFIX)), None)
    return package.folder / name if name else None


def save_views(views: dict[str, View], package: Package) -> int:
    """Write the views into the package; returns their bytes. The manifest names the new file before the old one is removed."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f"{name}_maps": view.maps.astype(np.float16) for name, view in views.items()}
    arrays |= {f"{name}_curves": view.curves.astype(np.float32) for name, view in views.items()}
    np.savez(buffer, **arrays)
    content, old = buffer.getvalue(), predictor_path(package)
    name = f"{FILE_PREFIX}{sha256(content)[:12]}.npz"
    files = {n: entry for n, entry in package.manifest["files"].items() if not n.startswith(FILE_PREFIX)}
    package.write(name, content)
    package.change_manifest({"files": files | {name: file_entry(content)}})
    if old is not None and old.name != name:
        with suppress(OSError):
            old.unlink()
    return len(content)


def _read_views(path: Path) -> dict[str, View]:
    try:
        with np.load(path) as stored:
            return {
                view: View(stored[f"{view}_maps"].astype(np.float32), stored[f"{view}_curves"].astype(np.float32))
                for view in VIEWS
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise PackageError(f"{path} is damaged ({error}): run `moescope tune predictor` again") from None
