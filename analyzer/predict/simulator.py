"""Replays a recorded routing trace through the runtime's scheduling, with other caches, chunks, units or devices.

The engine runs layer by layer like the runtime: attention and router chunk by chunk, experts when their buffers fill, resident
ones first, the rest at the end of the layer. Experts on the NPU run in one worker parallel to the CPU. Missing experts are loaded
by the layer that needs them; large ones, those of a prompt, and with prefetching all, by a parallel loader, the most urgent
first, and the layer takes back loads that the loader has not begun. The loader reads in pieces, and between pieces prefers loads
that a layer waits for. While the loader works, the CPU's work has the measured slowdown; bandwidth is not shared otherwise.
"""

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from analyzer.errors import PredictError
from analyzer.predict.costs import AHEAD, AWAITED, DEMAND, FOUND, LOADED, RESIDENT, Costs, Line
from analyzer.predict.trace import PairPredictor, Step, Trace
from analyzer.questions.figures import hit_rate
from analyzer.questions.pareto import on_front
from runtime.cache_rules.batches import Batch, TokenBuffers, early_experts, slice_chunks, smallest_tier
from runtime.cache_rules.eviction import POLICIES
from runtime.cache_rules.forms import CPU, HTP, Cache, Form, Reason
from runtime.cache_rules.rule import LARGE_EXPERT, PIECE, URGENT, CacheRule, Entry

Work = Generator[Any, Any, None]
RECORDED, STORAGE = "recorded", "storage"
LAYER_AHEAD = 100.0
"""Increase of a load's priority number per layer of distance."""
BACKEND_OF = {"cpu": CPU, "npu": HTP}
"""Units of this package → backends of the cache rule."""
UNIT = {backend: unit for unit, backend in BACKEND_OF.items()}


@dataclass(frozen=True)
class Settings:
    """The runtime's settings.

    cache_bytes: None for unlimited. prefetch: None: off; a number: the minimum probability for fetching an expert ahead, from a
    predictor trained on the trace only; "recorded": the prefetches of the recorded run.
    """

    cache_bytes: int | None = None
    chunk: int = 64
    tiers: tuple[int, ...] = (1, 8, 32)
    prefetch: float | str | None = None
    prefill_unit: str = "cpu"
    decode_unit: str = "cpu"
    policy: str = "lru"

    def __post_init__(self) -> None:
        if self.chunk < 1 or not self.tiers or min(self.tiers) < 1:
            raise PredictError("chunk and tiers must be 1 or more")
        if isinstance(self.prefetch, str) and self.prefetch != RECORDED:
            raise PredictError(f"prefetch {self.prefetch!r} is unknown: give a probability, or {RECORDED!r}")
        if isinstance(self.prefetch, float) and not 0 < self.prefetch <= 1:
            raise PredictError("the prefetch threshold is a probability: above 0, up to 1")

    def background(self, expert_bytes: int) -> bool:
        """Whether a loader works parallel to the layers of a decoded token: as in the runtime, with a limited cache for experts
        on the CPU, to prefetch, or if an expert is large.
        """
        if self.cache_bytes is None or self.decode_unit != "cpu":
            return False
        return self.prefetch is not None or (self.prefill_unit == "cpu" and expert_bytes >= LARGE_EXPERT)

    def background_in(self, phase: str, expert_bytes: int) -> bool:
        """Whether a loader works parallel to the layers of a step: for a prompt on the CPU with experts of any size."""
        prompt = phase == "prefill" and self.cache_bytes is not None and {self.prefill_unit, self.decode_unit} == {"cpu"}
        return prompt or self.background(expert_bytes)

    def mode(self, expert_bytes: int) -> str:
        """The mode of loading experts that costs distinguish."""
        return RESIDENT if self.cache_bytes is None else AHEAD if self.background(expert_bytes) else DEMAND


