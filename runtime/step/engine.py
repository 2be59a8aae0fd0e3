"""The engine: forward steps over subgraphs, layer by layer, each phase on its backend."""

from collections.abc import Callable
from itertools import takewhile
from time import monotonic_ns

import numpy as np

from runtime.backends.cpu import CpuBackend
from runtime.backends.graph import Backend, Graph
from runtime.backends.kv_cache import TYPES, Scales
from runtime.backends.operators import Operator, last_kind, made_from
from runtime.cache_rules.forms import CPU, HTP
from runtime.cache_rules.rule import LARGE_EXPERT
from runtime.errors import RequestError
from runtime.experts.predictor import Predictor, predictor_path
from runtime.experts.prefetch import Prefetcher
from runtime.experts.routing import Listener
from runtime.experts.run import Experts
from runtime.experts.trial import Prefetching, Trial
from runtime.package.layout import Package, layer_name
from runtime.placement.costs import CostTable, Flush, FlushByCost
from runtime.placement.options import AUTO, PLACED, Options, parse_placement
from runtime.step.attention import Attention, PortableAttention, Sequence, make_attention, past_tier
from runtime.step.layers import Parts
from runtime.step.row_path import Placement, RowPath
from runtime.step.sampling import Sampler
from runtime.step.token_path import TokenPath
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog, Step
from runtime.telemetry.probes import Kind, Phase
from runtime.telemetry.profile import QNN, Timers

UNTRAINED = "no predictor is trained (`moescope tune predictor`)"


