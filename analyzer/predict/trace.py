"""A recorded routing trace: which experts every row of every step chose, layer by layer."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.predict.errors import PredictError


@dataclass(frozen=True)
class Step:
    """One forward step. `routes[layer]`: experts [rows, k]; `position`: context length before it."""

    phase: str
    position: int
    routes: tuple[np.ndarray, ...]

    @property
    def rows(self) -> int:
        """Tokens fed."""
        return len(self.routes[0])


@dataclass(frozen=True)
class Trace:
    """Steps in order."""

    steps: tuple[Step, ...]
    experts: int

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return len(self.steps[0].routes)

    @property
    def top_k(self) -> int:
        """Experts per row."""
        return int(self.steps[0].routes[0].shape[1])


def from_tables(tables: dict[str, pd.DataFrame]) -> Trace:
    """The trace in a recording's tables `routes` and `tokens`; steps that miss a part of their routes are left out."""
    routes, tokens = tables["routes"], tables["tokens"].set_index("token_id")
    known = routes[routes["token_id"].isin(tokens.index)]
    if len(known) == 0:
        raise PredictError("the recording holds no routes: record an MoE engine at level expert")
    layers = np.sort(known["layer"].unique())
    k = int(known["rank"].max()) + 1
    steps = []
    for token, part in known.groupby("token_id", sort=True):
        told = tokens.loc[token]
        rows = int(told["n_tokens"])
        ordered = part.sort_values(["layer", "row", "rank"])
        if len(ordered) == len(layers) * rows * k:
            chosen = ordered["expert"].to_numpy(np.int64).reshape(len(layers), rows, k)
            steps.append(Step(str(told["phase"]), int(told["position"]), tuple(chosen)))
    if not steps:
        raise PredictError("no step of the recording has all its routes: record again with a larger --ring-mib")
    return Trace(tuple(steps), int(known["expert"].max()) + 1)