@dataclass(frozen=True)
class SimSpan:
    """A span of simulated time, in seconds.

    kind: attention | router | dispatch | mlp | expert | combine | outside | load | prefetch. unit: cpu | npu, and for loads
    cpu | worker (the NPU's host thread) | storage | storage 2 ... (threads of the loader).
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
    """The result of a simulated run; times in seconds. by_phase: (hits, misses, loaded bytes) of each phase's steps."""

    settings: Settings
    steps: list[tuple[str, int, float, float]] = field(default_factory=list)
    spans: list[SimSpan] = field(default_factory=list)
    stall_s: float = 0.0
    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    peak_bytes: int = 0
    by_phase: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def durations(self, phase: str) -> np.ndarray:
        """Durations of a phase's steps."""
        return np.array([end - begin for name, _, begin, end in self.steps if name == phase])

    def summary(self) -> dict[str, Any]:
        """Figures, JSON-able."""
        prefill, decode = self.durations("prefill"), self.durations("decode")
        hits, misses, decode_bytes = self.by_phase.get("decode", (0, 0, 0))
        return {
            "ttft_ms": float(prefill.sum()) * 1e3 if len(prefill) else None,
            "tpot_ms": float(decode.mean()) * 1e3 if len(decode) else None,
            "tpot_p90_ms": float(np.quantile(decode, 0.9)) * 1e3 if len(decode) else None,
            "hit_rate": hit_rate(self.hits, self.misses),
            "decode_hit_rate": hit_rate(hits, misses),
            "stall_ms": self.stall_s * 1e3,
            "loaded_bytes": self.loaded_bytes,
            "decode_loaded_bytes": decode_bytes,
            "peak_cache_bytes": self.peak_bytes,
            "cache_bytes": self.settings.cache_bytes,
            "chunk": self.settings.chunk,
            "prefetch": self.settings.prefetch,
        }


class SimulatedLoader:
    """The threads that load in parallel to the layers, the most urgent first; loads that have not begun can be withdrawn."""

    def __init__(self, env: simpy.Environment, load: Callable[[Entry, str], Work], threads: int):
        self.waiting: list[Entry] = []
        self._env, self._load, self._asked = env, load, env.event()
        for number in range(1, threads + 1):
            env.process(self._serve(STORAGE if number == 1 else f"{STORAGE} {number}"))

    def submit(self, entry: Entry) -> None:
        """Request a load."""
        self.waiting.append(entry)
        if not self._asked.triggered:
            self._asked.succeed()

    def withdraw(self, entry: Entry) -> bool:
        """Remove a load from the queue; returns False if it is not in the queue."""
        if entry not in self.waiting:
            return False
        self.waiting.remove(entry)
        return True

    def urgent(self) -> Entry | None:
        """Remove and return a load that a layer waits for, if there is one."""
        entry = next((entry for entry in self.waiting if entry.urgency == URGENT), None)
        if entry:
            self.waiting.remove(entry)
        return entry

    def _serve(self, name: str) -> Work:
        while True:
            if not self.waiting:
                if self._asked.triggered:
                    self._asked = self._env.event()
                yield self._asked
            # It may have been started or withdrawn since.
            if self.waiting:
                entry = min(self.waiting, key=lambda waiting: waiting.urgency)
                self.waiting.remove(entry)
                yield from self._load(entry, name)


class SimulatedCache(CacheRule[Entry]):
    """The runtime's cache rule on simulated time: background loads take the loader's time."""

    def __init__(self, settings: Settings, costs: Costs, submit: Callable[[Entry], None], loader: SimulatedLoader):
        policy = POLICIES[settings.policy]()
        super().__init__(settings.cache_bytes, lambda form: costs.bytes_of(UNIT[form.backend], form.layer), Entry, policy)
        self._submit, self._loader = submit, loader

    def _queue(self, entry: Entry) -> None:
        self._submit(entry)

    def _withdraw(self, entry: Entry) -> bool:
        return self._loader.withdraw(entry)


