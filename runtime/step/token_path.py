"""Runs a decoded token through all layers on the CPU, with every buffer, binding and call prepared in advance.

Calling a small graph costs as much as running it, so consecutive graphs run in one call (runtime.backends.calls).
"""

from typing import Any

import numpy as np
import onnxruntime as ort

from runtime.backends.calls import Combine, Item, LogEntry, TokenItems, TokenRun, operator_call, prepare_call
from runtime.backends.graph import Binding, Graph, to_ort
from runtime.backends.operators import Operator, last_kind, made_from
from runtime.cache_rules.forms import Cache
from runtime.experts.routing import Listener
from runtime.experts.run import Experts
from runtime.models import Family
from runtime.models.rope import Rope
from runtime.step.attention import FusedAttention, LatentAttention, Sequence
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind, result_id


class TokenPath:
    """Buffers of one row and the graphs bound to them. `mixers`: router graphs, or the MLPs of dense layers; `norms`: the graphs
    at the end of a layer, if any.
    """

    def __init__(
        self,
        family: Family,
        log: RunLog,
        experts: Experts,
        attention: FusedAttention | LatentAttention,
        mixers: list[Graph],
        shared_experts: list[Graph | None],
        norms: list[Graph | None],
        listeners: list[Listener],
    ):
        self.family, self.log, self.experts, self.attention = family, log, experts, attention
        self._mixers, self._shared, self._norms, self._listeners = mixers, shared_experts, norms, listeners
        hidden, top_k, layers = family.hidden, family.top_k, family.layers
        self.hidden, self.hidden_value = _shared_buffer((1, hidden))
        self._attended, self._attended_value = _shared_buffer((1, hidden))
        self._normed, self._normed_value = _shared_buffer((1, hidden))
        self._common, self._common_value = _shared_buffer((1, hidden))
        self._routed_sum, self._routed_value = _shared_buffer((1, hidden))
        self._chosen, self._weights = np.zeros((layers, 1, top_k), np.int64), np.zeros((layers, 1, top_k), np.float32)
        self._rows = np.zeros((family.experts, hidden), np.float32)
        self._row_values = [to_ort(row[None]) for row in self._rows]
        self._token = TokenRun(log, layers * (6 + top_k))
        self._bound_to: tuple[Sequence, Rope] | None = None
        self._bindings = [self._bind_mixer(layer) for layer in range(layers)]
        self._attentions: list[Binding] = []
        self._first: list[list[Item]] = []  # per layer, the items that run before the router's choice is known
        self._whole: TokenItems | None = None  # all layers' items, if nothing waits for a choice
        self._last = [self._mixer_item(layer) for layer in range(layers)]
        self._prepare_shared()
        self._routed_layers = family.routed
        self._dispatches = [Operator(log, Kind.DISPATCH, layer, 1, made_from(Kind.DISPATCH, layer)) for layer in range(layers)]
        self._ends = [self._end_items(layer) for layer in range(layers)]
        stay = range(layers) if experts.cache.budget is None else ()
        self._staying = {layer: self._staying_items(layer) for layer in stay}

    def run(self, sequence: Sequence, embedded: np.ndarray, seq: int) -> np.ndarray:
        """Hidden [1, H] after the last layer."""
        self.hidden[...] = embedded
        self.attention.move_to(sequence, sequence.length + 1)
        if self._bound_to != (sequence, sequence.rope):
            self._prepare(sequence)
        try:
            if self._whole and not self._listeners:
                self.experts.cache.all_hit(self.family.top_k, len(self._routed_layers))
                self._token.run_all(self._whole)
            else:
                for layer in range(self.family.layers):
                    self._layer(layer)
                self._token.flush()
        finally:
            self._token.account()
        chosen, weights = self._chosen.astype(np.uint16), self._weights.copy()
        for layer in self._routed_layers:
            self.log.route(seq, layer, chosen[layer], weights[layer])
        return self.hidden

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's memory."""
        if self._bound_to and self._bound_to[0] is sequence:
            self._bound_to, self._attentions, self._first, self._whole = None, [], [], None

    def _layer(self, layer: int) -> None:
        if self._listeners or isinstance(self.attention, LatentAttention):
            self._token.flush()
        routed = layer not in self.family.dense
        stays = routed and not self._listeners and layer in self._staying
        if stays:
            self.experts.cache.all_hit(self.family.top_k)
        else:
            self.experts.cache.begin_event()
        for listener in self._listeners:
            listener.layer_begins(layer, self.hidden)
        if isinstance(self.attention, LatentAttention):
            with Operator(self.log, Kind.ATTENTION, layer, 1, self._attention_from(layer)):
                self.attention.run_into(layer, self.hidden_value, self._attended_value, 1)
        for item in self._first[layer]:
            self._token.put(item)
        if stays:
            for item in self._staying[layer]:
                self._token.put(item, Cache.HIT)
        elif routed:
            self._token.flush()
            self._routed(layer)

    def _routed(self, layer: int) -> None:
        for listener in self._listeners:
            listener.routed(layer, self._attended, self._chosen[layer])
        with self._dispatches[layer]:
            # Before the shared expert runs, so that loads overlap it.
            forms = self.experts.request_experts(layer, self._chosen[layer, 0].tolist())
        self.experts.run_token(self._token, self._shared[layer], forms, self._normed_value, self._row_values)
        for item in self._ends[layer]:
            self._token.put(item)

    def _prepare(self, sequence: Sequence) -> None:
        """Bind attention to the sequence's memory, if the attention supports it."""
        self._bound_to, self._attentions = (sequence, sequence.rope), []
        if not isinstance(self.attention, FusedAttention):
            self._first = [[item] for item in self._last]
            return
        self._first = []
        for layer, item in enumerate(self._last):
            binding, graph = self.attention.bind(layer, sequence), self.attention.graphs[layer]
            binding.input("hidden", self.hidden_value)
            binding.output("hidden_out", self._attended_value)
            self._attentions.append(binding)
            self._first.append([prepare_call(graph, binding, self._attention_from(layer)), item])
        if self._staying:
            self._whole = TokenItems([pair for layer in range(self.family.layers) for pair in self._items(layer)])

    def _items(self, layer: int) -> list[tuple[Item, int]]:
        """A layer's items and the cache states of their experts, if every expert stays in memory."""
        first = [(item, 0) for item in self._first[layer]]
        return first if layer in self.family.dense else first + [(item, Cache.HIT) for item in self._staying[layer]]

    def _attention_from(self, layer: int) -> bytes:
        return made_from(Kind.ATTENTION, layer, before=last_kind(self.family, layer - 1))

    def _bind_mixer(self, layer: int) -> Binding:
        session, inputs = self._mixers[layer].session, {"hidden": self._attended_value}
        if layer in self.family.dense:
            return Binding(session, inputs, {"hidden_out": self.hidden_value})
        chosen, weights = to_ort(self._chosen[layer]), to_ort(self._weights[layer])
        return Binding(session, inputs, {"normed": self._normed_value, "experts": chosen, "weights": weights})

    def _mixer_item(self, layer: int) -> Item:
        graph, binding = self._mixers[layer], self._bindings[layer]
        choice = () if layer in self.family.dense else (self._chosen[layer], self._weights[layer])
        return prepare_call(graph, binding, made_from(graph.kind, layer), *choice)

    def _prepare_shared(self) -> None:
        finished = self.family.FINISHED
        rows = self._attended_value if finished else self._normed_value
        for layer, graph in enumerate(self._shared):
            if graph:
                binding = Binding(graph.session, {"rows": rows}, {"out": self._common_value})
                self._bindings.append(binding)
                graph.item = prepare_call(graph, binding, made_from(Kind.MLP, layer, shared=True, finished=finished))

    def _staying_items(self, layer: int) -> list[Item]:
        """The items after the router if every expert stays in memory, so that nothing waits for its choice."""
        dispatch, common = operator_call(Kind.DISPATCH, layer, made_from(Kind.DISPATCH, layer)), self._shared[layer]
        experts = self.experts.choices(layer, self._chosen[layer, 0], self._normed_value, self._row_values)
        return [dispatch, *([common.item] if common else []), *experts, *self._ends[layer]]

    def _end_items(self, layer: int) -> list[Item]:
        """The sum, and the norms after it if the family has them."""
        norms = self._norms[layer]
        if norms is None:
            common = self._common[0] if self._shared[layer] else None
            return [self._combine_item(layer, common, self.family.residual_multiplier, self._attended[0], self.hidden[0])]
        inputs = {"hidden": self._attended_value, "common": self._common_value, "routed": self._routed_value}
        binding = Binding(norms.session, inputs, {"hidden_out": self.hidden_value})
        self._bindings.append(binding)
        summed = self._combine_item(layer, None, 1.0, np.zeros_like(self.hidden[0]), self._routed_sum[0])
        return [summed, prepare_call(norms, binding, made_from(Kind.NORM, layer))]

    def _combine_item(self, layer: int, common: np.ndarray | None, *further: Any) -> Item:
        sources = made_from(Kind.COMBINE, layer, shared=common is not None, finished=self.family.FINISHED)
        results = probes.pack_sources(*(result_id(Kind.EXPERT, layer, expert) for expert in range(self.family.experts)))
        choice = self._chosen[layer, 0], self._weights[layer, 0]
        work = Combine(result_id(Kind.COMBINE, layer), sources, results, *choice, self._rows, common, *further)
        return Item(work, LogEntry(Kind.COMBINE, layer, -1, None))


def _shared_buffer(shape: tuple[int, ...]) -> tuple[np.ndarray, ort.OrtValue]:
    array: np.ndarray = np.zeros(shape, np.float32)
    return array, to_ort(array)
