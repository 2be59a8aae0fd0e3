"""Runs a decoded token through all layers on the CPU, with every buffer, binding and call prepared in advance.

Calling a small graph costs as much as running it, so consecutive graphs run in one call (runtime.backends.calls).
"""

from typing import Any

import numpy as np
import onnxruntime as ort

from runtime.backends.calls import Combine, Item, LogEntry, TokenItems, TokenRun, operator_call, prepare_call
from runtime.backends.graph import Binding, to_ort
from runtime.backends.operators import Operator, made_from
from runtime.cache_rules.forms import Cache
from runtime.experts.predictor import Predictor
from runtime.experts.slots import SlotCache, prepared
from runtime.models.rope import Rope
from runtime.step.attention import FusedAttention, LatentAttention, Sequence
from runtime.step.layers import LayerLoop, Parts
from runtime.telemetry import probes
from runtime.telemetry.probes import Kind, result_id

ONE_ROW = (slice(0, 1),)


class TokenPath(LayerLoop):
    """Buffers of one row and the graphs bound to them.

    The loop's items are the same for each token, and are collected once: which expert an item runs is decided in the extension.
    `slots`: the expert cache, None if every expert stays in memory; `beside`: see SlotCache. `predicts`: whether what layers
    choose can be predicted here, by `predictor`.
    """

    def __init__(self, parts: Parts, attention: FusedAttention | LatentAttention, beside: bool, predictor: Predictor | None):
        family = parts.family
        hidden, top_k, layers = family.hidden, family.top_k, family.layers
        own, self.hidden_value = _shared_buffer((1, hidden))
        super().__init__(parts, own)
        self.family, self.log, self.experts, self.attention = family, parts.log, parts.experts, attention
        self._attended, self._attended_value = _shared_buffer((1, hidden))
        self._normed, self._normed_value = _shared_buffer((1, hidden))
        self._common, self._common_value = _shared_buffer((1, hidden))
        self._routed_sum, self._routed_value = _shared_buffer((1, hidden))
        self._chosen, self._weights = np.zeros((layers, 1, top_k), np.int64), np.zeros((layers, 1, top_k), np.float32)
        self._choice = [chosen[0] for chosen in self._chosen]  # per layer [k]; indexing an array costs more than a list
        self._rows = np.zeros((family.experts, hidden), np.float32)
        self._row_values = [to_ort(row[None]) for row in self._rows]
        self._token = TokenRun(self.log, layers * (8 + top_k))
        self._bound_to: tuple[Sequence, Rope] | None = None
        self._bindings = [self._bind_mixer(layer) for layer in range(layers)]
        self._attentions: list[tuple[Binding, Item]] = []  # by layer, if attention can be bound in advance
        self._whole: TokenItems | None = None  # all layers' items, if nothing waits for a choice
        self._mixer_items = [self._mixer_item(layer) for layer in range(layers)]
        self._prepare_shared()
        self._routed_layers = family.routed
        self._ends = [self._end_items(layer) for layer in range(layers)]
        sources = [made_from(Kind.DISPATCH, layer) for layer in range(layers)]
        self.slots: SlotCache | None = None
        self._dispatch_items: dict[int, Item] = {}
        self._choices: dict[int, list[Item]] = {}
        row, outputs, cpu = self._normed_value, self._row_values, self.experts.cpu
        if self.experts.cache.budget is not None and cpu is not None:
            self.slots = SlotCache(self.experts.cache, cpu, self.log, row, self._rows, beside)
        for layer in self._routed_layers:
            if self.slots:
                self._dispatch_items[layer], self._choices[layer] = self.slots.items(layer, self._choice[layer], sources[layer])
            else:
                self._dispatch_items[layer] = operator_call(Kind.DISPATCH, layer, sources[layer])
                self._choices[layer] = self.experts.choices(layer, self._choice[layer], row, outputs)

        self._predictions = self._predict(predictor) if self.slots and predictor else {}
        self.predicts = bool(self._predictions)

    def _predict(self, predictor: Predictor) -> dict[tuple[int, bool], Item]:
        """By layer, and whether made as it begins: the prediction of its choice; empty unless all layers have one."""
        assert self.slots
        items: dict[tuple[int, bool], Item] = {}
        top_k, multiplier = self.family.top_k, self.family.residual_multiplier
        for layer in self._routed_layers:
            predicted = predictor.linear(layer)
            if predicted is None:
                return {}
            given = prepared(*predicted)
            items[layer, True] = self.slots.foresee(layer, True, top_k, given, 1.0, self.hidden[0], None, None, None)
            if layer - 1 in self._routed_layers:
                read = self._attended[0], *self._added(layer - 1)
                items[layer, False] = self.slots.foresee(layer, False, top_k, given, multiplier, *read)
        return items

    def _added(self, layer: int) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """(row of the shared expert, choice, weights): what a layer adds to its state; nothing if that is normed before."""
        if self.parts.norms[layer]:
            return None, None, None
        return self._common[0] if self.parts.shared[layer] else None, self._choice[layer], self._weights[layer, 0]

    def run(self, sequence: Sequence, embedded: np.ndarray, seq: int) -> np.ndarray:
        """Hidden [1, H] after the last layer."""
        self.hidden[...] = embedded
        self.attention.move_to(sequence, sequence.length + 1)
        if self._bound_to != (sequence, sequence.rope):
            self._prepare(sequence)
        try:
            self._run()
        finally:
            self._token.account()
            if self.slots:
                self.slots.account()
        chosen, weights = self._chosen.astype(np.uint16), self._weights.copy()
        for layer in self._routed_layers:
            self.log.route(seq, layer, chosen[layer], weights[layer])
        return self.hidden

    def _run(self) -> None:
        if not self.slots:
            self.experts.cache.all_hit(self.family.top_k, len(self._routed_layers))
        if self.parts.listeners or not self._attentions:
            self.run_layers(ONE_ROW)
            self._token.flush()
            return
        if self._whole is None:
            self.run_layers(ONE_ROW)
            self._whole = self._token.take_waiting()
        self._token.run_all(self._whole)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's memory."""
        if self._bound_to and self._bound_to[0] is sequence:
            self._bound_to, self._attentions, self._whole = None, [], None

    def _begin(self, layer: int) -> None:
        if self.parts.listeners or not self._attentions:
            self._token.flush()
        self._notify_begin(layer)
        self._put_prediction(layer, near=True)

    def _put_prediction(self, layer: int, near: bool) -> None:
        if item := self._predictions.get((layer, near)):
            self._token.put(item)

    def _attend(self, layer: int, rows: slice) -> None:
        if self._attentions:
            self._token.put(self._attentions[layer][1])
            return
        with Operator(self.log, Kind.ATTENTION, layer, 1, self.parts.attention_from(layer)):
            self.attention.run_into(layer, self.hidden_value, self._attended_value, 1)

    def _route(self, layer: int, rows: slice) -> None:
        self._token.put(self._mixer_items[layer])
        # Before the shared expert runs, so that loads overlap it.
        self._token.put(self._dispatch_items[layer])
        self._put_prediction(layer + 1, near=False)
        if self.parts.listeners:
            self._token.flush()
            self._notify_routed(layer, self._attended, self._chosen[layer])

    def _run_mlp(self, layer: int) -> None:
        self._token.put(self._mixer_items[layer])

    def _run_shared(self, layer: int) -> None:
        if common := self.parts.shared[layer]:
            self._token.put(common.item)

    def _run_experts(self, layer: int) -> None:
        for item in self._choices[layer]:
            self._token.put(item, Cache.HIT)

    def _combine(self, layer: int) -> None:
        for item in self._ends[layer]:
            self._token.put(item)

    def _prepare(self, sequence: Sequence) -> None:
        """Bind attention to the sequence's memory, if the attention supports it."""
        self._bound_to, self._attentions, self._whole = (sequence, sequence.rope), [], None
        if isinstance(self.attention, FusedAttention):
            self._attentions = [self._bind_attention(self.attention, layer, sequence) for layer in range(self.family.layers)]

    def _bind_attention(self, attention: FusedAttention, layer: int, sequence: Sequence) -> tuple[Binding, Item]:
        binding = attention.bind(layer, sequence)
        binding.input("hidden", self.hidden_value)
        binding.output("hidden_out", self._attended_value)
        return binding, prepare_call(attention.graphs[layer], binding, self.parts.attention_from(layer))

    def _bind_mixer(self, layer: int) -> Binding:
        session, inputs = self.parts.mixers[layer].session, {"hidden": self._attended_value}
        if layer in self.family.dense:
            return Binding(session, inputs, {"hidden_out": self.hidden_value})
        chosen, weights = to_ort(self._chosen[layer]), to_ort(self._weights[layer])
        return Binding(session, inputs, {"normed": self._normed_value, "experts": chosen, "weights": weights})

    def _mixer_item(self, layer: int) -> Item:
        graph, binding = self.parts.mixers[layer], self._bindings[layer]
        choice = () if layer in self.family.dense else (self._chosen[layer], self._weights[layer])
        return prepare_call(graph, binding, made_from(graph.kind, layer), *choice)

    def _prepare_shared(self) -> None:
        finished = self.family.FINISHED
        rows = self._attended_value if finished else self._normed_value
        for layer, graph in enumerate(self.parts.shared):
            if graph:
                binding = Binding(graph.session, {"rows": rows}, {"out": self._common_value})
                self._bindings.append(binding)
                graph.item = prepare_call(graph, binding, made_from(Kind.MLP, layer, shared=True, finished=finished))

    def _end_items(self, layer: int) -> list[Item]:
        """The sum, and the norms after it if the family has them."""
        norms = self.parts.norms[layer]
        if norms is None:
            common = self._common[0] if self.parts.shared[layer] else None
            return [self._combine_item(layer, common, self.family.residual_multiplier, self._attended[0], self.hidden[0])]
        inputs = {"hidden": self._attended_value, "routed": self._routed_value}
        inputs |= {"common": self._common_value} if self.parts.shared[layer] else {}
        binding = Binding(norms.session, inputs, {"hidden_out": self.hidden_value})
        self._bindings.append(binding)
        summed = self._combine_item(layer, None, 1.0, np.zeros_like(self.hidden[0]), self._routed_sum[0])
        return [summed, prepare_call(norms, binding, made_from(Kind.NORM, layer))]

    def _combine_item(self, layer: int, common: np.ndarray | None, *further: Any) -> Item:
        sources = made_from(Kind.COMBINE, layer, shared=common is not None, finished=self.family.FINISHED)
        results = probes.pack_sources(*(result_id(Kind.EXPERT, layer, expert) for expert in range(self.family.experts)))
        choice = self._choice[layer], self._weights[layer, 0]
        work = Combine(result_id(Kind.COMBINE, layer), sources, results, *choice, self._rows, common, *further)
        return Item(work, LogEntry(Kind.COMBINE, layer, -1, None))


def _shared_buffer(shape: tuple[int, ...]) -> tuple[np.ndarray, ort.OrtValue]:
    array: np.ndarray = np.zeros(shape, np.float32)
    return array, to_ort(array)