class Engine:
    """A model ready to step. One sequence at a time.

    `predicts_untrained`: whether the layers' own routers choose what to prefetch, as no predictor is trained.
    """

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
        limited = options.expert_cache is not None
        flush = FlushByCost(costs, options.tiers, limited) if costs else Flush(options.tiers, limited)
        if HTP in used and flush.uses_cpu:
            used[CPU] = self.backends[CPU]
        unwanted = no_prefetch(package, options)
        predictor = None if unwanted else Predictor.of(package)
        self.predicts_untrained = predictor is not None and not predictor.trained
        log.prefetching = f"off: {unwanted}" if unwanted and (limited or options.prefetch == "on") else ""
        self._loads_beside = {phase: loads_in_background(package, options, phase) for phase in Phase}
        background = any(self._loads_beside.values()) or predictor is not None
        self.experts = Experts(package, used, options.expert_cache, log, options.cache_policy, background, flush)
        self._table = package.embedding()
        self._head = self._graph("head", Kind.HEAD, -1)
        self._parts = self._make_parts()
        self._tokens = self._token_path(predictor)
        self._slots = self._tokens.slots if self._tokens else None
        self._prefetching: Prefetching | None = None
        if predictor:
            self._prefetching = self._prefetch(predictor)
        if options.expert_cache is None:
            self.experts.preload(self.placements[Phase.DECODE].experts)

    def _prefetch(self, predictor: Predictor) -> Prefetching | None:
        """What prefetches by the predictor: the extension, where it has a token's experts."""
        log, cache, slots = self.log, self.experts.cache, self._slots
        if slots and self._tokens and not self._tokens.predicts:
            log.prefetching = "off: a router's scores are no linear map of its input"
            return None
        trial = Trial(cheap=slots is not None) if self.options.prefetch == AUTO else None
        log.prefetching = trial.reason if trial else "on: as requested" + ("" if predictor.trained else f", though {UNTRAINED}")
        return Prefetching(slots or Prefetcher(predictor, cache, self.family, CPU), cache, self.listeners, log, trial)

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

    def step(
        self,
        sequence: Sequence,
        ids: list[int],
        sampler: Sampler,
        prompt: bool = False,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> tuple[Step, np.ndarray]:
        """Feed tokens and choose the next one; returns the finished step and the logits [V] that it was chosen from.

        prompt: these tokens are the rest of a prompt and run as prefill after the kept rows; in an empty sequence they always do.
        unwanted: asked before each chunk; if so, the step ends with InterruptedStepError and the sequence cannot be continued.
        If they lead to another rotary table (LongRoPE), all tokens of the sequence are recomputed.
        """
        if sequence.turn_to(sequence.length + len(ids)) and sequence.length:
            ids = [*sequence.ids, *ids]
            sequence.restart()
        phase = Phase.PREFILL if prompt or sequence.length == 0 else Phase.DECODE
        step = Step(self.log.next_seq, phase, len(ids), sequence.length)
        self.experts.cache.background = self._loads_beside[phase]
        if self._prefetching:
            self._prefetching.step_begins(step)
        # Timed between the probes, so that the time of a tracer's trap is not part of the step.
        probes.token_begin(step.seq, phase, step.n_tokens, step.position)
        step.begin_ns = monotonic_ns()
        logits = np.asarray(self.logits(self.hidden(sequence, ids, step, unwanted)[-1:])[0])
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

    def hidden(self, sequence: Sequence, ids: list[int], step: Step, unwanted: Callable[[], bool] = lambda: False) -> np.ndarray:
        """Hidden [n, H] of the fed tokens after the last layer; extends the sequence."""
        n = len(ids)
        sequence.end = sequence.length + n
        sequence.turn_to(sequence.end)
        decoded = self._tokens if step.phase == Phase.DECODE and n == 1 else None
        if self._slots:
            self._slots.take_over() if decoded else self._slots.hand_back()
        with Operator(self.log, Kind.EMBED, -1, n, made_from(Kind.EMBED, -1)):
            hidden = self._table[ids].astype(np.float32)
            if self.family.embedding_multiplier != 1:
                hidden *= np.float32(self.family.embedding_multiplier)
        for listener in self.listeners:
            listener.step_begins(hidden)
        if decoded:
            hidden = decoded.run(sequence, hidden, step.seq)
        else:
            hidden = RowPath(self._parts, self.placements[step.phase], sequence, step, hidden, unwanted).run()
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
        if self._slots:
            self._slots.close()
        self.experts.close()

    def _placement(self, names: dict[str, str], rows: int) -> Placement:
        attention, experts = (self.backends[HTP if names[kind] == "htp" else CPU] for kind in PLACED)
        # Graphs with dynamic shapes serve both phases.
        key = (attention.id, rows if attention.tiers else 0)
        if key not in self._attentions:
            self._attentions[key] = make_attention(self.family, attention, self.log, rows)
        return Placement(self._attentions[key], experts, rows)

    def _graph(self, name: str, kind: Kind, layer: int) -> Graph:
        return Graph(self.backends[CPU].session(name, {}), self.log, kind, layer, -1, CPU, 0)

    def _make_parts(self) -> Parts:
        kinds = {"mlp": Kind.MLP, "router": Kind.ROUTER, "shared": Kind.MLP, "norm": Kind.NORM}
        graphs = [
            {name: self._graph(layer_name(name, layer), kinds[name], layer) for name in self.family.subgraphs(layer)}
            for layer in range(self.family.layers)
        ]
        mixers = [layer.get("mlp") or layer["router"] for layer in graphs]
        shared, norms = ([layer.get(name) for layer in graphs] for name in ("shared", "norm"))
        return Parts(self.family, self.log, self.experts, self.listeners, mixers, shared, norms)

    def _token_path(self, predictor: Predictor | None) -> TokenPath | None:
        """The fast path for one token; None unless all of it runs on the CPU. A limited cache needs the extension."""
        place = self.placements[Phase.DECODE]
        if isinstance(place.attention, PortableAttention) or place.experts.id != CPU:
            return None
        if self.options.expert_cache is not None and not probes.built:
            return None
        beside = self._loads_beside[Phase.DECODE] or predictor is not None
        return TokenPath(self._parts, place.attention, beside, predictor)


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
    return f"{UNTRAINED}, and experts are below 1 MiB"


def loads_in_background(package: Package, options: Options, phase: Phase) -> bool:
    """Whether a loader reads the experts that a layer misses while the layer runs those it has, with and without prefetching.

    For a single token and small experts, waking the loader would take a good part of the time that it saves.
    """
    if options.expert_cache is None or options.uses("htp"):
        return False
    return phase == Phase.PREFILL or package.expert_bytes >= LARGE_EXPERT


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
