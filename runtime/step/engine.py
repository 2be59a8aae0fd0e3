"""The engine: forward steps over subgraphs, layer by layer, each phase on its backend."""

from dataclasses import dataclass
from itertools import takewhile
from time import monotonic_ns

import numpy as np

from runtime.backends.calls import combine_experts
from runtime.backends.cpu import CpuBackend
from runtime.backends.graph import Backend, Graph
from runtime.backends.kv_cache import TYPES, Scales
from runtime.backends.operators import Operator, last_kind, made_from
from runtime.cache_rules.batches import slice_chunks
from runtime.cache_rules.forms import CPU, HTP
from runtime.cache_rules.rule import LARGE_EXPERT
from runtime.errors import RequestError
from runtime.experts.predictor import Predictor, predictor_path
from runtime.experts.prefetch import Prefetcher
from runtime.experts.routing import Listener
from runtime.experts.run import Experts, LayerWork
from runtime.experts.trial import Prefetching, Trial
from runtime.package.layout import Package, layer_name
from runtime.placement.costs import CostTable, Flush, FlushByCost
from runtime.placement.options import AUTO, PLACED, Options, parse_placement
from runtime.step.attention import Attention, PortableAttention, Sequence, make_attention, past_tier
from runtime.step.sampling import Sampler
from runtime.step.token_path import TokenPath
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog, Step
from runtime.telemetry.probes import Kind, Phase
from runtime.telemetry.profile import QNN, Timers


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


