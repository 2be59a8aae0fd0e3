"""Measures every subgraph kind on every backend of the package, by number of rows and by how experts are loaded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median_low
from time import monotonic_ns
from typing import Any

import numpy as np

from runtime.backends.cpu import CpuBackend
from runtime.backends.graph import Backend
from runtime.backends.serving import CpuExperts
from runtime.cache_rules.forms import BACKENDS, CPU, HTP, Form
from runtime.models import Family
from runtime.package.convert import Progress
from runtime.package.layout import Package, expert_name, layer_name
from runtime.placement.costs import LOAD, RESIDENT, RUN, Cost, CostTable, machine_key
from runtime.placement.options import Options
from runtime.step.attention import Sequence, make_attention, past_tier
from runtime.telemetry.log import RunLog

LONGEST_CELL_NS = 2_000_000_000
FEWEST = 3
MAPPED, READ, CONTEXT = "mapped", "read", "context"
CPU_NAME, HTP_NAME = BACKENDS[CPU], BACKENDS[HTP]


Cell = tuple[Cost, Callable[[], Callable[[], Any]]]
"""A cell to measure, still without times, and a function that creates the timed call, so that only one is in memory."""


class Tuning:
    """The cells of one package on this machine."""

    def __init__(self, package: Package, options: Options, npu: bool):
        self.package, self.options, self.npu = package, options, npu
        self.family: Family = package.family
        self.log = RunLog()
        self.cpu = CpuBackend(package, options.threads)
        self.routed = self.family.routed[0]
        self._random = np.random.default_rng(0)

    def measure(self, runs: int, progress: Progress | None = None) -> CostTable:
        """Time every cell, one after another."""
        cells = list(self.cells())
        costs = []
        for done, cell in enumerate(cells, 1):
            costs.append(measure_cell(*cell, runs))
            if progress:
                progress(done, len(cells))
        this_machine = machine_key(self.options.threads, self.npu)
        return CostTable(self.package.manifest["fingerprint"], this_machine, self.options.chunk, self.family.top_k, tuple(costs))

    def cells(self) -> Iterator[Cell]:
        """Attention and experts on both backends, all other kinds on the CPU, where they always run."""
        chunk = self.options.chunk
        for rows in sorted({1, chunk}):
            yield self._attention(self.cpu, rows, 0)
            for kind, name, feed in self._others():
                yield Cost(kind, CPU_NAME, RESIDENT, RUN, 0, rows), partial(self._graph_run, self.cpu, name, {}, feed, rows)
        for mapped in (True, False):
            yield from self._cpu_experts(mapped)
        if self.npu:
            yield from self._npu_cells()

    def _npu_cells(self) -> Iterator[Cell]:
        from runtime.backends.htp import HtpBackend

        npu = HtpBackend(self.package, self.options.tiers, soc=self.options.soc)
        for rows in sorted({1, self.options.chunk}):
            yield self._attention(npu, rows, rows)
        name = expert_name(self.routed, 0)
        for tier in self.options.tiers:
            dims = {"T": tier}
            yield Cost("expert", HTP_NAME, CONTEXT, LOAD, tier, 0), partial(self._npu_load, npu, name, dims)
            yield Cost("expert", HTP_NAME, CONTEXT, RUN, tier, tier), partial(self._graph_run, npu, name, dims, "rows", tier)

    def _others(self) -> list[tuple[str, str, str]]:
        """(kind, subgraph, its input) of the kinds that stay on the CPU."""
        family = self.family
        graphs = [("router", layer_name("router", self.routed), "hidden"), ("head", "head", "hidden")]
        if family.shared_width:
            graphs.append(("shared", layer_name("shared", self.routed), "rows"))
        if family.dense:
            graphs.append(("mlp", layer_name("mlp", min(family.dense)), "hidden"))
        return graphs

    def _graph_run(self, backend: Backend, name: str, dims: dict[str, int], feed: str, rows: int) -> Callable[[], Any]:
        session, feeds = backend.session(name, dims), {feed: self._rows(rows)}
        return lambda: session.run(None, feeds)

    def _attention(self, backend: Backend, rows: int, tier: int) -> Cell:
        return Cost("attention", BACKENDS[backend.id], RESIDENT, RUN, tier, rows), partial(self._attend, backend, rows)

    def _attend(self, backend: Backend, rows: int) -> Callable[[], Any]:
        """A run of attention over a half-filled past."""
        family, chunk = self.family, self.options.chunk
        sequence = Sequence(family, min(family.context, past_tier(2 * chunk)))
        attention = make_attention(family, backend, self.log, rows)
        hidden, position = self._rows(rows), max(min(sequence.capacity // 2, sequence.capacity - rows), 0)
        return lambda: attention.run(0, hidden, sequence, position)

    def _cpu_experts(self, mapped: bool) -> Iterator[Cell]:
        """Loads, and runs by rows: powers of two and the tiers."""
        form = MAPPED if mapped else READ
        top = max(self.options.tiers)
        counts = {1 << i for i in range(top.bit_length())} | set(self.options.tiers)
        yield Cost("expert", CPU_NAME, form, LOAD, 0, 0), partial(self._cpu_load, mapped)
        for rows in sorted(count for count in counts if count <= top):
            yield Cost("expert", CPU_NAME, form, RUN, 0, rows), partial(self._cpu_run, mapped, rows)

    def _cpu_load(self, mapped: bool) -> Callable[[], Any]:
        experts, turn = CpuExperts(self.cpu, self.log, mapped), iter(range(1 << 30))

        def load() -> None:
            form = Form(self.routed, next(turn) % self.family.experts, CPU, 0)
            experts.give_back(experts.load(form))

        return load

    def _cpu_run(self, mapped: bool, rows: int) -> Callable[[], Any]:
        expert = CpuExperts(self.cpu, self.log, mapped).load(Form(self.routed, 0, CPU, 0))
        feeds = {"rows": self._rows(rows)}
        return lambda: expert.run(feeds, rows)

    def _npu_load(self, npu: Backend, name: str, dims: dict[str, int]) -> Callable[[], Any]:
        npu.session(name, dims)
        return lambda: npu.session(name, dims)

    def _rows(self, rows: int) -> np.ndarray:
        return self._random.standard_normal((rows, self.family.hidden)).astype(np.float32)


def measure_cell(cost: Cost, prepare: Callable[[], Callable[[], Any]], runs: int) -> Cost:
    """The cell with its times: one warm-up run, then `runs` runs; slow cells get fewer, but at least FEWEST."""
    run = prepare()
    run()
    times: list[int] = []
    while len(times) < runs and (len(times) < FEWEST or sum(times) < LONGEST_CELL_NS):
        began = monotonic_ns()
        run()
        times.append(monotonic_ns() - began)
    return replace(cost, median_ns=median_low(times), least_ns=min(times), most_ns=max(times), count=len(times))
