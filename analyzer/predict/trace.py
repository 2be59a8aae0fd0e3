"""A recorded routing trace: the experts chosen by every row of every step, by layer."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analyzer.errors import PredictError
from analyzer.questions.expert_loads import layer_bytes
from analyzer.records.schema import Tables


@dataclass(frozen=True)
class Step:
    """One forward step. `routes[layer]`: experts [rows, k]; `position`: context length before it. The last layer may have fewer
    rows, or none: llama.cpp computes it only for rows whose output is asked for.

    `asked[layer]`: (layer, expert) of the loads ahead that began during this layer, in order.
    """

    phase: str
    position: int
    routes: tuple[np.ndarray, ...]
    asked: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    token_id: int = -1

    @property
    def rows(self) -> int:
        """Number of input tokens."""
        return len(self.routes[0])


@dataclass(frozen=True)
class Trace:
    """The steps in order. expert_bytes: of an expert by layer; () if not recorded. dropped: steps without all their routes."""

    steps: tuple[Step, ...]
    experts: int
    expert_bytes: tuple[int, ...] = ()
    dropped: int = 0

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return len(self.steps[0].routes)

    @property
    def top_k(self) -> int:
        """Experts per row."""
        return int(self.steps[0].routes[0].shape[1])

    @property
    def farthest_request(self) -> int:
        """Most layers between the one in which a recorded load ahead began and the one it was for; -1 without any."""
        distances = [target - layer for step in self.steps for layer, loads in step.asked.items() for target, _ in loads]
        return max(distances, default=-1)


def from_tables(tables: Tables) -> Trace:
    """The trace in a recording's tables `routes` and `tokens`; steps with incomplete routes are left out and counted."""
    routes, tokens = tables["routes"], tables["tokens"].set_index("token_id")
    routed = routes[routes["token_id"].isin(tokens.index)]
    if len(routed) == 0:
        raise PredictError("the recording holds no routes, of which counts keep no order: record an MoE engine at level expert")
    layers = np.sort(routed["layer"].unique())
    k = int(routed["rank"].max()) + 1
    asked = _loads_ahead(tables, layers)
    steps = []
    parts = routed.sort_values(["token_id", "layer", "row", "rank"]).groupby("token_id", sort=True)
    for token, part in parts:
        step = tokens.loc[token]
        chosen = _by_layer(part, layers, int(step["n_tokens"]), k)
        if chosen:
            asked_in = asked.get(int(token), {})
            steps.append(Step(str(step["phase"]), int(step["position"]), chosen, asked_in, int(token)))
    if not steps:
        raise PredictError("no step of the recording has all its routes: record again with a larger --ring-mib")
    sizes = layer_bytes(tables)
    expert_bytes = tuple(sizes[layer] for layer in layers.tolist()) if set(layers.tolist()) <= sizes.keys() else ()
    return Trace(tuple(steps), int(routed["expert"].max()) + 1, expert_bytes, len(parts) - len(steps))


def _by_layer(part: pd.DataFrame, layers: np.ndarray, rows: int, k: int) -> tuple[np.ndarray, ...]:
    """A step's experts [rows, k] in each layer, of fewer rows in the last; () if some are missing."""
    counts = part["layer"].value_counts().reindex(layers, fill_value=0).to_numpy()
    if (counts[:-1] != rows * k).any() or counts[-1] % k or not k * (rows == 1 or len(layers) == 1) <= counts[-1] <= rows * k:
        return ()
    chosen = np.split(part["expert"].to_numpy(np.int64), np.cumsum(counts)[:-1])
    return tuple(experts.reshape(-1, k) for experts in chosen)


def _loads_ahead(tables: Tables, layers: np.ndarray) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """Step → layer in which loads ahead began → (layer, expert) loaded; layers are indexes into `layers`."""
    loads = tables["loads"]
    ahead = loads[(loads["action"] == "load") & (loads["reason"] == "prefetch") & loads["layer"].isin(layers)]
    if len(ahead) == 0:
        return {}
    ahead, tokens = ahead.sort_values("begin_ns"), tables["tokens"].sort_values("begin_ns")
    combined = tables["operators"].query("type == 'combine'").sort_values("end_ns")
    begin = ahead["begin_ns"].to_numpy()
    step = np.searchsorted(tokens["begin_ns"].to_numpy(), begin, "right") - 1
    passed = np.searchsorted(combined["end_ns"].to_numpy(), begin, "right")
    before = np.searchsorted(combined["end_ns"].to_numpy(), tokens["begin_ns"].to_numpy(), "right")
    targets = np.searchsorted(layers, ahead["layer"].to_numpy())
    began_in = np.clip(np.minimum(passed - before[step], targets), 0, len(layers) - 1)
    by_step: dict[int, dict[int, list[tuple[int, int]]]] = {}
    token = tokens["token_id"].to_numpy()[step]
    for number, layer, target, expert in zip(
        *(a.tolist() for a in (token, began_in, targets, ahead["expert"].to_numpy())), strict=True
    ):
        by_step.setdefault(number, {}).setdefault(layer, []).append((target, expert))
    return by_step


class PairPredictor:
    """Predicts the next layer's experts from this layer's, by the frequency of pairs so far in the trace."""

    def __init__(self, layers: int, experts: int):
        self._followed = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))

    def probabilities(self, layer: int, chosen: np.ndarray) -> np.ndarray:
        """[experts]: frequency of each expert of layer + 1 after the `chosen` ones of `layer`, averaged over `chosen`."""
        used = np.unique(chosen)
        seen = self._seen[layer, used][:, None]
        return np.asarray(
            np.divide(self._followed[layer, used], seen, where=seen > 0, out=np.zeros_like(self._followed[layer, used])).mean(0)
        )

    def learn(self, layer: int, chosen: np.ndarray, following: np.ndarray) -> None:
        """Record that layer + 1 used `following`."""
        used = np.unique(chosen)
        self._seen[layer, used] += 1
        self._followed[layer][np.ix_(used, np.unique(following))] += 1
