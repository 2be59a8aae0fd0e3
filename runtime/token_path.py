"""One decoded token through all layers on the CPU: every buffer and binding stands before the token comes.

A small graph costs as much to call as to run, so nothing is allocated, converted or looked up between two graphs.
"""

import numpy as np
import onnxruntime as ort

from runtime import probes
from runtime.attention import FusedAttention, LatentAttention, Sequence
from runtime.experts import Experts
from runtime.graph import Backend, Binding, Graph, shared
from runtime.log import RunLog
from runtime.models import Family
from runtime.operators import Operator, made_from
from runtime.probes import Kind
from runtime.routing import Listener


class TokenPath:
    """Buffers of one row and the graphs bound to them. `mixers`: router graphs, or the MLPs of dense layers."""

    def __init__(
        self,
        family: Family,
        log: RunLog,
        experts: Experts,
        backend: Backend,
        attention: FusedAttention | LatentAttention,
        mixers: list[Graph],
        shared_experts: list[Graph | None],
        listeners: list[Listener],
    ):
        self.family, self.log, self.experts, self.backend, self.attention = family, log, experts, backend, attention
        self._mixers, self._shared, self._listeners = mixers, shared_experts, listeners
        hidden, top_k = family.hidden, family.top_k
        self.hidden, self.hidden_value = _buffer((1, hidden))
        self._attended, self._attended_value = _buffer((1, hidden))
        self._normed, self._normed_value = _buffer((1, hidden))
        self._chosen, self._chosen_value = _buffer((1, top_k), np.int64)
        self._weights, self._weights_value = _buffer((1, top_k))
        self._common, self._common_value = _buffer((1, hidden))
        self._outputs = np.zeros((top_k, hidden), np.float32)
        self._output_values = [shared(self._outputs[i : i + 1]) for i in range(top_k)]
        self._mixer_bindings = [self._bind_mixer(layer) for layer in range(family.layers)]
        self._shared_bindings = [self._bind_shared(graph) for graph in shared_experts]

    def run(self, sequence: Sequence, embedded: np.ndarray, seq: int) -> np.ndarray:
        """Hidden [1, H] behind the last layer."""
        self.hidden[...] = embedded
        self.attention.move_to(sequence, sequence.length + 1)
        for layer in range(self.family.layers):
            dense = self.family.dense
            self.experts.cache.begin_event()
            for listener in self._listeners:
                listener.layer_begins(layer, self.hidden)
            with Operator(self.log, Kind.ATTENTION, layer, 1, made_from(Kind.ATTENTION, layer, after_dense=layer - 1 in dense)):
                self.attention.run_into(layer, self.hidden_value, self._attended_value, 1)
            if layer in dense:
                self._dense(layer)
            else:
                self._routed(layer, seq)
        return self.hidden

    def _dense(self, layer: int) -> None:
        with Operator(self.log, Kind.MLP, layer, 1, made_from(Kind.MLP, layer)):
            self._mixers[layer].run_bound(self._mixer_bindings[layer], 1)

    def _routed(self, layer: int, seq: int) -> None:
        with Operator(self.log, Kind.ROUTER, layer, 1, made_from(Kind.ROUTER, layer)):
            self._mixers[layer].run_bound(self._mixer_bindings[layer], 1)
            chosen, weights = self._chosen.astype(np.uint16), self._weights.copy()
            probes.route(layer, 1, self.family.top_k, chosen, weights)
        self.log.route(seq, layer, chosen, weights)
        for listener in self._listeners:
            listener.routed(layer, self._attended, self._chosen)
        graph, binding, origin = self._shared[layer], self._shared_bindings[layer], made_from(Kind.DISPATCH, layer)
        with Operator(self.log, Kind.DISPATCH, layer, 1, origin):
            used = self._chosen[0].tolist()
            # Before the shared expert runs: loads overlap it.
            forms = self.experts.send_for(layer, self.backend, used)
        if graph and binding:
            with Operator(self.log, Kind.MLP, layer, 1, made_from(Kind.MLP, layer, shared=True)):
                graph.run_bound(binding, 1)
        self.experts.run_token(forms, self._normed_value, self._output_values)
        origin = made_from(Kind.COMBINE, layer, used=tuple(sorted(used)), shared=graph is not None)
        with Operator(self.log, Kind.COMBINE, layer, 1, origin):
            self._combine(graph is not None)

    def _combine(self, common: bool) -> None:
        """Residual plus the experts' outputs by router weight, plus the shared expert's."""
        mixed = self._weights @ self._outputs
        if common:
            mixed += self._common
        if self.family.residual_multiplier != 1:
            mixed *= np.float32(self.family.residual_multiplier)
        np.add(self._attended, mixed, out=self.hidden)

    def _bind_mixer(self, layer: int) -> Binding:
        session, inputs = self._mixers[layer].session, {"hidden": self._attended_value}
        if layer in self.family.dense:
            return Binding(session, inputs, {"hidden_out": self.hidden_value})
        outputs = {"normed": self._normed_value, "experts": self._chosen_value, "weights": self._weights_value}
        return Binding(session, inputs, outputs)

    def _bind_shared(self, graph: Graph | None) -> Binding | None:
        return Binding(graph.session, {"rows": self._normed_value}, {"out": self._common_value}) if graph else None


def _buffer(shape: tuple[int, ...], dtype: type = np.float32) -> tuple[np.ndarray, ort.OrtValue]:
    array: np.ndarray = np.zeros(shape, dtype)
    return array, shared(array)
