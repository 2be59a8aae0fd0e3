"""Runs the rows of a step through all layers on any backend, in chunks; each call allocates its outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from runtime.backends.calls import combine_experts
from runtime.backends.graph import Backend
from runtime.backends.operators import Operator, made_from
from runtime.cache_rules.batches import slice_chunks
from runtime.errors import InterruptedStepError
from runtime.experts.run import LayerWork
from runtime.step.attention import Attention, PortableAttention, Sequence
from runtime.step.layers import LayerLoop, Parts
from runtime.telemetry import probes
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Kind


@dataclass(frozen=True)
class Placement:
    """Where one phase runs its attention and its experts, and the maximum number of rows of one attention run.

    Embedding, routers, shared experts, dense layers and head stay on the CPU.
    """

    attention: Attention
    experts: Backend
    rows: int

    @property
    def static(self) -> bool:
        """Whether attention has static shapes."""
        return isinstance(self.attention, PortableAttention)

    @property
    def label(self) -> str:
        """The placement as a readable text."""
        label = self.attention.backend.label
        return label if label == self.experts.label else f"{label} (attention) and {self.experts.label} (experts)"


class RowPath(LayerLoop):
    """The layers of one step, of any number of rows; experts run when a buffer is full, the others at the layer's end."""

    work: LayerWork
    attended: np.ndarray
    weights: np.ndarray
    common: np.ndarray | None

    def __init__(
        self, parts: Parts, placement: Placement, sequence: Sequence, step: Step, hidden: np.ndarray, unwanted: Callable[[], bool]
    ):
        super().__init__(parts, hidden)
        self.placement, self.sequence, self.step, self.unwanted = placement, sequence, step, unwanted

    def run(self) -> np.ndarray:
        """Hidden [n, H] after the last layer. Raises InterruptedStepError before a chunk that is `unwanted`."""
        self.run_layers([*slice_chunks(len(self.hidden), self.placement.rows, self.placement.static)])
        return self.hidden

    def _begin(self, layer: int) -> None:
        family, n = self.parts.family, len(self.hidden)
        if layer not in family.dense:
            self.work = self.parts.experts.begin(layer, n, self.placement.experts)
            self.weights = np.empty((n, family.top_k), np.float32)
        self._notify_begin(layer)
        self.attended = np.empty_like(self.hidden)

    def _attend(self, layer: int, rows: slice) -> None:
        if self.unwanted():
            self._interrupt(layer)
        attention, position = self.placement.attention, self.step.position + rows.start
        with Operator(self.parts.log, Kind.ATTENTION, layer, rows.stop - rows.start, self.parts.attention_from(layer)):
            self.attended[rows] = attention.run(layer, self.hidden[rows], self.sequence, position)

    def _interrupt(self, layer: int) -> NoReturn:
        """End the step; another thread may still run experts of this layer."""
        if layer not in self.parts.family.dense:
            self.work.settle()
        raise InterruptedStepError("this step was interrupted: its answer is not wanted any more")

    def _route(self, layer: int, rows: slice) -> None:
        attended, log = self.attended[rows], self.parts.log
        n = len(attended)
        with Operator(log, Kind.ROUTER, layer, n, made_from(Kind.ROUTER, layer)):
            normed, chosen, weights = self.parts.mixers[layer].run({"hidden": attended}, n)
            experts = chosen.astype(np.uint16)
            probes.route(layer, n, self.parts.family.top_k, experts, weights)
        log.route(self.step.seq, layer, experts, weights)
        self.weights[rows] = weights
        self._notify_routed(layer, attended, chosen)
        self.parts.experts.dispatch(self.work, self.placement.experts, rows.start, normed, chosen)

    def _run_mlp(self, layer: int) -> None:
        n = len(self.hidden)
        with Operator(self.parts.log, Kind.MLP, layer, n, made_from(Kind.MLP, layer)):
            self.hidden = self.parts.mixers[layer].run({"hidden": self.attended}, n)[0]

    def _run_shared(self, layer: int) -> None:
        finished, graph, n = self.parts.family.FINISHED, self.parts.shared[layer], len(self.hidden)
        self.common = None
        if graph is not None:
            with Operator(self.parts.log, Kind.MLP, layer, n, made_from(Kind.MLP, layer, shared=True, finished=finished)):
                self.common = graph.run({"rows": self.attended if finished else self.work.normed}, n)[0]

    def _run_experts(self, layer: int) -> None:
        self.parts.experts.finish(self.work, self.placement.experts)

    def _combine(self, layer: int) -> None:
        log, norms, common, n = self.parts.log, self.parts.norms[layer], self.common, len(self.hidden)
        used, multiplier = tuple(sorted(self.work.used)), self.parts.family.residual_multiplier
        origin = made_from(Kind.COMBINE, layer, used=used, shared=common is not None, finished=norms is not None)
        with Operator(log, Kind.COMBINE, layer, n, origin):
            if norms is None:
                self.hidden = combine_experts(self.weights, self.work.outputs, common, multiplier, self.attended)
                return
            routed = combine_experts(self.weights, self.work.outputs, None, 1.0, np.zeros_like(self.attended))
        with Operator(log, Kind.NORM, layer, n, made_from(Kind.NORM, layer)):
            given = {} if common is None else {"common": common}
            self.hidden = norms.run({"hidden": self.attended, "routed": routed} | given, n)[0]
