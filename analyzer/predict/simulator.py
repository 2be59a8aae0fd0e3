"""What if: a recorded routing trace replayed through the runtime's scheduling, with other caches, chunks, units or devices.

The engine runs layer by layer as the runtime does: attention and router chunk by chunk, experts as their buffers fill, resident
ones first, the rest at the end of the layer. Experts on the NPU run in one worker beside the CPU. Loads share one storage;
prefetched experts give way to demanded ones. What runs at the same time does not slow each other down: memory bandwidth is not
shared here.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from analyzer.predict.costs import Costs
from analyzer.predict.errors import PredictError
from analyzer.predict.policy import Buffers, Cache, Form, Predictor
from analyzer.predict.trace import Step, Trace

Work = Generator[Any, Any, None]
DEMAND, PREFETCH = 0, 1


@dataclass(frozen=True)
class Settings:
    """What the runtime would be told.

    cache_bytes: None for everything. prefetch: probability from which an expert is fetched ahead, None: off.
    """

    cache_bytes: int | None = None
    chunk: int = 64
    tiers: tuple[int, ...] = (1, 8, 32)
    prefetch: float | None = None
    prefill_unit: str = "cpu"
    decode_unit: str = "cpu"

    def __post_init__(self) -> None:
        if self.chunk < 1 or not self.tiers or min(self.tiers) < 1:
            raise PredictError("chunk and tiers must be 1 or more")
        if self.prefetch is not None and not 0 < self.prefetch <= 1:
            raise PredictError("the prefetch threshold is a probability: above 0, up to 1")


@dataclass(frozen=True)
class Span:
    """A piece of simulated time, in seconds.

    kind: attention | router | dispatch | expert | combine | outside | load | prefetch.
    """

    kind: str
    unit: str
    step: int
    layer: int
    expert: int
    rows: int
    begin: float
    end: float
    hit: bool = False


@dataclass
class Outcome:
    """What a simulated run gave; times in seconds."""

    settings: Settings
    steps: list[tuple[str, int, float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    stall_s: float = 0.0
    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    peak_bytes: int = 0

    def durations(self, phase: str) -> np.ndarray:
        """Step times of a phase."""
        return np.array([end - begin for name, _, begin, end in self.steps if name == phase])

    def summary(self) -> dict[str, Any]:
        """Figures, JSON-able."""
        prefill, decode = self.durations("prefill"), self.durations("decode")
        asked = self.hits + self.misses
        return {
            "ttft_ms": float(prefill.sum()) * 1e3 if len(prefill) else None,
            "tpot_ms": float(decode.mean()) * 1e3 if len(decode) else None,
            "tpot_p90_ms": float(np.quantile(decode, 0.9)) * 1e3 if len(decode) else None,
            "hit_rate": self.hits / asked if asked else None,
            "stall_ms": self.stall_s * 1e3,
            "loaded_bytes": self.loaded_bytes,
            "peak_cache_bytes": self.peak_bytes,
            "cache_bytes": self.settings.cache_bytes,
            "chunk": self.settings.chunk,
            "prefetch": self.settings.prefetch,
        }


class Machine:
    """The simulated engine: one process steps, one runs what was given to the NPU, one fetches ahead."""

    def __init__(self, trace: Trace, costs: Costs, settings: Settings):
        self.trace, self.costs, self.settings = trace, costs, settings
        self.env = simpy.Environment()
        self.units = {unit: simpy.Resource(self.env) for unit in ("cpu", "npu")}
        self.storage = simpy.PriorityResource(self.env)
        self.worker = simpy.Resource(self.env)
        self.cache = Cache(settings.cache_bytes, costs.expert_bytes)
        self.predictor = Predictor(trace.layers, trace.experts)
        self.outcome = Outcome(settings)
        self._coming: dict[Form, simpy.Event] = {}
        self._before: tuple[int, np.ndarray] | None = None
        self._step = 0

    def run(self) -> Outcome:
        """All steps of the trace."""
        self._check()
        self.env.run(self.env.process(self._all()))
        done, cache = self.outcome, self.cache
        done.hits, done.misses, done.peak_bytes = cache.hits, cache.misses, cache.peak
        return done

    def _check(self) -> None:
        units = {self.settings.prefill_unit, self.settings.decode_unit}
        for unit in sorted(units):
            if ("expert", unit) not in self.costs.work:
                raise PredictError(
                    f"costs of experts on the {unit} are not known: record them there, or give --config and --device"
                )
        need = self.trace.top_k * max(self.costs.expert_bytes[unit] for unit in units)
        if self.settings.cache_bytes is not None and self.settings.cache_bytes < need:
            raise PredictError(f"a cache of {self.settings.cache_bytes} bytes holds no layer's experts: give at least {need}")

    def _all(self) -> Work:
        if self.settings.cache_bytes is None:
            self._preload()
        for number, step in enumerate(self.trace.steps):
            self._step, begin = number, self.env.now
            yield from self._forward(step)
            self.outcome.steps.append((step.phase, step.rows, begin, self.env.now))

    def _preload(self) -> None:
        """Everything is loaded before the first step."""
        unit = self.settings.decode_unit
        for layer in range(self.trace.layers):
            for expert in range(self.trace.experts):
                self.cache.insert(Form(layer, expert, unit, min(self._tiers(unit), default=0)))

    def _forward(self, step: Step) -> Work:
        unit = self.settings.prefill_unit if step.phase == "prefill" else self.settings.decode_unit
        for layer, chosen in enumerate(step.routes):
            yield from self._layer(step, layer, chosen, unit)
        seconds = self.costs.of("outside", "cpu", 1) + self.costs.of("step", "cpu", 1)
        yield from self._use("cpu", seconds, "outside", -1, -1, 1)

    def _layer(self, step: Step, layer: int, chosen: np.ndarray, unit: str) -> Work:
        self.cache.begin(layer)
        buffers = Buffers(self.trace.experts, max(self._tiers(unit), default=None))
        pending: list[simpy.Process] = []
        chunk = self.settings.chunk if step.phase == "prefill" else 1
        for first in range(0, len(chosen), chunk):
            part = chosen[first : first + chunk]
            rows, context = len(part), step.position + first + len(part)
            yield from self._use(unit, self.costs.of("attention", unit, rows, context), "attention", layer, -1, rows)
            yield from self._use("cpu", self.costs.of("router", "cpu", rows), "router", layer, -1, rows)
            self._look_ahead(layer, part)
            yield from self._use("cpu", self.costs.of("dispatch", "cpu", rows), "dispatch", layer, -1, rows)
            yield from self._start(layer, buffers.add(part), unit, pending)
        yield from self._use("cpu", self.costs.of("dispatch", "cpu", len(chosen)), "dispatch", layer, -1, len(chosen))
        yield from self._start(layer, buffers.flush(), unit, pending)
        yield self.env.all_of(pending)
        yield from self._use("cpu", self.costs.of("combine", "cpu", len(chosen)), "combine", layer, -1, len(chosen))

    def _start(self, layer: int, batches: list[tuple[int, int]], unit: str, pending: list[simpy.Process]) -> Work:
        """Run batches: on the CPU now, on the NPU in its worker."""
        if batches and unit == "npu":
            pending.append(self.env.process(self._in_worker(layer, batches, unit)))
        elif batches:
            yield from self._run(layer, batches, unit)

    def _in_worker(self, layer: int, batches: list[tuple[int, int]], unit: str) -> Work:
        with self.worker.request() as turn:
            yield turn
            yield from self._run(layer, batches, unit)

    def _run(self, layer: int, batches: list[tuple[int, int]], unit: str) -> Work:
        """Experts that are there run first, so that no load evicts what is about to run."""
        tiers = self._tiers(unit)
        forms = [Form(layer, expert, unit, min((t for t in tiers if t >= rows), default=0)) for expert, rows in batches]
        self.cache.name(forms)
        for i in sorted(range(len(forms)), key=lambda i: forms[i] not in self.cache.held):
            hit = self.cache.count(forms[i])
            if not self.cache.touch(forms[i]):
                began = self.env.now
                yield from self._fetch(forms[i], DEMAND)
                self.outcome.stall_s += self.env.now - began
            rows = forms[i].tier or batches[i][1]
            yield from self._use(unit, self.costs.of("expert", unit, rows), "expert", layer, forms[i].expert, batches[i][1], hit)

    def _fetch(self, form: Form, priority: int) -> Work:
        """Bring a form in, or wait for the one that is bringing it."""
        if form in self._coming:
            yield self._coming[form]
            if self.cache.touch(form):
                return
        self._coming[form] = self.env.event()
        size = self.costs.expert_bytes[form.unit]
        with self.storage.request(priority=priority) as turn:
            yield turn
            began = self.env.now
            yield self.env.timeout(self.costs.load.at(size))
        self.outcome.loaded_bytes += size
        kind = "prefetch" if priority else "load"
        self.outcome.spans.append(Span(kind, "storage", self._step, form.layer, form.expert, 0, began, self.env.now))
        self.cache.insert(form, speculative=priority == PREFETCH)
        self._coming.pop(form).succeed()

    def _look_ahead(self, layer: int, chosen: np.ndarray) -> None:
        """Learn from what was chosen, and fetch what will likely be chosen next."""
        if self.settings.prefetch is None or self.settings.cache_bytes is None or len(chosen) > 1:
            return
        if self._before and self._before[0] == layer - 1:
            self.predictor.learn(layer - 1, self._before[1], chosen)
        self._before = (layer, chosen)
        if layer + 1 < self.trace.layers:
            likely = self.predictor.probabilities(layer, chosen)
            unit = self.settings.decode_unit
            for expert in np.argsort(-likely, kind="stable")[: 2 * self.trace.top_k].tolist():
                form = Form(layer + 1, expert, unit, min(self._tiers(unit), default=0))
                if likely[expert] >= self.settings.prefetch and form not in self.cache.held and form not in self._coming:
                    self.env.process(self._fetch(form, PREFETCH))

    def _use(self, unit: str, seconds: float, kind: str, layer: int, expert: int, rows: int, hit: bool = False) -> Work:
        """Occupy a unit."""
        with self.units[unit].request() as turn:
            yield turn
            began = self.env.now
            yield self.env.timeout(seconds)
        self.outcome.spans.append(Span(kind, unit, self._step, layer, expert, rows, began, self.env.now, hit))

    def _tiers(self, unit: str) -> tuple[int, ...]:
        return self.settings.tiers if unit == "npu" else ()


def simulate(trace: Trace, costs: Costs, settings: Settings) -> Outcome:
    """Replay the trace."""
    return Machine(trace, costs, settings).run()


def pareto(outcomes: list[Outcome]) -> list[bool]:
    """Which outcomes no other beats in both peak memory of the cache and time per token."""
    told = [outcome.summary() for outcome in outcomes]
    figures = [(s["peak_cache_bytes"], round(s["tpot_ms"] or s["ttft_ms"], 6)) for s in told]
    return [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in figures) for x, y in figures]
