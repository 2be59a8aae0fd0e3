"""The layer loop: which operators a layer runs, and in which order; who runs them is up to the implementations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sized
from dataclasses import dataclass

import numpy as np

from runtime.backends.graph import Graph
from runtime.backends.operators import last_kind, made_from
from runtime.experts.routing import Listener
from runtime.experts.run import Experts
from runtime.models import Family
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind


@dataclass(frozen=True)
class Parts:
    """What every implementation runs. Per layer: `mixers`, the graph of the router or of the dense MLP; `shared`, of the shared
    expert; `norms`, of the layer's end; None where a layer has none.
    """

    family: Family
    log: RunLog
    experts: Experts
    listeners: list[Listener]
    mixers: list[Graph]
    shared: list[Graph | None]
    norms: list[Graph | None]

    def attention_from(self, layer: int) -> bytes:
        """Identities of the tensors that the layer's attention reads."""
        return made_from(Kind.ATTENTION, layer, before=last_kind(self.family, layer - 1))


class LayerLoop(ABC):
    """Rows through all layers. `hidden` [n, H] enters a layer and then holds its result."""

    def __init__(self, parts: Parts, hidden: np.ndarray):
        self.parts, self.hidden = parts, hidden

    def run_layers(self, chunks: Sized[slice]) -> None:
        """Attention and routing chunk by chunk; then the shared expert, the rest of the experts, and the sum."""
        for layer in range(self.parts.family.layers):
            routed = layer not in self.parts.family.dense
            self._begin(layer)
            for rows in chunks:
                self._attend(layer, rows)
                if routed:
                    self._route(layer, rows)
            if routed:
                self._run_shared(layer)
                self._run_experts(layer)
                self._combine(layer)
            else:
                self._run_mlp(layer)

    def _notify_begin(self, layer: int) -> None:
        for listener in self.parts.listeners:
            listener.layer_begins(layer, self.hidden)

    def _notify_routed(self, layer: int, attended: np.ndarray, chosen: np.ndarray) -> None:
        for listener in self.parts.listeners:
            listener.routed(layer, attended, chosen)

    @abstractmethod
    def _begin(self, layer: int) -> None:
        """Begin an event of the expert cache if needed, and notify the listeners."""

    @abstractmethod
    def _attend(self, layer: int, rows: slice) -> None:
        """Attention over these rows, with the residual."""

    @abstractmethod
    def _route(self, layer: int, rows: slice) -> None:
        """Choose experts for these rows, and dispatch the rows to them."""

    @abstractmethod
    def _run_mlp(self, layer: int) -> None:
        """The MLP of a dense layer: its result is the layer's."""

    @abstractmethod
    def _run_shared(self, layer: int) -> None:
        """The shared expert for all rows, if the layer has one; routed experts may still be loaded or run elsewhere."""

    @abstractmethod
    def _run_experts(self, layer: int) -> None:
        """Run the experts that have not run yet, and wait for all."""

    @abstractmethod
    def _combine(self, layer: int) -> None:
        """The layer's result, which does not depend on the order in which experts finish."""