class SimulatedEngine:
    """The simulated engine: one process runs steps, one runs the NPU's work, one loads in parallel."""

    def __init__(self, trace: Trace, costs: Costs, settings: Settings):
        self.trace, self.costs, self.settings = trace, costs, settings
        self.env = simpy.Environment()
        self.units = {unit: simpy.Resource(self.env) for unit in ("cpu", "npu")}
        self.storage = simpy.PriorityResource(self.env, costs.loads_at_once)
        self.worker = simpy.Resource(self.env)
        self.loader = SimulatedLoader(self.env, self._behind, costs.loaders)
        self.cache = SimulatedCache(settings, costs, self._submit, self.loader)
        self.mode = settings.mode(costs.expert_bytes.get("cpu", 0))
        self.followers = PairPredictor(trace.layers, trace.experts)
        self.outcome = Outcome(settings)
        self._landing: dict[Entry, simpy.Event] = {}
        self._how: dict[Form, str] = {}
        self._loaded: set[Form] = set()
        self._ran: defaultdict[int, set[int]] = defaultdict(set)  # tiers in which experts have run in this layer
        self._lines: dict[tuple[str, str, str], Line | None] = {}
        self._before: tuple[int, np.ndarray] | None = None
        self._step, self._loading_behind = 0, 0

    def run(self) -> Outcome:
        """Run all steps of the trace."""
        self._check()
        self.env.run(self.env.process(self._all()))
        outcome, cache = self.outcome, self.cache
        outcome.hits, outcome.misses, outcome.peak_bytes = cache.hits, cache.misses, cache.peak
        return outcome

    @property
    def _phase(self) -> str:
        return self.trace.steps[self._step].phase

    def _check(self) -> None:
        units = {self.settings.prefill_unit, self.settings.decode_unit}
        for unit in sorted(units):
            if not self.costs.knows("expert", unit):
                raise PredictError(
                    f"costs of experts on the {unit} are not known: record them there, or give --config and --device"
                )
        layers = range(self.trace.layers)
        need = self.trace.top_k * max(self.costs.bytes_of(unit, layer) for unit in units for layer in layers)
        if self.settings.cache_bytes is not None and self.settings.cache_bytes < need:
            raise PredictError(f"a cache of {self.settings.cache_bytes} bytes holds no layer's experts: give at least {need}")
        if self.settings.prefetch == RECORDED and not any(step.asked for step in self.trace.steps):
            raise PredictError("the recorded run prefetched nothing: record one with --prefetch on, or give a probability")

    def _all(self) -> Work:
        if self.settings.cache_bytes is None:
            self._preload()
        for number, step in enumerate(self.trace.steps):
            self._step, begin, before = number, self.env.now, self._counts()
            self.cache.background = self.settings.background_in(step.phase, self.costs.expert_bytes.get("cpu", 0))
            yield from self._forward(step)
            self.outcome.steps.append((step.phase, step.rows, begin, self.env.now))
            so_far = np.array(self.outcome.by_phase.get(step.phase, (0, 0, 0)))
            hits, misses, loaded = (so_far + np.array(self._counts()) - np.array(before)).tolist()
            self.outcome.by_phase[step.phase] = hits, misses, loaded

    def _counts(self) -> tuple[int, int, int]:
        return self.cache.hits, self.cache.misses, self.outcome.loaded_bytes

    def _preload(self) -> None:
        """Load all experts before the first step."""
        unit = self.settings.decode_unit
        for layer in range(self.trace.layers):
            for expert in range(self.trace.experts):
                form = Form(layer, expert, BACKEND_OF[unit], min(self._tiers(unit), default=0))
                self.cache.land(self.cache.hold(form))
                self.cache.release(form)

    def _forward(self, step: Step) -> Work:
        unit = self.settings.prefill_unit if step.phase == "prefill" else self.settings.decode_unit
        for layer, chosen in enumerate(step.routes):
            yield from self._layer(step, layer, chosen, unit)
        yield from self._use("cpu", "outside", -1, -1, step.rows)

    def _layer(self, step: Step, layer: int, chosen: np.ndarray, unit: str) -> Work:
        self.cache.begin_event()
        asked = self._recall(step, layer)
        early = early_experts(self.cache.budget, self.costs.bytes_of(unit, layer))
        buffers = TokenBuffers(self.trace.experts, max(self._tiers(unit), default=None), early)
        self._ran.clear()
        pending: list[simpy.Process] = []
        size = self.settings.chunk if step.phase == "prefill" else 1
        for where in slice_chunks(len(chosen), size, unit == "npu"):
            part = chosen[where]
            rows, context = len(part), step.position + where.stop
            yield from self._use(unit, "attention", layer, -1, rows, context, asked=asked)
            asked = 0
            yield from self._use("cpu", "router", layer, -1, rows)
            self._look_ahead(layer, part)
            yield from self._use("cpu", "dispatch", layer, -1, rows)
            full = buffers.add(where.start, part)
            if self.cache.background and unit == "cpu":
                yield from self._name([Form(layer, expert, CPU, 0) for expert in np.unique(part).tolist()])
            yield from self._start(layer, full, unit, pending)
        if step.phase != "decode" or unit == "npu":
            # A single decoded token on the CPU is not buffered.
            yield from self._use("cpu", "flush", layer, -1, len(chosen))
        yield from self._use("cpu", "mlp", layer, -1, len(chosen))
        yield from self._start(layer, buffers.flush(), unit, pending)
        yield self.env.all_of(pending)
        yield from self._use("cpu", "combine", layer, -1, len(chosen))

    def _start(self, layer: int, batches: list[Batch], unit: str, pending: list[simpy.Process]) -> Work:
        """Run batches: on the CPU now, on the NPU in its worker."""
        if batches and unit == "npu":
            pending.append(self.env.process(self._in_worker(layer, batches, unit)))
        elif batches:
            yield from self._run(layer, batches, unit)

    def _in_worker(self, layer: int, batches: list[Batch], unit: str) -> Work:
        with self.worker.request() as turn:
            yield turn
            yield from self._run(layer, batches, unit)

    def _run(self, layer: int, batches: list[Batch], unit: str) -> Work:
        """Resident experts run first, so that no load evicts an expert about to run; loaded experts run immediately."""
        forms = [self._form(layer, batch, unit) for batch in batches]
        yield from self._name(forms)
        for i in self.cache.resident_first(forms):
            hit = self.cache.state(forms[i]) is not Cache.MISS
            entry = self.cache.hold(forms[i])
            yield from self._arrived(entry)
            self.cache.use(entry)
            yield from self._use(unit, "expert", layer, forms[i].expert, len(batches[i]), 0, hit, forms[i])
            self.cache.release(forms[i])

    def _form(self, layer: int, batch: Batch, unit: str) -> Form:
        """The form that runs the batch: with a limited cache one that has run in this layer, if it holds the rows."""
        ran = self._ran[batch.expert]
        tier = smallest_tier(self._tiers(unit), len(batch), ran if self.settings.cache_bytes is not None else ())
        ran.add(tier)
        return Form(layer, batch.expert, BACKEND_OF[unit], tier)

    def _name(self, forms: list[Form]) -> Work:
        """Announce forms to the cache, whose requests to the loader take time."""
        if loads := self.cache.name(forms):
            yield self.env.timeout(loads * self._per_load())

    def _submit(self, entry: Entry) -> None:
        self._landing[entry] = self.env.event()
        self.loader.submit(entry)

    def _arrived(self, entry: Entry) -> Work:
        """Wait for a load that has begun, or load now."""
        if entry.landed:
            return
        began = self.env.now
        if entry in self._landing and not self.loader.withdraw(entry):
            yield self._landing[entry]
            self._how[entry.form] = AWAITED
        else:
            thread = "cpu" if entry.form.backend == CPU else "worker"
            yield from self._load(entry, thread, self._loading(entry))
            self._how[entry.form] = LOADED
        self.outcome.stall_s += self.env.now - began

    def _behind(self, entry: Entry, thread: str) -> Work:
        """A load on a loader thread."""
        self._loading_behind += 1
        line = self.costs.behind if entry.form in self._loaded else self.costs.behind_first or self.costs.behind
        yield from self._load(entry, thread, line or self._loading(entry), -(-entry.size // PIECE))
        self._loading_behind -= 1

    def _loading(self, entry: Entry) -> Line:
        return self.costs.loading(UNIT[entry.form.backend], entry.form not in self._loaded)

    def _load(self, entry: Entry, thread: str, line: Line, pieces: int = 1) -> Work:
        with self.storage.request(priority=int(entry.reason is Reason.PREFETCH)) as turn:
            yield turn
            yield from self._read(entry, thread, line, pieces)

    def _read(self, entry: Entry, thread: str, line: Line, pieces: int = 1) -> Work:
        """Read piece by piece; between pieces, the thread first reads loads that have become urgent."""
        began, entry.reading = self.env.now, True
        for piece in range(pieces):
            urgent = self.loader.urgent() if piece and entry.urgency != URGENT else None
            if urgent:
                yield from self._read(urgent, thread, line)
            yield self.env.timeout(line.seconds(entry.size) / pieces)
        self.outcome.loaded_bytes += entry.size
        self._loaded.add(entry.form)
        kind, form = "prefetch" if entry.reason is Reason.PREFETCH else "load", entry.form
        self.outcome.spans.append(SimSpan(kind, thread, self._step, form.layer, form.expert, 0, began, self.env.now))
        self.cache.land(entry)
        self._how[form] = FOUND
        if entry in self._landing:
            self._landing.pop(entry).succeed()

    def _recall(self, step: Step, layer: int) -> int:
        """Fetch the experts that the recorded predictor requested when this layer began; returns how many were not resident."""
        if not self.cache.background or self.settings.prefetch != RECORDED:
            return 0
        return sum(self._ask(target, expert, LAYER_AHEAD * (target - layer)) for target, expert in step.asked.get(layer, ()))

    def _look_ahead(self, layer: int, chosen: np.ndarray) -> None:
        """Train the predictor on the chosen experts, and fetch those likely to be chosen next."""
        if not self.cache.background or not isinstance(self.settings.prefetch, float) or len(chosen) > 1:
            return
        if self._before and self._before[0] == layer - 1:
            self.followers.learn(layer - 1, self._before[1], chosen)
        self._before = (layer, chosen)
        if layer + 1 < self.trace.layers:
            likely = self.followers.probabilities(layer, chosen)
            for expert in np.argsort(-likely, kind="stable")[: 2 * self.trace.top_k].tolist():
                if likely[expert] >= self.settings.prefetch:
                    self._ask(layer + 1, expert, LAYER_AHEAD - float(likely[expert]))

    def _ask(self, layer: int, expert: int, urgency: float) -> bool:
        """Fetch ahead; returns True if that requests a load."""
        form = Form(layer, expert, BACKEND_OF[self.settings.decode_unit], 0)
        new = form not in self.cache
        return self.cache.prefetch(form, urgency) and new

    def _use(
        self,
        unit: str,
        kind: str,
        layer: int,
        expert: int,
        rows: int,
        context: float = 0,
        hit: bool = False,
        form: Form | None = None,
        asked: int = 0,
    ) -> Work:
        """Occupy a unit with work. `form`: the expert that runs; `asked`: number of loads requested during the work."""
        line = self._line(kind, unit)
        if line is None:
            return
        seconds = line.seconds(form.tier if form and form.tier else rows, context)
        with self.units[unit].request() as turn:
            yield turn
            seconds = seconds * (line.beside if self._loading_behind else 1.0) + asked * line.per_load
            if form and form in self._how:
                longer = self.costs.first.get((self._how.pop(form), self._phase, self.mode), 0.0)
                seconds = max(seconds + longer, 0.0)
            began = self.env.now
            yield self.env.timeout(seconds)
        span_kind = "dispatch" if kind == "flush" else kind
        self.outcome.spans.append(SimSpan(span_kind, unit, self._step, layer, expert, rows, began, self.env.now, hit))

    def _per_load(self) -> float:
        """Seconds for a layer to request a chosen expert from the loader."""
        line = self._line("dispatch" if self._phase == "decode" else "flush", "cpu")
        return line.per_load if line else 0.0

    def _line(self, kind: str, unit: str) -> Line | None:
        key = kind, unit, self._phase
        if key not in self._lines:
            self._lines[key] = self.costs.line(*key, self.mode)
        return self._lines[key]

    def _tiers(self, unit: str) -> tuple[int, ...]:
        return self.settings.tiers if unit == "npu" else ()


def simulate_trace(trace: Trace, costs: Costs, settings: Settings) -> Outcome:
    """Replay the trace."""
    return SimulatedEngine(trace, costs, settings).run()


def on_pareto_front(outcomes: list[Outcome]) -> list[bool]:
    """Which outcomes are on the Pareto front of peak cache memory and time per token."""
    summaries = [outcome.summary() for outcome in outcomes]
    return on_front([(s["peak_cache_bytes"], round(s["tpot_ms"] or s["ttft_ms"], 6)) for s in summaries])
