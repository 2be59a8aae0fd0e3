"""Runs of graphs prepared for one token on the CPU: everything bound, and all that the probes tell of them known beforehand.

The C extension calls them one behind the other. Experts' weights sweep the caches, which makes a step of Python between two
graphs several times as dear as it is in a loop.
"""

from time import monotonic_ns
from typing import Any

import numpy as np

from runtime import probes
from runtime.graph import CPU, Binding, Graph, failure
from runtime.log import RunLog
from runtime.probes import Kind, result_id

Told = tuple[Kind, int, int]
"""Kind, layer and expert of a graph."""
NO_EXPERT = 0
"""Where a call's expert was, for what is no expert."""


class PlainCall:
    """Stands in for the extension's `Call`: a session's run and its binding."""

    def __init__(self, run: Any, binding: Any, *told: Any):
        self.run, self.binding = run, binding


def plain_run(calls: list[PlainCall], caches: list[int], times: np.ndarray, first: int) -> None:
    """Stands in for the extension's `run`; there are no probes without it."""
    for at, call in enumerate(calls, first):
        times[at] = monotonic_ns(), 0
        call.run(call.binding, None)
        times[at, 1] = monotonic_ns()


Call: Any = probes.native("Call", PlainCall)
run: Any = probes.native("run", plain_run)


def prepare(
    graph: Graph, binding: Binding, sources: bytes, chosen: np.ndarray | None = None, weights: np.ndarray | None = None
) -> Any:
    """A call of the graph. `sources`: tensor identities of its operator; a router's choice [1, k] (int64) and weights are told, too."""
    kind, layer, expert = graph.told
    result = result_id(kind, layer, expert)
    whole = binding.run, binding.raw, graph.handle, kind, layer, expert, graph.backend, result, sources
    return Call(*whole, chosen, weights)


class TokenRun:
    """Runs a token's calls, `most` of them, and keeps their times until the token is through."""

    def __init__(self, log: RunLog, most: int):
        self.log, self._times = log, np.zeros((most, 2), np.int64)
        self._ran: list[Told] = []

    def run(self, calls: list[Any], told: list[Told], caches: list[int]) -> None:
        """Run calls in order. `caches`: where each one's expert was when its layer began, 0 for what is no expert."""
        first = len(self._ran)
        self._ran += told
        try:
            run(calls, caches, self._times, first)
        except BaseException as error:
            failed = next(at for at in range(first, len(self._ran)) if not self._times[at, 1])
            kind, layer, _ = self._ran[failed]
            del self._ran[failed:]
            if isinstance(error, Exception):
                raise failure(kind, layer, error) from None
            raise

    def account(self) -> None:
        """Tell the log of everything that ran since the last time."""
        log, times = self.log, self._times[: len(self._ran)].tolist()
        with log.lock:
            for (kind, layer, expert), (began, ended) in zip(self._ran, times, strict=True):
                log.operators[kind] += 1
                log.graphs[kind, CPU] += 1
                log.graph_ns[kind] += ended - began
                if kind is Kind.EXPERT:
                    log.expert_rows += 1
                    log.expert_runs[layer, expert] += 1
        if log.timers:
            for (kind, layer, expert), (began, ended) in zip(self._ran, times, strict=True):
                log.timers.add(kind.name.lower(), began, ended, layer, expert)
        self._ran.clear()
