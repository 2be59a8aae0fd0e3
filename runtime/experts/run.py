"""Runs experts: batches of rows through cached sessions, on the calling thread or on the NPU's worker."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np
import onnxruntime as ort

from runtime.backends.calls import Choice, Item, LogEntry, prepare_call
from runtime.backends.cpu import CpuBackend, return_freed_memory
from runtime.backends.graph import Backend, Graph
from runtime.backends.operators import Operator, made_from
from runtime.backends.serving import CpuExperts
from runtime.cache_rules.batches import Batch, TokenBuffers, early_experts
from runtime.cache_rules.eviction import POLICIES
from runtime.cache_rules.forms import CPU, HTP, Form, Reason
from runtime.errors import BudgetError
from runtime.experts.cache import ExpertCache
from runtime.experts.loader import ExpertLoader
from runtime.package.layout import Package, expert_name
from runtime.placement.costs import Flush
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind
from runtime.units import show_bytes

# Number of loading threads. A disk reads large experts one by one as fast as two at once, and then the first can run sooner.
LOADERS = 1


@dataclass
class LayerWork:
    """One layer's rows while experts run: `normed` [n, H] in, `outputs` [n, k, H] out.

    used: the chosen experts. ran: the forms that ran, by expert.
    """

    layer: int
    buffers: TokenBuffers
    normed: np.ndarray
    outputs: np.ndarray
    used: set[int] = field(default_factory=set)
    ran: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    pending: list[Future[None]] = field(default_factory=list)

    def settle(self) -> None:
        """Wait for the batches that run."""
        for future in self.pending:
            future.result()


class LoadLog:
    """Reports the cache's loads and evictions to probes and log, on the threads that perform them."""

    def __init__(self, log: RunLog, package: Package, backends: dict[int, Backend]):
        self.log = log
        # A form may take more memory than the bytes read for it.
        self._read = {i: package.expert_bytes if i == CPU else backend.expert_bytes for i, backend in backends.items()}
        self._began: dict[Form, int] = {}

    def load_begin(self, form: Form, size: int, reason: Reason) -> None:
        """A form is about to be read."""
        read = self._read[form.backend]
        self._began[form] = monotonic_ns()
        with self.log.lock:
            self.log.loads[reason] += 1
            self.log.load_bytes[reason] += read
        probes.load_begin(form.layer, form.expert, read, reason, form.backend)

    def load_end(self, form: Form, size: int, resident: int) -> None:
        """The form can run."""
        probes.load_end(form.layer, form.expert, size, resident)
        began, ended = self._began.pop(form), monotonic_ns()
        if self.log.timers:
            self.log.timers.add("load", began, ended, form.layer, form.expert)
        with self.log.lock:
            self.log.resident_bytes = resident
            self.log.load_ns += ended - began

    def evicted(self, form: Form, size: int, resident: int) -> None:
        """The form's session was dropped."""
        probes.evict(form.layer, form.expert, size, resident)
        with self.log.lock:
            self.log.resident_bytes = resident
            self.log.evictions += 1

    def waited(self, duration_ns: int) -> None:
        """A layer waited for a load."""
        self.log.stall_ns += duration_ns


