"""The expert cache while tokens are decoded on the CPU: kept by the extension (runtime/experts/_slots.c), like `CacheRule`.

Prompts use the ExpertCache. Whichever runs next takes over what the other holds; blocks of memory stay where they are.
"""

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import onnxruntime as ort

from runtime.backends.calls import Item, LogEntry
from runtime.backends.graph import Binding, Graph, new_handle, to_ort
from runtime.backends.serving import CpuExpert, CpuExperts
from runtime.cache_rules.eviction import LFRU, LRU
from runtime.cache_rules.forms import CPU, Form, Reason
from runtime.errors import PackageError
from runtime.experts.cache import ExpertCache
from runtime.experts.routing import RULES, LinearScores
from runtime.package.reader import REMEDY, OpenFile
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind

KEPT_LOADS = 1024  # newest ones that the extension keeps for the profile


class Counter(IntEnum):
    """Places in the array of counts that the extension writes; the order is its own. CLOCK is a float: see Policy.ranks."""

    CLOCK = 0
    EVENT = 1
    HITS = 2
    MISSES = 3
    USED_AHEAD = 4
    DEMANDED = 5
    AHEAD_READ = 6
    EVICTED = 7
    LOAD_NS = 8
    STALL_NS = 9
    HOLDING = 10
    LOADED = 11
    OTHERS = 12
    PREDICT_NS = 13
    KNOWN = 14


def prepared(scores: LinearScores, curve: np.ndarray) -> tuple[Any, ...]:
    """Linear scores and their curve [2] as the extension takes them."""
    rows, offsets = bfloat16(scores.rows), np.ascontiguousarray(scores.offsets)
    return rows, offsets, scores.normed, RULES.index(scores.rule), scores.corrections, *map(float, curve)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Floats rounded to their upper 16 bits."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + 0x8000) >> 16).astype(np.uint16)


@dataclass
class Slot:
    """Memory of one expert, and a binding that runs what is in it: from the token's row to `output` [1, H]."""

    block: np.ndarray
    weights: dict[str, np.ndarray]
    output: np.ndarray
    binding: Binding
    handle: int


