"""The runtime's own log of a run, against which the tracer's records are checked. It is counted independently of the probes."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from runtime.cache_rules.forms import BACKENDS, Form, Reason
from runtime.telemetry.probes import Kind, Phase
from runtime.telemetry.profile import Timers

ROUTING_BYTES = 48 << 20
"""Maximum memory of the routers' choices in a log."""
ENTRY_BYTES = 512
"""Bytes of one choice in addition to its numbers: a tuple, two arrays and what they share."""
MOST_STEPS = 1 << 16
STEP_BYTES = 256
"""Bytes of one step: the object and its large numbers."""
LOG_BYTES = ROUTING_BYTES + MOST_STEPS * STEP_BYTES
"""Maximum memory of a whole log."""


@dataclass(slots=True)
class Step:
    """A forward step: a prefill of n_tokens, or one decoded token. Times are CLOCK_MONOTONIC nanoseconds."""

    seq: int
    phase: Phase
    n_tokens: int
    position: int
    begin_ns: int = 0
    end_ns: int = 0
    sampled: int = -1

    @property
    def duration_ns(self) -> int:
        """Wall time of the step."""
        return self.end_ns - self.begin_ns


@dataclass(slots=True)
class Totals:
    """Totals over all steps of a phase."""

    steps: int = 0
    tokens: int = 0
    ns: int = 0


@dataclass
class RunLog:
    """Counts of everything that the probes also report.

    prefetching: whether it is on, and why. kv_bytes: of the largest sequence. Only the newest steps and routing are kept.
    """

    steps: list[Step] = field(default_factory=list)
    steps_dropped: int = 0
    totals: dict[Phase, Totals] = field(default_factory=lambda: {phase: Totals() for phase in (Phase.PREFILL, Phase.DECODE)})
    kv_bytes: int = 0
    graphs: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    graph_ns: Counter[Kind] = field(default_factory=Counter)
    operators: Counter[Kind] = field(default_factory=Counter)
    expert_runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    loads: Counter[Reason] = field(default_factory=Counter)
    evictions: int = 0
    load_bytes: Counter[Reason] = field(default_factory=Counter)
    expert_rows: int = 0
    padding_rows: int = 0
    resident_bytes: int = 0
    load_ns: int = 0
    stall_ns: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetching: str = ""
    routing: list[tuple[int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    routing_bytes: int = 0
    routing_dropped: int = 0
    lock: Lock = field(default_factory=Lock)
    timers: Timers | None = None

    @property
    def loaded_bytes(self) -> int:
        """Expert bytes read, for any reason."""
        return sum(self.load_bytes.values())

    def graph(self, kind: Kind, backend: int, rows: int = 0, tier: int = 0, duration_ns: int = 0) -> None:
        """Count a session's run over `rows` useful rows, in a static shape of `tier` rows or a dynamic one (0)."""
        with self.lock:
            self.graphs[kind, backend] += 1
            self.graph_ns[kind] += duration_ns
            if kind == Kind.EXPERT:
                self.expert_rows += rows
                self.padding_rows += max(tier - rows, 0)

    def expert(self, form: Form) -> None:
        """Count one run of an expert."""
        with self.lock:
            self.expert_runs[form.layer, form.expert] += 1

    @property
    def next_seq(self) -> int:
        """The number of the next step."""
        return self.steps_dropped + len(self.steps)

    def add(self, step: Step) -> None:
        """Add a finished step. Beyond MOST_STEPS the older half is dropped."""
        total = self.totals[step.phase]
        total.steps, total.tokens, total.ns = total.steps + 1, total.tokens + step.n_tokens, total.ns + step.duration_ns
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            oldest = len(self.steps) // 2
            self.steps_dropped += oldest
            del self.steps[:oldest]

    def route(self, seq: int, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """Add a router's `experts` [n, k] and `weights` [n, k]. Beyond ROUTING_BYTES the older half is dropped and counted."""
        self.routing.append((seq, layer, experts, weights))
        self.routing_bytes += _entry_bytes(experts, weights)
        if self.routing_bytes > ROUTING_BYTES:
            oldest = max(len(self.routing) // 2, 1)
            self.routing_bytes -= sum(_entry_bytes(e, w) for _, _, e, w in self.routing[:oldest])
            self.routing_dropped += oldest
            del self.routing[:oldest]

    def statistics(self) -> dict[str, Any]:
        """The counts and times, ready for JSON, without individual steps and choices."""
        prefill, decode = self.totals[Phase.PREFILL], self.totals[Phase.DECODE]
        asked = self.hits + self.misses
        return {
            "steps": self.next_seq,
            "prompt_tokens": prefill.tokens,
            "prefill_ns": prefill.ns,
            "decode_steps": decode.steps,
            "decode_ns": decode.ns,
            "decode_ns_per_token": round(decode.ns / decode.steps) if decode.steps else None,
            "total_ns": prefill.ns + decode.ns,
            "graph_runs": {
                kind.name.lower(): {BACKENDS[b]: n for (k, b), n in sorted(self.graphs.items()) if k == kind}
                for kind in sorted({kind for kind, _ in self.graphs})
            },
            "graph_ns": {kind.name.lower(): spent for kind, spent in sorted(self.graph_ns.items())},
            "operators": {kind.name.lower(): count for kind, count in sorted(self.operators.items())},
            "qnn_executes": sum(count for (_, backend), count in self.graphs.items() if backend == 2),
            "expert_runs": sum(self.expert_runs.values()),
            "loads": {reason.name.lower(): self.loads[reason] for reason in Reason},
            "loaded_bytes": self.loaded_bytes,
            "load_bytes": {reason.name.lower(): self.load_bytes[reason] for reason in Reason},
            "load_ns": self.load_ns,
            "stall_ns": self.stall_ns,
            "hidden_share": 1 - min(self.stall_ns / self.load_ns, 1) if self.load_ns else None,
            "expert_rows": self.expert_rows,
            "padding_rows": self.padding_rows,
            "evictions": self.evictions,
            "resident_bytes": self.resident_bytes,
            "hits": self.hits,
            "misses": self.misses,
            "prefetched": self.prefetched,
            "prefetching": self.prefetching or None,
            "hit_rate": self.hits / asked if asked else None,
        }

    def write(self, path: Path, engine: dict[str, Any]) -> None:
        """Write the whole log as a JSON file."""
        names = ("seq", "phase", "n_tokens", "position", "begin_ns", "duration_ns", "sampled")
        steps = [{name: getattr(s, name) for name in names} | {"phase": s.phase.name.lower()} for s in self.steps]
        routing = [{"seq": q, "layer": layer, "experts": e.tolist(), "weights": w.tolist()} for q, layer, e, w in self.routing]
        runs = [{"layer": layer, "expert": expert, "runs": n} for (layer, expert), n in sorted(self.expert_runs.items())]
        document = {
            "engine": engine,
            "statistics": self.statistics(),
            "steps": steps,
            "steps_dropped": self.steps_dropped,
            "expert_runs": runs,
            "routing": routing,
            "routing_dropped": self.routing_dropped,
        }
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _entry_bytes(experts: np.ndarray, weights: np.ndarray) -> int:
    return experts.nbytes + weights.nbytes + ENTRY_BYTES