class Experts:
    """All experts of a model, with one cache. Within a layer, only one thread runs experts and uses the cache."""

    def __init__(
        self,
        package: Package,
        backends: dict[int, Backend],
        budget: int | None,
        log: RunLog,
        policy: str,
        background: bool,
        flush: Flush,
    ):
        self.family, self.backends, self.log, self.flush = package.family, backends, log, flush
        self._check(budget)
        self.loader = ExpertLoader(LOADERS) if background else None
        cpu, watcher = backends.get(CPU), LoadLog(log, package, backends)
        if budget is not None:
            return_freed_memory()
        between = self.loader.yield_to_urgent if self.loader else lambda: None
        self.cpu = CpuExperts(cpu, log, budget is None, between) if isinstance(cpu, CpuBackend) else None
        self.cache: ExpertCache[Graph] = ExpertCache(
            budget, self.bytes_of, self._load, watcher, POLICIES[policy](), self.loader, self._unload
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="moescope-npu") if HTP in backends else None
        experts, layers = range(self.family.experts), range(self.family.layers)
        self._forms = [[Form(layer, expert, CPU, 0) for expert in experts] for layer in layers]

    def bytes_of(self, form: Form) -> int:
        """Weight bytes of an expert in the backend's precision."""
        return self.backends[form.backend].expert_bytes

    def preload(self, backend: Backend) -> None:
        """Load every expert in the backend's smallest shape."""
        for layer in self.family.routed:
            for expert in range(self.family.experts):
                form = Form(layer, expert, backend.id, min(backend.tiers, default=0))
                self.cache.acquire(form, Reason.STARTUP)
                self.cache.release(form)

    def begin(self, layer: int, n_tokens: int, backend: Backend) -> LayerWork:
        """Begin a layer of n_tokens rows."""
        self.cache.begin_event()
        hidden, top_k = self.family.hidden, self.family.top_k
        early = early_experts(self.cache.budget, backend.expert_bytes)
        buffers = TokenBuffers(self.family.experts, max(backend.tiers, default=None), early)
        normed = np.empty((n_tokens, hidden), np.float32)
        return LayerWork(layer, buffers, normed, np.empty((n_tokens, top_k, hidden), np.float32))

    def dispatch(self, work: LayerWork, backend: Backend, first: int, normed: np.ndarray, chosen: np.ndarray) -> None:
        """Put a chunk's rows into their experts' buffers; full buffers run."""
        with Operator(self.log, Kind.DISPATCH, work.layer, len(normed), made_from(Kind.DISPATCH, work.layer)):
            work.normed[first : first + len(normed)] = normed
            full = [(batch, work.normed[batch.tokens]) for batch in work.buffers.add(first, chosen)]
            new = set(np.unique(chosen).tolist()) - work.used
            work.used |= new
            if self.cache.background and not backend.tiers:
                # Read while the next chunks attend.
                self.cache.name([self._forms[work.layer][expert] for expert in sorted(new)])
        if full:
            self._start(work, backend, full)

    def finish(self, work: LayerWork, backend: Backend) -> None:
        """Run the partial buffers, and wait for everything."""
        with Operator(self.log, Kind.DISPATCH, work.layer, len(work.normed), made_from(Kind.DISPATCH, work.layer)):
            rest = [(batch, work.normed[batch.tokens]) for batch in work.buffers.flush()]
        if rest:
            self._start(work, backend, rest)
        work.settle()

    def choices(self, layer: int, chosen: np.ndarray, row: ort.OrtValue, outputs: list[ort.OrtValue]) -> list[Item]:
        """Items that run a token's experts of a layer by the router's choice, `chosen` [k]; for engines that keep all experts."""
        calls: list[Any] = [None] * self.family.experts

        def prepared(expert: int) -> Any:
            form = self._forms[layer][expert]
            graph = self.cache.acquire(form, Reason.STARTUP)
            self.cache.release(form)
            calls[expert] = self._prepared(graph, row, outputs).work
            return calls[expert]

        places = [chosen[place, ...] for place in range(len(chosen))]
        return [Item(Choice(calls, prepared, place), LogEntry(Kind.EXPERT, layer, place, (Kind.EXPERT, CPU))) for place in places]

    @staticmethod
    def _prepared(graph: Graph, row: ort.OrtValue, outputs: list[ort.OrtValue]) -> Item:
        if graph.item is None:
            binding = graph.token_binding("rows", row)
            binding.output("out", outputs[graph.expert])
            graph.item = prepare_call(graph, binding, made_from(Kind.EXPERT, graph.layer, graph.expert))
        item: Item = graph.item
        return item

    def close(self) -> None:
        """Stop the worker and the loader."""
        if self._worker:
            self._worker.shutdown()
        if self.loader:
            self.loader.close()
        if self.cpu:
            self.cpu.close()

    def _start(self, work: LayerWork, backend: Backend, batches: list[tuple[Batch, np.ndarray]]) -> None:
        if backend.id == HTP and self._worker:
            work.pending.append(self._worker.submit(self._run_all, work, backend, batches))
        else:
            self._run_all(work, backend, batches)

    def _run_all(self, work: LayerWork, backend: Backend, batches: list[tuple[Batch, np.ndarray]]) -> None:
        forms = [self._form(work, backend, batch) for batch, _ in batches]
        self.cache.name(forms)
        for i in self.cache.resident_first(forms):
            self._run(work, forms[i], *batches[i])

    def _form(self, work: LayerWork, backend: Backend, batch: Batch) -> Form:
        """The form that runs the batch: dynamic on a backend without tiers, else on the flush's choice of backend and tier."""
        if not backend.tiers:
            return Form(work.layer, batch.expert, backend.id, 0)
        ran = work.ran.setdefault(batch.expert, set())
        place = self.flush.place(len(batch), ran)
        ran.add(place)
        return Form(work.layer, batch.expert, *place)

    def _run(self, work: LayerWork, form: Form, batch: Batch, rows: np.ndarray) -> None:
        n, layer, expert = len(batch), form.layer, form.expert
        with Operator(self.log, Kind.EXPERT, layer, n, made_from(Kind.EXPERT, layer, expert), expert):
            probes.expert_begin(layer, expert, n, self.cache.state(form), form.backend, form.tier)
            graph = self.cache.acquire(form)
            if form.tier > n:
                rows = np.concatenate([rows, np.zeros((form.tier - n, rows.shape[1]), np.float32)])
            try:
                work.outputs[batch.tokens, batch.slots] = graph.run({"rows": rows}, n)[0][:n]
            finally:
                self.cache.release(form)
            probes.expert_end(layer, expert)
        self.log.expert(form)

    def _load(self, form: Form) -> Graph:
        if form.backend == CPU and self.cpu:
            return self.cpu.load(form)
        session = self.backends[form.backend].session(expert_name(form.layer, form.expert), {"T": form.tier} if form.tier else {})
        return Graph(session, self.log, Kind.EXPERT, form.layer, form.expert, form.backend, form.tier)

    def _unload(self, graph: Graph) -> None:
        if self.cpu:
            self.cpu.give_back(graph)

    def _check(self, budget: int | None) -> None:
        """Raise BudgetError if the budget cannot hold a layer's top-k experts, which a decode step needs at once."""
        if budget is None:
            return
        expert_bytes = max(self.bytes_of(Form(0, 0, backend, 0)) for backend in self.backends)
        if budget < expert_bytes * self.family.top_k:
            raise BudgetError(
                f"expert cache of {show_bytes(budget)} is too small: "
                f"one layer uses {self.family.top_k} experts of {show_bytes(expert_bytes)}, "
                f"give at least {show_bytes(expert_bytes * self.family.top_k)}"
            )
