"""A token's prepared work on the CPU: all calls are bound, together with what the probes report of them.

The C extension runs it item by item: reading experts' weights evicts the processor's caches, which makes Python code between two
graphs several times as expensive as in a loop.
"""

from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from runtime.backends.graph import Binding, Graph, run_error
from runtime.errors import PackageError
from runtime.telemetry import probes
from runtime.telemetry.log import RunLog
from runtime.telemetry.probes import Kind, result_id


class PlainCall:
    """Replaces the extension's `Call` where it is not built: a session's run and its binding."""

    def __init__(self, run: Any, binding: Any, *probe_arguments: Any):
        self.run, self.binding = run, binding


class PlainChoice:
    """Replaces the extension's `Choice`: calls the expert whose number `chosen`, one int64, holds at that time.

    `calls`: by expert; `prepare(expert)` makes those that are None.
    """

    binding = None

    def __init__(self, calls: list[Any], prepare: Callable[[int], Any], chosen: np.ndarray):
        self.calls, self.prepare, self.chosen = calls, prepare, chosen

    def run(self, binding: None, options: None) -> None:
        """Run the chosen expert."""
        expert = int(self.chosen)
        call = self.calls[expert] or self.prepare(expert)
        call.run(call.binding, None)


class PlainCombine:
    """Replaces the extension's `Combine`; see `plain_combine`."""

    binding = None

    def __init__(self, result: int, sources: bytes, results: bytes, *summed: Any):
        self.chosen, self.weights, self.rows, self.common, self.multiplier, self.attended, self.out = summed

    def run(self, binding: None, options: None) -> None:
        """Compute the sum."""
        common = None if self.common is None else self.common[None]
        outputs = self.rows[self.chosen][None]
        plain_combine(self.weights[None], outputs, common, self.multiplier, self.attended[None], self.out[None])


def plain_run(items: list[Any], caches: list[int], times: np.ndarray, first: int) -> None:
    """Replaces the extension's `run`, without its probes."""
    for row, item in enumerate(items, first):
        times[row] = monotonic_ns(), 0
        if item.run:
            item.run(item.binding, None)
        times[row, 1] = monotonic_ns()


def plain_combine(
    weights: np.ndarray,
    outputs: np.ndarray,
    common: np.ndarray | None,
    multiplier: float,
    attended: np.ndarray,
    out: np.ndarray,
) -> None:
    """Replaces the extension's `combine`, with the same roundings in the same order."""
    np.multiply(weights[:, :1], outputs[:, 0], out=out)
    for j in range(1, weights.shape[1]):
        out += weights[:, j, None] * outputs[:, j]
    if common is not None:
        out += common
    if multiplier != 1:
        out *= np.float32(multiplier)
    out += attended


Call: Any = probes.native_or("Call", PlainCall)
Choice: Any = probes.native_or("Choice", PlainChoice)
Combine: Any = probes.native_or("Combine", PlainCombine)
run: Any = probes.native_or("run", plain_run)
_combine: Any = probes.native_or("combine", plain_combine)


def combine_experts(
    weights: np.ndarray, outputs: np.ndarray, common: np.ndarray | None, multiplier: float, attended: np.ndarray
) -> np.ndarray:
    """Residual [n, H] plus the experts' outputs [n, k, H] by router weight [n, k], plus the shared expert's [n, H]; all float32.

    Rounds after each operation, in the router's order: bits depend neither on the number of rows nor on which expert ended first.
    """
    out = np.empty_like(attended)
    _combine(weights, outputs, common, multiplier, attended, out)
    return out


class LogEntry(NamedTuple):
    """How the log counts an item. `expert`: a number, or the array that a router writes; `graph`: kind and backend of a call.

    `stage`: its name in a profile, where it does not run an operator.
    """

    kind: Kind
    layer: int
    expert: int | np.ndarray
    graph: tuple[Kind, int] | None
    stage: str = ""


class Item(NamedTuple):
    """A call, a choice or a sum."""

    work: Any
    entry: LogEntry


def prepare_call(
    graph: Graph, binding: Binding, sources: bytes, chosen: np.ndarray | None = None, weights: np.ndarray | None = None
) -> Item:
    """A call of the graph. `sources`: tensor identities of its operator; a router's choice [1, k] and weights are probed too."""
    kind, layer, expert, backend = graph.kind, graph.layer, graph.expert, graph.backend
    result = result_id(kind, layer, expert)
    call = Call(binding.run, binding.raw, graph.handle, kind, layer, expert, backend, result, sources, chosen, weights)
    return Item(call, LogEntry(kind, layer, expert, (kind, backend)))