class Engine:
    """A model ready to step. One sequence at a time."""

    def __init__(
        self, package: Package, options: Options, log: RunLog, costs: CostTable | None = None, kv_scales: Scales | None = None
    ):
        self.package, self.options, self.log, self.family = package, options, log, package.family
        self.kv_scales = kv_scales
        self.backends = make_backends(package, options, log.timers)
        self._attentions: dict[tuple[int, int], Attention] = {}
        self.listeners: list[Listener] = []
        self.placements = {
            Phase.PREFILL: self._placement(parse_placement(options.prefill_backend), options.chunk),
            Phase.DECODE: self._placement(parse_placement(options.decode_backend), 1),
        }
        used = {p.experts.id: p.experts for p in self.placements.values()}
        flush = FlushByCost(costs, options.tiers, options.expert_cache is not None) if costs else Flush(options.tiers)
        if HTP in used and flush.uses_cpu:
            used[CPU] = self.backends[CPU]
        unwanted = no_prefetch(package, options)
        predictor = None if unwanted else Predictor.of(package)
        log.prefetching = (
            f"off: {unwanted}" if unwanted and (options.expert_cache is not None or options.prefetch == "on") else ""
        )
        beside = loads_in_background(package, options)
        background = beside or predictor is not None
        self.experts = Experts(package, used, options.expert_cache, log, options.cache_policy, background, flush)
        self._table = package.embedding()
        self._head = self._graph("head", Kind.HEAD, -1)
        self._mixers, self._shared, self._norms = self._make_mixers()
        self._tokens = self._token_path()
        self._prefetching: Prefetching | None = None
        if predictor:
            cache, trial = self.experts.cache, Trial() if options.prefetch == AUTO else None
            log.prefetching = trial.reason if trial else "on: as requested"
            prefetcher = Prefetcher(predictor, cache, self.family, CPU)
            self._prefetching = Prefetching(prefetcher, cache, self.listeners, log, trial, beside)
        if options.expert_cache is None:
            self.experts.preload(self.placements[Phase.DECODE].experts)

    def begin_sequence(self, tokens: int) -> Sequence:
        """An empty sequence with room for `tokens`, and the attention graphs it needs."""
        if tokens > self.family.context:
            raise RequestError(f"{tokens} tokens exceed the model's context of {self.family.context}: use fewer")
        sequence = Sequence(self.family, self._room(tokens), TYPES[self.options.kv_bits], self.kv_scales)
        self.log.kv_bytes = max(self.log.kv_bytes, sequence.bytes)
        for placement in self.placements.values():
            placement.attention.prepare(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Release a sequence that no further step uses, so that its memory is freed."""
        for holder in (*self._attentions.values(), *([self._tokens] if self._tokens else [])):
            holder.release(sequence)

    def resume_sequence(self, kept: Sequence, ids: list[int], tokens: int) -> Sequence:
        """Like `begin_sequence`, with the rows of `kept` that the prompt `ids` begins with, never for its last token."""
        same = (mine == theirs for mine, theirs in zip(kept.ids, ids[:-1], strict=False))
        kept.shorten(sum(takewhile(bool, same)))
        if kept.capacity == past_tier(self._room(tokens)):
            return kept
        sequence = self.begin_sequence(tokens)
        sequence.take(kept)
        return sequence

    def _room(self, tokens: int) -> int:
        """Rows for a sequence of `tokens`; with static shapes, the smallest sufficient past that attention was compiled for."""
        if not any(placement.static for placement in self.placements.values()):
            return tokens
        compiled = self.package.manifest.get("compiled", {}).get("contexts", ())
        return min((room for room in compiled if room >= tokens), default=tokens)

    def step(self, sequence: Sequence, ids: list[int], sampler: Sampler, prompt: bool = False) -> tuple[Step, np.ndarray]:
        """Feed tokens and choose the next one; returns the finished step and the logits [V] that it was chosen from.

        prompt: these tokens are the rest of a prompt and run as prefill after the kept rows; in an empty sequence they always do.
        If they lead to another rotary table (LongRoPE), all tokens of the sequence are recomputed.
        """
        if sequence.turn_to(sequence.length + len(ids)) and sequence.length:
            ids = [*sequence.ids, *ids]
            sequence.restart()
        phase = Phase.PREFILL if prompt or sequence.length == 0 else Phase.DECODE
        step = Step(self.log.next_seq, phase, len(ids), sequence.length)
        if self._prefetching:
            self._prefetching.step_begins(step)
        # Timed between the probes, so that the time of a tracer's trap is not part of the step.
        probes.token_begin(step.seq, phase, step.n_tokens, step.position)
        step.begin_ns = monotonic_ns()
        logits = np.asarray(self.logits(self.hidden(sequence, ids, step)[-1:])[0])
        with Operator(self.log, Kind.SAMPLE, -1, 1, made_from(Kind.SAMPLE, -1)):
            step.sampled = sampler.choose(logits)
        step.end_ns = monotonic_ns()
        probes.token_end(step.seq, step.sampled, step.end_ns)
        self.log.add(step)
        cache = self.experts.cache
        self.log.hits, self.log.misses, self.log.prefetched = cache.hits, cache.misses, cache.prefetched
        if self._prefetching:
            self._prefetching.step_ends(step)
        return step, logits

    def hidden(self, sequence: Sequence, ids: list[int], step: Step) -> np.ndarray:
        """Hidden [n, H] of the fed tokens after the last layer; extends the sequence."""
        n = len(ids)
        sequence.end = sequence.length + n
        sequence.turn_to(sequence.end)
        with Operator(self.log, Kind.EMBED, -1, n, made_from(Kind.EMBED, -1)):
            hidden = self._table[ids].astype(np.float32)
            if self.family.embedding_multiplier != 1:
                hidden *= np.float32(self.family.embedding_multiplier)
        for listener in self.listeners:
            listener.step_begins(hidden)
        if self._tokens and step.phase == Phase.DECODE and n == 1:
            hidden = self._tokens.run(sequence, hidden, step.seq)
        else:
            for layer in range(self.family.layers):
                hidden = self._layer(layer, hidden, sequence, step)
        sequence.length += n
        sequence.ids.extend(ids)
        return hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits [n, V] of hidden rows [n, H]."""
        layers, n = self.family.layers, len(hidden)
        origin = made_from(Kind.HEAD, -1, layers=layers, before=last_kind(self.family, layers - 1))
        with Operator(self.log, Kind.HEAD, -1, n, origin):
            logits: np.ndarray = self._head.run({"hidden": hidden}, n)[0]
        return logits

    def close(self) -> None:
        """Stop threads."""
        self.experts.close()

    def _layer(self, layer: int, hidden: np.ndarray, sequence: Sequence, step: Step) -> np.ndarray:
        """Attention and routing chunk by chunk; experts run when a buffer is full, the others at the end; then combine."""
        place, n = self.placements[step.phase], len(hidden)
        if layer in self.family.dense:
            return self._dense_layer(layer, hidden, sequence, step)
        work = self.experts.begin(layer, n, place.experts)
        self._notify(layer, hidden)
        attended = np.empty_like(hidden)
        weights = np.empty((n, self.family.top_k), np.float32)
        for part in slice_chunks(n, place.rows, place.static):
            attended[part] = self._attend(layer, hidden, part, sequence, step)
            normed, chosen, weights[part] = self._route(layer, attended[part], step.seq)
            self.experts.dispatch(work, place.experts, part.start, normed, chosen)
        common = self._share(work, attended)
        self.experts.finish(work, place.experts)
        return self._combine(work, attended, weights, common)

    def _dense_layer(self, layer: int, hidden: np.ndarray, sequence: Sequence, step: Step) -> np.ndarray:
        """Attention chunk by chunk, then one MLP for all rows."""
        place, n = self.placements[step.phase], len(hidden)
        self._notify(layer, hidden)
        attended = np.empty_like(hidden)
        for part in slice_chunks(n, place.rows, place.static):
            attended[part] = self._attend(layer, hidden, part, sequence, step)
        with Operator(self.log, Kind.MLP, layer, n, made_from(Kind.MLP, layer)):
            return self._mixers[layer].run({"hidden": attended}, n)[0]

    def _notify(self, layer: int, hidden: np.ndarray) -> None:
        for listener in self.listeners:
            listener.layer_begins(layer, hidden)

    def _attend(self, layer: int, hidden: np.ndarray, part: slice, sequence: Sequence, step: Step) -> np.ndarray:
        origin = made_from(Kind.ATTENTION, layer, before=last_kind(self.family, layer - 1))
        with Operator(self.log, Kind.ATTENTION, layer, part.stop - part.start, origin):
            return self.placements[step.phase].attention.run(layer, hidden[part], sequence, step.position + part.start)

    def _share(self, work: LayerWork, attended: np.ndarray) -> np.ndarray | None:
        """The shared expert's output [n, H] for all rows, while routed experts may still run elsewhere."""
        finished = self.family.FINISHED
        graph, n = self._shared[work.layer], len(work.normed)
        if graph is None:
            return None
        with Operator(self.log, Kind.MLP, work.layer, n, made_from(Kind.MLP, work.layer, shared=True, finished=finished)):
            return graph.run({"rows": attended if finished else work.normed}, n)[0]

    def _route(self, layer: int, attended: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(attended)
        with Operator(self.log, Kind.ROUTER, layer, n, made_from(Kind.ROUTER, layer)):
            normed, chosen, weights = self._mixers[layer].run({"hidden": attended}, n)
            experts = chosen.astype(np.uint16)
            probes.route(layer, n, self.family.top_k, experts, weights)
        self.log.route(seq, layer, experts, weights)
        for listener in self.listeners:
            listener.routed(layer, attended, chosen)
        return normed, chosen, weights

    def _combine(self, work: LayerWork, attended: np.ndarray, weights: np.ndarray, common: np.ndarray | None) -> np.ndarray:
        """The layer's result, which does not depend on the order in which experts finish."""
        layer, n, norms = work.layer, len(attended), self._norms[work.layer]
        used = tuple(sorted(work.used))
        origin = made_from(Kind.COMBINE, layer, used=used, shared=common is not None, finished=norms is not None)
        with Operator(self.log, Kind.COMBINE, layer, n, origin):
            if norms is None or common is None:
                return combine_experts(weights, work.outputs, common, self.family.residual_multiplier, attended)
            routed = combine_experts(weights, work.outputs, None, 1.0, np.zeros_like(attended))
        with Operator(self.log, Kind.NORM, layer, n, made_from(Kind.NORM, layer)):
            return norms.run({"hidden": attended, "common": common, "routed": routed}, n)[0]

    def _placement(self, names: dict[str, str], rows: int) -> Placement:
        attention, experts = (self.backends[HTP if names[kind] == "htp" else CPU] for kind in PLACED)
        # Graphs with dynamic shapes serve both phases.
        key = (attention.id, rows if attention.tiers else 0)
        if key not in self._attentions:
            self._attentions[key] = make_attention(self.family, attention, self.log, rows)
        return Placement(self._attentions[key], experts, rows)

    def _graph(self, name: str, kind: Kind, layer: int) -> Graph:
        return Graph(self.backends[CPU].session(name, {}), self.log, kind, layer, -1, CPU, 0)

    def _make_mixers(self) -> tuple[list[Graph], list[Graph | None], list[Graph | None]]:
        """Per layer: the graph of the router or dense MLP, of the shared expert, and of the layer's end, if any."""
        kinds = {"mlp": Kind.MLP, "router": Kind.ROUTER, "shared": Kind.MLP, "norm": Kind.NORM}
        mixers, shared, norms = [], [], []
        for layer in range(self.family.layers):
            graphs = {name: self._graph(layer_name(name, layer), kinds[name], layer) for name in self.family.subgraphs(layer)}
            mixers.append(graphs.get("mlp") or graphs["router"])
            shared.append(graphs.get("shared"))
            norms.append(graphs.get("norm"))
        return mixers, shared, norms

    def _token_path(self) -> TokenPath | None:
        """The fast path for one token; None unless all of it runs on the CPU."""
        place = self.placements[Phase.DECODE]
        if isinstance(place.attention, PortableAttention) or place.experts.id != CPU:
            return None
        parts = self._mixers, self._shared, self._norms, self.listeners
        return TokenPath(self.family, self.log, self.experts, place.attention, *parts)


def no_prefetch(package: Package, options: Options) -> str:
    """Why nothing is prefetched, empty if it is: needs a limited cache, experts that decode on the CPU, and in `auto` also a
    predictor or large experts.
    """
    if options.expert_cache is None:
        return "every expert is in memory"
    if options.prefetch == "off":
        return "as requested"
    if parse_placement(options.decode_backend)["expert"] == "htp":
        return "experts decode on the NPU"
    if options.prefetch == "on" or predictor_path(package) is not None or package.expert_bytes >= LARGE_EXPERT:
        return ""
    return "no predictor is trained (`moescope tune predictor`), and experts are below 1 MiB"


def loads_in_background(package: Package, options: Options) -> bool:
    """Whether a loader reads the experts that a layer misses while the layer runs those it has, with and without prefetching.

    With small experts, waking the loader would take a good part of the time that it saves.
    """
    return options.expert_cache is not None and not options.uses("htp") and package.expert_bytes >= LARGE_EXPERT


def make_backends(package: Package, options: Options, timers: Timers | None = None) -> dict[int, Backend]:
    """The CPU backend, and the NPU's if a phase uses it."""
    backends: dict[int, Backend] = {CPU: CpuBackend(package, options.threads, options.kv_bits)}
    if options.uses("htp"):
        from runtime.backends.htp import HtpBackend

        profiles = options.profile / QNN if options.profile else options.qnn_profile_dir
        backends[HTP] = HtpBackend(
            package, options.tiers, options.profiling(), profiles, options.soc, timers, options.performance
        )
    return backends
