"""One decoded token through all layers on the CPU: every buffer, binding and call stands before the token comes.

A small graph costs as much to call as to run, so graphs that need nothing in between run in one go (runtime.calls).
"""

from typing import Any

import numpy as np
import onnxruntime as ort

from runtime import probes
from runtime.attention import FusedAttention, LatentAttention, Sequence
from runtime.calls import NO_EXPERT, Told, TokenRun, prepare
from runtime.experts import Experts
from runtime.graph import Binding, Graph, shared
from runtime.log import RunLog
from runtime.models import Family
from runtime.operators import Operator, made_from
from runtime.probes import Kind, result_id
from runtime.routing import Listener


class TokenPath:
    """Buffers of one row and the graphs bound to them. `mixers`: router graphs, or the MLPs of dense layers."""

    def __init__(
        self,
        family: Family,
        log: RunLog,
        experts: Experts,
        attention: FusedAttention | LatentAttention,
        mixers: list[Graph],
        shared_experts: list[Graph | None],
        listeners: list[Listener],
    ):
        self.family, self.log, self.experts, self.attention = family, log, experts, attention
        self._mixers, self._shared, self._listeners = mixers, shared_experts, listeners
        hidden, top_k, layers = family.hidden, family.top_k, family.layers
        self.hidden, self.hidden_value = _buffer((1, hidden))
        self._attended, self._attended_value = _buffer((1, hidden))
        self._normed, self._normed_value = _buffer((1, hidden))
        self._common, self._common_value = _buffer((1, hidden))
        self._chosen, self._weights = np.zeros((layers, 1, top_k), np.int64), np.zeros((layers, 1, top_k), np.float32)
        self._rows = np.zeros((family.experts, hidden), np.float32)
        self._row_values = [shared(row[None]) for row in self._rows]
        self._outputs = np.zeros((top_k, hidden), np.float32)
        self._run = TokenRun(log, layers * (3 + top_k))
        self._of: Sequence | None = None
        # Per layer, what runs before the router's choice is known: calls, and what is told of them.
        self._first: list[tuple[list[Any], list[Told], list[int]]] = []
        self._bindings = [self._bind_mixer(layer) for layer in range(layers)]
        self._mixer_calls = [self._mixer_call(layer) for layer in range(layers)]
        self._prepare_shared()
        self._routed_layers = [layer for layer in range(layers) if layer not in family.dense]
        self._dispatches = [Operator(log, Kind.DISPATCH, layer, 1, made_from(Kind.DISPATCH, layer)) for layer in range(layers)]
        self._combines = [Operator(log, Kind.COMBINE, layer, 1, b"") for layer in range(layers)]
        self._combined = [made_from(Kind.COMBINE, layer, shared=shared_experts[layer] is not None) for layer in range(layers)]
        experts_of = range(family.experts)
        self._results = [[probes.sources(result_id(Kind.EXPERT, layer, e)) for e in experts_of] for layer in range(layers)]

    def run(self, sequence: Sequence, embedded: np.ndarray, seq: int) -> np.ndarray:
        """Hidden [1, H] behind the last layer."""
        self.hidden[...] = embedded
        self.attention.move_to(sequence, sequence.length + 1)
        if self._of is not sequence:
            self._prepare(sequence)
        try:
            for layer, first in enumerate(self._first):
                self._layer(layer, first)
        finally:
            self._run.account()
        chosen, weights = self._chosen.astype(np.uint16), self._weights.copy()
        for layer in self._routed_layers:
            self.log.route(seq, layer, chosen[layer], weights[layer])
        return self.hidden

    def _layer(self, layer: int, first: tuple[list[Any], list[Told], list[int]]) -> None:
        self.experts.cache.begin_event()
        for listener in self._listeners:
            listener.layer_begins(layer, self.hidden)
        if isinstance(self.attention, LatentAttention):
            origin = made_from(Kind.ATTENTION, layer, after_dense=layer - 1 in self.family.dense)
            with Operator(self.log, Kind.ATTENTION, layer, 1, origin):
                self.attention.run_into(layer, self.hidden_value, self._attended_value, 1)
        self._run.run(*first)
        if layer not in self.family.dense:
            self._routed(layer)

    def _routed(self, layer: int) -> None:
        for listener in self._listeners:
            listener.routed(layer, self._attended, self._chosen[layer])
        with self._dispatches[layer]:
            used = self._chosen[layer, 0].tolist()
            # Before the shared expert runs: loads overlap it.
            forms = self.experts.send_for(layer, used)
        common = self._shared[layer]
        self.experts.run_token(self._run, common, forms, self._normed_value, self._row_values)
        results, combine = self._results[layer], self._combines[layer]
        combine.made_from = self._combined[layer] + b"".join([results[expert] for expert in sorted(used)])
        with combine:
            self._combine(layer, common is not None)

    def _combine(self, layer: int, common: bool) -> None:
        """Residual plus the experts' outputs by router weight, plus the shared expert's."""
        # Experts are a valid choice: `clip` only spares a copy.
        self._rows.take(self._chosen[layer, 0], 0, self._outputs, "clip")
        mixed = self._weights[layer] @ self._outputs
        if common:
            mixed += self._common
        if self.family.residual_multiplier != 1:
            mixed *= np.float32(self.family.residual_multiplier)
        np.add(self._attended, mixed, out=self.hidden)

    def _prepare(self, sequence: Sequence) -> None:
        """Bind attention to the sequence's memory, where it can be."""
        self._of = sequence
        self._attentions, self._first = [], []
        for layer, (mixer, call) in enumerate(zip(self._mixers, self._mixer_calls, strict=True)):
            calls, told = [call], [mixer.told]
            if isinstance(self.attention, FusedAttention):
                binding, graph = self.attention.bind(layer, sequence), self.attention.graphs[layer]
                binding.input("hidden", self.hidden_value)
                binding.output("hidden_out", self._attended_value)
                origin = made_from(Kind.ATTENTION, layer, after_dense=layer - 1 in self.family.dense)
                calls, told = [prepare(graph, binding, origin), call], [graph.told, mixer.told]
                self._attentions.append(binding)
            self._first.append((calls, told, [NO_EXPERT] * len(calls)))

    def _bind_mixer(self, layer: int) -> Binding:
        session, inputs = self._mixers[layer].session, {"hidden": self._attended_value}
        if layer in self.family.dense:
            return Binding(session, inputs, {"hidden_out": self.hidden_value})
        chosen, weights = shared(self._chosen[layer]), shared(self._weights[layer])
        return Binding(session, inputs, {"normed": self._normed_value, "experts": chosen, "weights": weights})

    def _mixer_call(self, layer: int) -> Any:
        graph, binding = self._mixers[layer], self._bindings[layer]
        origin = made_from(graph.kind, layer)
        choice = () if layer in self.family.dense else (self._chosen[layer], self._weights[layer])
        return prepare(graph, binding, origin, *choice)

    def _prepare_shared(self) -> None:
        for layer, graph in enumerate(self._shared):
            if graph:
                binding = Binding(graph.session, {"rows": self._normed_value}, {"out": self._common_value})
                self._bindings.append(binding)
                graph.call = prepare(graph, binding, made_from(Kind.MLP, layer, shared=True))


def _buffer(shape: tuple[int, ...], dtype: type = np.float32) -> tuple[np.ndarray, ort.OrtValue]:
    array: np.ndarray = np.zeros(shape, dtype)
    return array, shared(array)