class SlotCache:
    """The experts in memory within a budget, for one thread. `rows` [E, H]: results by expert, computed from `row`.

    `beside`: an expert that a layer misses is read while the layer runs those it has; otherwise when it is to run.
    """

    def __init__(
        self, cache: ExpertCache[Graph], experts: CpuExperts, log: RunLog, row: ort.OrtValue, rows: np.ndarray, beside: bool
    ):
        package, family = experts.package, experts.package.family
        self.cache, self.experts, self.log, self.row = cache, experts, log, row
        policy: Any = cache.policy
        self.policy: LRU | LFRU = policy
        assert isinstance(self.policy, LRU | LFRU)
        self.size, self.shape = experts.backend.expert_bytes, (family.layers, family.experts)
        self.most = min((cache.budget or 0) // self.size, len(family.routed) * family.experts)
        self.active, self.beside = False, beside
        self.counts: np.ndarray = np.zeros(len(Counter), np.int64)
        self._seen = self.counts.copy()
        self._rank: np.ndarray = np.zeros(self.shape)
        self._held, self._unused = np.full(self.most, -1, np.int32), np.zeros(self.most, np.uint8)
        self._slots: list[Slot] = []
        self._other_ranks: dict[Form, float] = {}
        self._by_address: dict[int, Slot] = {}
        self._aligned, self._bytes = package.expert_stride, package.expert_bytes
        self._loads = np.zeros((KEPT_LOADS, 3), np.int64)  # form, begin and end, ns
        self._rows = rows
        self._native: Any = None
        self._files, self._open = np.full(family.layers + 1, -1, np.int32), list[OpenFile]()

    def items(self, layer: int, chosen: np.ndarray, sources: bytes) -> tuple[Item, list[Item]]:
        """(the request for a token's choice [k] in this layer, the run of each expert in the order in which they are ready)."""
        order = np.zeros(len(chosen), np.int64)
        request = probes.native.SlotWork(self._extension(), layer, chosen, sources)
        runs = [probes.native.SlotWork(self._extension(), layer, order[i : i + 1]) for i in range(len(chosen))]
        entries = [LogEntry(Kind.EXPERT, layer, order[i, ...], (Kind.EXPERT, CPU)) for i in range(len(chosen))]
        return Item(request, LogEntry(Kind.DISPATCH, layer, -1, None)), list(map(Item, runs, entries))

    def foresee(
        self, layer: int, near: bool, k: int, given: tuple[Any, ...], multiplier: float, *read: np.ndarray | None
    ) -> Item:
        """The prediction of a layer's choice of k, as it begins (`near`) or while the one before runs; `given`: of `prepared`.

        read: the state; for the layer before also what it adds to it, times `multiplier`: its shared expert's row, and its choice
        [k] with weights [k], by which rows of experts count that have run.
        """
        prediction = probes.native.Foresight(self._extension(), layer, near, k, *given, multiplier, *read)
        return Item(prediction, LogEntry(Kind.ROUTER, layer, -1, None, "predict"))

    def predict(self, on: bool) -> None:
        """Whether predictions are made, and experts read by them."""
        self._extension().foresee(on)

    @property
    def spent_ns(self) -> int:
        """Time spent on predicting so far."""
        return int(self.counts[Counter.PREDICT_NS])

    def take_over(self) -> None:
        """Hold what the ExpertCache holds."""
        if self.active:
            return
        self.active = True
        if not self._open:
            self._open_files()
        clock, ranks = self.policy.ranks()
        self._rank[...] = -np.inf
        for form, rank in ranks.items():
            if form.backend == CPU:
                self._rank[form.layer, form.expert] = rank
        self._other_ranks = {form: rank for form, rank in ranks.items() if form.backend != CPU}
        self.counts.view(np.float64)[Counter.CLOCK] = clock
        self.counts[Counter.KNOWN] = len(ranks)
        for form, expert, unused in self.cache.lend(CPU):
            assert isinstance(expert, CpuExpert) and expert.block is not None
            self._add(self._slot_of(expert.block), form.layer * self.shape[1] + form.expert, unused)
        self.counts[Counter.OTHERS] = self.cache.reserved

    def hand_back(self) -> None:
        """Give everything to the ExpertCache."""
        if not self.active:
            return
        self._native.settle()
        self.account()
        rows = zip(self._slots, self._held.tolist(), self._unused.tolist(), strict=False)
        kept = [(slot, self._form(place), bool(unused)) for slot, place, unused in rows if place >= 0]
        ranks = {self._form(int(place)): float(self._rank.flat[place]) for place in np.flatnonzero(np.isfinite(self._rank))}
        free = [slot for slot, place in zip(self._slots, self._held.tolist(), strict=False) if place < 0]
        self.active = False
        self._native.clear()
        self._slots = []
        for slot in free:
            self.experts.pool.give(slot.block)
        held = {form for _, form, _ in kept} | set(self.policy.order())
        self.policy.set_ranks(float(self.counts.view(np.float64)[Counter.CLOCK]), self._other_ranks | ranks, held)
        self.cache.take_back([(form, self.experts.expert_in(slot.block, form), unused) for slot, form, unused in kept])

    def account(self) -> None:
        """Add to log and cache what happened since the last call."""
        new = {counter: int(self.counts[counter] - self._seen[counter]) for counter in Counter}
        self._note_loads()
        self._seen[:] = self.counts
        cache, log = self.cache, self.log
        cache.hits, cache.misses = cache.hits + new[Counter.HITS], cache.misses + new[Counter.MISSES]
        cache.event, cache.prefetched = cache.event + new[Counter.EVENT], cache.prefetched + new[Counter.USED_AHEAD]
        cache.begun += new[Counter.DEMANDED] + new[Counter.AHEAD_READ]
        held = int(self.counts[Counter.HOLDING]) * self.size + cache.reserved
        cache.peak = max(cache.peak, held)
        with log.lock:
            for reason, counter in ((Reason.DEMAND, Counter.DEMANDED), (Reason.PREFETCH, Counter.AHEAD_READ)):
                log.loads[reason] += new[counter]
                log.load_bytes[reason] += new[counter] * self._bytes
            log.evictions += new[Counter.EVICTED]
            log.load_ns += new[Counter.LOAD_NS]
            log.stall_ns += new[Counter.STALL_NS]
            log.resident_bytes = held

    def _note_loads(self) -> None:
        """Add loads to the profile, if there is one."""
        last, timers = int(self.counts[Counter.LOADED]), self.log.timers
        if not timers:
            return
        for number in range(max(int(self._seen[Counter.LOADED]), last - KEPT_LOADS), last):
            place, began, ended = self._loads[number % KEPT_LOADS].tolist()
            layer, expert, *_ = self._form(place)
            timers.add("load", began, ended, layer, expert)

    def close(self) -> None:
        """Wait for the reads in flight."""
        if self._native is not None:
            self._native.clear()

    def _extension(self) -> Any:
        if self._native is None:
            half_life = LFRU.HALF_LIFE if isinstance(self.policy, LFRU) else 0
            widen = self.experts.widen if self.experts.package.half_experts else None
            sizes = (*self.shape, self.most, self._bytes, self._aligned, self.size, self.beside, half_life)
            shared = (self.counts, self._rank, self._held, self._unused, self._rows, self._loads, self._files)
            self._native = probes.native.Slots(*sizes, self._add_empty, self._refuse, widen, *shared)
        return self._native

    def _open_files(self) -> None:
        """Once the reader has read from them, it knows whether they support direct reads."""
        package, reader = self.experts.package, self.experts.reader
        for layer in package.family.routed:
            self._open.append(reader.file(package.expert_range(layer, 0).path))
            self._files[layer] = self._open[-1].descriptor
        self._files[-1] = reader.direct

    def _add_empty(self) -> None:
        """One more slot; forms of other backends, which decoding does not run, make room for it."""
        self.cache.leave_room((len(self._slots) + 1) * self.size)
        self.counts[Counter.OTHERS] = self.cache.reserved
        self._add(self._slot_of(self.experts.pool.take(self.experts.block_bytes)), -1, False)

    def _add(self, slot: Slot, place: int, unused: bool) -> None:
        self._slots.append(slot)
        binding, memory = slot.binding, slot.block[len(slot.block) - self._aligned :]
        addresses = (memory.ctypes.data, slot.output.ctypes.data)
        self._extension().add(slot.block, binding.run, binding.raw, *addresses, slot.handle, place, unused)

    def _slot_of(self, block: np.ndarray) -> Slot:
        slot = self._by_address.get(block.ctypes.data)
        if slot is None:
            weights, output = self.experts.weights_in(block), np.zeros((1, self._rows.shape[1]), np.float32)
            inputs = {"rows": self.row} | {name: to_ort(array) for name, array in weights.items()}
            binding = Binding(self.experts.session, inputs, {"out": to_ort(output)})
            slot = self._by_address[block.ctypes.data] = Slot(block, weights, output, binding, new_handle())
        return slot

    def _form(self, place: int) -> Form:
        return Form(*divmod(place, self.shape[1]), CPU, 0)

    def _refuse(self, layer: int, expert: int, error: int) -> NoReturn:
        path = self.experts.package.expert_range(layer, expert).path
        what = f"cannot be read ({os.strerror(error)})" if error > 0 else "ends early"
        raise PackageError(f"{path} {what}: {REMEDY}")
