"""Routers' choices: the interface to listen to them, and the scores that decide them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx
import onnxruntime as ort

from runtime.backends.cpu import session_options
from runtime.models.decoder import LOGITS
from runtime.models.routers import SCORES
from runtime.package.layout import Package, layer_name

TINY, SMALL = 1e-9, 1e-6
SOME_ROWS, NEARLY = 256, 0.01
LOGITS_RULE = "logits"
RULES = (LOGITS_RULE, "Sigmoid", "Softmax")
"""What ranks experts, in the order of the extension's numbers."""


class Listener(Protocol):
    """Notified of a forward step as it happens, on the engine's thread."""

    def step_begins(self, embedded: np.ndarray) -> None:
        """Tokens enter the first layer as `embedded` [n, H]."""

    def layer_begins(self, layer: int, hidden: np.ndarray) -> None:
        """The layer's attention is about to read `hidden` [n, H]."""

    def routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        """The router read `attended` [n, H] and chose experts [n, k]."""


@dataclass(frozen=True)
class LinearScores:
    """Scores of a state: its product with `rows` [E, H], divided by its root mean square if `normed`, plus `offsets` [E].

    `rule`: a key of RULES, what they are turned into before experts are ranked. `corrections` [E] are then added.
    """

    rows: np.ndarray
    offsets: np.ndarray
    normed: bool = True
    rule: str = LOGITS_RULE
    corrections: np.ndarray | None = None


class RouterScores:
    """Scores [n, E] that rank a layer's experts before groups exclude any; logits if the router uses probabilities."""

    def __init__(self, package: Package, layer: int):
        self._package, self._layer = package, layer
        model = self._graph()
        maker = next((node for node in model.graph.node if SCORES in node.output), None)
        self._probabilities = maker is not None and maker.op_type == "Softmax"
        self._session = session_of(model, SCORES if maker is not None else LOGITS)

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Centred scores of `hidden` [n, H]; the untrained predictor passes a state from before the layer's attention."""
        scores = self._session.run(None, {"hidden": np.ascontiguousarray(hidden)})[0]
        if self._probabilities:
            scores = np.log(np.maximum(scores, TINY))
        centred: np.ndarray = scores - scores.mean(-1, keepdims=True)
        return centred

    def linear(self) -> LinearScores | None:
        """The scores as a linear map, if they are one: found from the logits of unit vectors, and checked on random states."""
        model, hidden = self._graph(), self._package.family.hidden
        rule, corrections = ranking_of(model)
        session = session_of(model, LOGITS)

        def logits(states: np.ndarray) -> np.ndarray:
            made: np.ndarray = session.run(None, {"hidden": states})[0]
            return made

        length, first = np.float32(hidden**0.5), np.eye(1, hidden, dtype=np.float32)  # unit vectors times this have the RMS 1
        offsets = (logits(length * first) + logits(-length * first))[0] / 2
        parts = (length * np.eye(min(SOME_ROWS, hidden - i), hidden, i, dtype=np.float32) for i in range(0, hidden, SOME_ROWS))
        rows = (np.concatenate([logits(part) for part in parts]) - offsets).T / length
        states = 2 * np.random.default_rng(0).standard_normal((8, hidden)).astype(np.float32)
        scores = logits(states)
        for normed, given in ((True, normalise_rows(states)), (False, states)):
            if np.abs(given @ rows.T + offsets - scores).max() <= NEARLY * np.abs(scores).max():
                return LinearScores(rows, offsets, normed, rule, corrections)
        return None

    def _graph(self) -> onnx.ModelProto:
        return onnx.load_from_string(self._package.whole_graph(layer_name("router", self._layer)))


def ranking_of(model: onnx.ModelProto) -> tuple[str, np.ndarray | None]:
    """(key of RULES, corrections [E]) by which a router's graph ranks experts."""
    made = {output: node for node in model.graph.node for output in node.output}
    if SCORES not in made or made[SCORES].op_type == "Softmax":
        return LOGITS_RULE, None
    scores, correction = made[SCORES].input
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == correction)
    return made[scores].op_type, onnx.numpy_helper.to_array(tensor).astype(np.float32)


def session_of(model: onnx.ModelProto, output: str) -> ort.InferenceSession:
    """A session of a graph with this output alone."""
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
    return ort.InferenceSession(model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"])


def normalise_rows(hidden: np.ndarray) -> np.ndarray:
    """Rows [n, H] divided by their root mean square."""
    mean_square = np.einsum("ij,ij->i", hidden, hidden) / hidden.shape[1]
    rows: np.ndarray = hidden / np.sqrt(mean_square + SMALL)[:, None]
    return rows


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