def operator_call(kind: Kind, layer: int, sources: bytes) -> Item:
    """An operator without a graph, for the probes and the log."""
    return Item(Call(None, None, 0, kind, layer, -1, 0, result_id(kind, layer), sources), LogEntry(kind, layer, -1, None))


class Tally:
    """What the log counts of items, in the order in which they run; adding it must be cheap, with cold caches too."""

    def __init__(self, entries: list[LogEntry]):
        self.entries, self._operators = entries, [*Counter(entry.kind for entry in entries if not entry.stage).items()]
        self._graphs = [*Counter(entry.graph for entry in entries if entry.graph).items()]
        calls = sorted((entry.kind, row) for row, entry in enumerate(entries) if entry.graph)
        self._rows = np.array([row for _, row in calls], np.intp)
        firsts = {kind: place for place, (kind, _) in reversed([*enumerate(calls)])}
        self._kinds, self._firsts = sorted(firsts), np.array(sorted(firsts.values()), np.intp)
        self._experts = [entry for entry in entries if entry.kind is Kind.EXPERT]

    def add_to(self, log: RunLog, times: np.ndarray) -> None:
        """Count the items, whose begins and ends, ns, are `times` [n, 2]."""
        spent = (times[:, 1] - times[:, 0])[self._rows]
        totals = np.add.reduceat(spent, self._firsts).tolist() if self._kinds else []
        with log.lock:
            for kind, count in self._operators:
                log.operators[kind] += count
            for graph, count in self._graphs:
                log.graphs[graph] += count
            for kind, total in zip(self._kinds, totals, strict=True):
                log.graph_ns[kind] += total
            for entry in self._experts:
                log.expert_runs[entry.layer, int(entry.expert)] += 1
            log.expert_rows += len(self._experts)
        if log.timers:
            for entry, (began, ended) in zip(self.entries, times.tolist(), strict=True):
                log.timers.add(entry.stage or entry.kind.name.lower(), began, ended, entry.layer, int(entry.expert))


class TokenItems:
    """All items of a token, if they are the same for every token, with what is prepared once."""

    def __init__(self, work: list[Any], caches: list[int], entries: list[LogEntry]):
        self.work, self.caches, self.tally = work, caches, Tally(entries)


class TokenRun:
    """Items waiting to run for a token, at most `most` in all; their times are kept until the token is done."""

    def __init__(self, log: RunLog, most: int):
        self.log, self._times = log, np.zeros((most, 2), np.int64)
        # Without the items themselves, so that an evicted expert's session is freed at once.
        self._ran: list[LogEntry] = []
        self._waiting: list[Any] = []
        self._caches: list[int] = []
        self._whole: TokenItems | None = None

    def put(self, item: Item, cache: int = 0) -> None:
        """Append an item. `cache`: its expert's state when the layer began."""
        self._ran.append(item.entry)
        self._waiting.append(item.work)
        self._caches.append(cache)

    def flush(self) -> None:
        """Run all waiting items."""
        first = len(self._ran) - len(self._waiting)
        try:
            self._run(self._waiting, self._caches, first)
        finally:
            self._waiting.clear()
            self._caches.clear()

    def take_waiting(self) -> TokenItems:
        """The items that were put, of a whole token, instead of running them."""
        items = TokenItems(self._waiting, self._caches, self._ran)
        self._ran, self._waiting, self._caches = [], [], []
        return items

    def run_all(self, items: TokenItems) -> None:
        """Run a whole token's items; none may have been put."""
        self._ran = items.tally.entries.copy()
        self._run(items.work, items.caches, 0)
        self._whole = items

    def _run(self, work: list[Any], caches: list[int], first: int) -> None:
        try:
            run(work, caches, self._times, first)
        except BaseException as error:
            row = next((row for row in range(first, len(self._ran)) if not self._times[row, 1]), first)
            failed = self._ran[row]
            del self._ran[row:]
            if isinstance(error, Exception) and not isinstance(error, PackageError):
                raise run_error(failed.kind, failed.layer, error) from None
            raise

    def account(self) -> None:
        """Add everything that ran since the last call to the log; drops items that still wait after an error."""
        del self._ran[len(self._ran) - len(self._waiting) :]
        self._waiting.clear()
        self._caches.clear()
        tally = self._whole.tally if self._whole else Tally(self._ran)
        tally.add_to(self.log, self._times[: len(tally.entries)])
        self._ran = []
        self._whole = None
