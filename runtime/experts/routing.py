"""Routers' choices: the interface to listen to them, and the scores that decide them."""

from typing import Protocol

import numpy as np
import onnx
import onnxruntime as ort

from runtime.backends.cpu import session_options
from runtime.models.decoder import LOGITS
from runtime.models.routers import SCORES
from runtime.package.layout import Package, layer_name

TINY = 1e-9
SOME_ROWS = 256


class Listener(Protocol):
    """Notified of a forward step as it happens, on the engine's thread."""

    def step_begins(self, embedded: np.ndarray) -> None:
        """Tokens enter the first layer as `embedded` [n, H]."""

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """The layer's attention is about to read `hidden` [n, H]."""

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """The router read `attended` [n, H] and chose experts [n, k]."""


class RouterScores:
    """Scores [n, E] that rank a layer's experts before groups exclude any; logits if the router uses probabilities."""

    def __init__(self, package: Package, layer: int):
        self._model = model = onnx.load_from_string(package.whole_graph(layer_name("router", layer)))
        self._hidden = package.family.hidden
        maker = next((node for node in model.graph.node if SCORES in node.output), None)
        self._probabilities = maker is not None and maker.op_type == "Softmax"
        self._session = self._session_of(SCORES if maker is not None else LOGITS)
        self._ranks_logits = maker is None or self._probabilities

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Centred scores of `hidden` [n, H]; the untrained predictor passes a state from before the layer's attention."""
        scores = self._session.run(None, {"hidden": np.ascontiguousarray(hidden)})[0]
        if self._probabilities:
            scores = np.log(np.maximum(scores, TINY))
        centred: np.ndarray = scores - scores.mean(-1, keepdims=True)
        return centred

    def linear(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(map [E, H] of states divided by their root mean square, offsets [E]) that give these scores; None if none does.

        Found from the scores of unit vectors, and checked on random states.
        """
        if not self._ranks_logits:
            return None
        session, hidden = self._session_of(LOGITS), self._hidden

        def logits(states: np.ndarray) -> np.ndarray:
            made: np.ndarray = session.run(None, {"hidden": states})[0]
            return made - made.mean(-1, keepdims=True)

        unit = np.eye(hidden, dtype=np.float32) * np.float32(hidden**0.5)  # of root mean square 1
        offsets = (logits(unit[:1]) + logits(-unit[:1]))[0] / 2
        rows = np.concatenate([logits(unit[first : first + SOME_ROWS]) for first in range(0, hidden, SOME_ROWS)])
        rows = (rows - offsets).T / np.float32(hidden**0.5)
        states = np.random.default_rng(0).standard_normal((8, hidden)).astype(np.float32)
        scores = logits(states)
        given = (states / np.sqrt((states**2).mean(1, keepdims=True))) @ rows.T + offsets
        return (rows, offsets) if np.abs(given - scores).max() < 1e-2 * np.abs(scores).max() else None

    def _session_of(self, output: str) -> ort.InferenceSession:
        del self._model.graph.output[:]
        self._model.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
        return ort.InferenceSession(self._model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"])


def multi_hot(chosen: np.ndarray, experts: int) -> np.ndarray:
    """[n, E] float32: 1 where the token chose the expert."""
    hot = np.zeros((len(chosen), experts), np.float32)
    np.put_along_axis(hot, chosen.astype(np.int64), 1, 1)
    return hot


class History:
    """Recent tokens' choices per layer: the last token's, and a mean that decays by DECAY per token."""

    DECAY = 0.8

    def __init__(self, layers: int, experts: int):
        self.last = np.zeros((layers, experts), np.float32)
        self.mean = np.zeros((layers, experts), np.float32)

    def add(self, layer: int, chosen: np.ndarray) -> None:
        """A layer's tokens chose experts [n, k]."""
        hot = multi_hot(chosen, self.mean.shape[1])
        weights = self.DECAY ** np.arange(len(hot) - 1, -1, -1, dtype=np.float32)
        self.mean[layer] = self.DECAY ** len(hot) * self.mean[layer] + (1 - self.DECAY) * (weights @ hot)
        self.last[layer] = hot[-1]

    def add_token(self, layers: np.ndarray, chosen: np.ndarray) -> None:
        """One token chose experts [L, k] in these layers [L]."""
        self.mean[layers] *= self.DECAY
        self.last[layers] = 0
        self.mean[layers[:, None], chosen] += 1 - self.DECAY
        self.last[layers[:, None], chosen] = 1

    def features(self) -> np.ndarray:
        """[layers, 2E]: the mean, then the last choice."""
        return np.concatenate([self.mean, self.last], axis=1)

    @classmethod
    def features_of(cls, hot: np.ndarray) -> np.ndarray:
        """[n, 2E]: for each token of one sequence, the `features` before it."""
        mean, last = np.zeros_like(hot), np.zeros_like(hot)
        last[1:] = hot[:-1]
        for i in range(1, len(hot)):
            mean[i] = cls.DECAY * mean[i - 1] + (1 - cls.DECAY) * hot[i - 1]
        return np.concatenate([mean, last], axis=1)
