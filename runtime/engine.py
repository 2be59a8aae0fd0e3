"""The engine: forward steps over subgraphs, layer by layer, each phase on its backend."""

from dataclasses import dataclass
from time import monotonic_ns

import numpy as np

from runtime import probes
from runtime.attention import Attention, Sequence
from runtime.cpu import CpuBackend
from runtime.errors import RequestError
from runtime.experts import Experts, LayerWork
from runtime.graph import CPU, HTP, Backend, Graph
from runtime.log import RunLog, Step
from runtime.operators import Operator, made_from
from runtime.options import Options
from runtime.package import Package, router_name
from runtime.predictor import Predictor, predictor_path
from runtime.prefetch import Prefetcher
from runtime.probes import Kind, Phase
from runtime.routing import Listener
from runtime.sampling import Sampler


@dataclass(frozen=True)
class Placement:
    """Where one phase runs its attention and its experts. Embedding, routers and head stay on the CPU."""

    attention: Attention
    experts: Backend


class Engine:
    """A model ready to step. One sequence at a time."""

    def __init__(self, package: Package, options: Options, log: RunLog):
        self.package, self.options, self.log, self.family = package, options, log, package.family
        self.backends = make_backends(package, options)
        self.listeners: list[Listener] = []
        cpu, family = self.backends[CPU], self.family
        self.placements = {
            Phase.PREFILL: self._placement(options.prefill_backend, options.chunk),
            Phase.DECODE: self._placement(options.decode_backend, 1),
        }
        used = {p.experts.id: p.experts for p in self.placements.values()}
        predictor = Predictor.of(package) if wants_prefetch(package, options) else None
        self.experts = Experts(package, used, options.expert_cache, log, options.cache_policy, predictor is not None)
        self._embed = Graph(cpu.session("embed", {}), log, Kind.EMBED, -1, -1, CPU, 0)
        self._head = Graph(cpu.session("head", {}), log, Kind.HEAD, -1, -1, CPU, 0)
        self._routers = [Graph(cpu.session(router_name(i), {}), log, Kind.ROUTER, i, -1, CPU, 0) for i in range(family.layers)]
        if predictor:
            self.listeners.append(Prefetcher(predictor, self.experts.cache, family, CPU))
        if options.expert_cache is None:
            self.experts.preload(self.placements[Phase.DECODE].experts)

    def begin_sequence(self, tokens: int) -> Sequence:
        """An empty sequence with room for `tokens`, and the attention graphs it needs."""
        if tokens > self.family.context:
            raise RequestError(f"{tokens} tokens exceed the model's context of {self.family.context}: ask for fewer")
        sequence = Sequence(self.family, tokens)
        for placement in self.placements.values():
            placement.attention.prepare(sequence.capacity)
        return sequence

    def step(self, sequence: Sequence, ids: list[int], sampler: Sampler) -> tuple[Step, np.ndarray]:
        """Feed tokens, choose the next; returns the finished step and the logits [V] it was chosen from."""
        phase = Phase.PREFILL if sequence.length == 0 else Phase.DECODE
        step = Step(len(self.log.steps), phase, len(ids), sequence.length, monotonic_ns())
        probes.token_begin(step.seq, phase, step.n_tokens, step.position)
        logits = self.forward(sequence, ids, step)
        with Operator(self.log, Kind.SAMPLE, -1, 1, made_from(Kind.SAMPLE, -1)):
            step.sampled = sampler.choose(logits)
        probes.token_end(step.seq, step.sampled)
        step.end_ns = monotonic_ns()
        self.log.steps.append(step)
        cache = self.experts.cache
        self.log.hits, self.log.misses, self.log.prefetched = cache.hits, cache.misses, cache.prefetched
        return step, logits

    def forward(self, sequence: Sequence, ids: list[int], step: Step) -> np.ndarray:
        """Logits [V] of the last token."""
        n, layers = len(ids), self.family.layers
        with Operator(self.log, Kind.EMBED, -1, n, made_from(Kind.EMBED, -1)):
            hidden = self._embed.run({"ids": np.array(ids, np.int64)}, n)[0]
        for listener in self.listeners:
            listener.step_begins(hidden)
        for layer in range(layers):
            hidden = self._layer(layer, hidden, sequence, step)
        sequence.length += n
        with Operator(self.log, Kind.HEAD, -1, 1, made_from(Kind.HEAD, -1, layers=layers)):
            logits: np.ndarray = self._head.run({"hidden": hidden[-1:]}, 1)[0][0]
        return logits

    def close(self) -> None:
        """Stop threads."""
        self.experts.close()

    def _layer(self, layer: int, hidden: np.ndarray, sequence: Sequence, step: Step) -> np.ndarray:
        """Attention and routing chunk by chunk; experts run whenever a buffer is full, the rest at the end; then combine."""
        place, n = self.placements[step.phase], len(hidden)
        work = self.experts.begin(layer, n, place.experts)
        for listener in self.listeners:
            listener.layer_begins(layer, hidden)
        attended = np.empty_like(hidden)
        weights = np.empty((n, self.family.top_k), np.float32)
        for first in range(0, n, place.attention.rows):
            part = slice(first, min(first + place.attention.rows, n))
            with Operator(self.log, Kind.ATTENTION, layer, part.stop - first, made_from(Kind.ATTENTION, layer)):
                attended[part] = place.attention.run(layer, hidden[part], sequence, step.position + first)
            normed, chosen, weights[part] = self._route(layer, attended[part], step.seq)
            self.experts.dispatch(work, place.experts, first, normed, chosen)
        self.experts.finish(work, place.experts)
        return self._combine(work, attended, weights)

    def _route(self, layer: int, attended: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(attended)
        with Operator(self.log, Kind.ROUTER, layer, n, made_from(Kind.ROUTER, layer)):
            normed, chosen, weights = self._routers[layer].run({"hidden": attended}, n)
            experts = chosen.astype(np.uint16)
            probes.route(layer, n, self.family.top_k, experts, weights)
        self.log.route(seq, layer, experts, weights)
        for listener in self.listeners:
            listener.routed(layer, attended, chosen)
        return normed, chosen, weights

    def _combine(self, work: LayerWork, attended: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Residual plus the experts' outputs by router weight, summed in the router's order: the same for every arrival order."""
        origin = made_from(Kind.COMBINE, work.layer, used=tuple(sorted(work.used)))
        with Operator(self.log, Kind.COMBINE, work.layer, len(attended), origin):
            mixed: np.ndarray = attended + np.matmul(weights[:, None, :], work.outputs)[:, 0]
        return mixed

    def _placement(self, backend: str, rows: int) -> Placement:
        chosen = self.backends[HTP if backend == "htp" else CPU]
        return Placement(Attention(self.family, chosen, self.log, rows), chosen)


def wants_prefetch(package: Package, options: Options) -> bool:
    """Prefetching needs a limited cache and experts that decode on the CPU; `auto` also a trained predictor."""
    if options.prefetch == "off" or options.expert_cache is None or options.decode_backend == "htp":
        return False
    return options.prefetch == "on" or predictor_path(package) is not None


def make_backends(package: Package, options: Options) -> dict[int, Backend]:
    """The CPU, and the NPU where a phase asks for it."""
    backends: dict[int, Backend] = {CPU: CpuBackend(package, options.threads)}
    if "htp" in (options.prefill_backend, options.decode_backend):
        from runtime.htp import HtpBackend

        backends[HTP] = HtpBackend(package, options.tiers, options.qnn_profile, options.qnn_profile_dir)
    return backends
