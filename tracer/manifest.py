"""The manifest: what a reader of a recording needs, and the cost of the probes."""

import mmap
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tracer.probes.plan import KERNEL, Row
from tracer.recording import machine
from tracer.recording.format import SCHEMA_VERSION
from tracer.target.watch import Watcher


def account(rows: list[Row], costs: dict[str, float], stats: Callable[[str], tuple[int, int, int]]) -> dict[str, Any]:
    """Fill in hits and ns per hit of every probe; returns the sums, ns.

    `costs`: the result of `calibration.measure`; `stats(program)` returns (runs, ns inside, skipped). A program attached at
    several places counts once. `kernel_ns`: programs on kernel events, which run for every process of the machine.
    """
    total = {"trap_ns": 0, "trap_cold_ns": 0, "bpf_ns": 0, "kernel_ns": 0}
    counted: set[str] = set()
    for row in rows:
        row.hits, inside, row.skipped = stats(row.program)
        row.bpf_ns_per_hit = inside / row.hits if row.hits else 0.0
        kind = "return" if row.at == "return" else row.cost
        row.ns_per_hit, row.ns_per_hit_cold = costs.get(kind, 0.0), costs.get(f"cold_{kind}", 0.0)
        if row.program not in counted:
            counted.add(row.program)
            total["kernel_ns" if row.engine == KERNEL else "bpf_ns"] += inside
            total["trap_ns"] += int(row.hits * row.ns_per_hit)
            total["trap_cold_ns"] += int(row.hits * row.ns_per_hit_cold)
    return {**total, "tracer_cpu_ns": time.process_time_ns(), "calibration_ns": costs}


@cache
def program() -> str:
    """This program's name and version."""
    try:
        return f"moescope {version('moescope')}"
    except PackageNotFoundError:
        return "moescope"


def compose(about: dict[str, Any], watcher: Watcher, cost: dict[str, Any]) -> dict[str, Any]:
    """The whole manifest; its keys are documented in docs/recording.md."""
    probes = watcher.probes
    engines = {
        engine.name: {
            "id": engine.id,
            "operators": probes.state[engine.name].operators,
            "graphs": list(engine.graphs),
            "untold": probes.state[engine.name].untold,
            "libraries": [{"path": p, "build_id": b} for p, b in probes.libraries(engine).items()],
        }
        for engine in probes.engines
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "program": program(),
        "machine": machine.describe(),
        "engines": engines,
        "qnn": watcher.qnn,
        "qnn_logs": watcher.qnn_logs.kept,
        "pmc": watcher.counters.to_json(),
        "io": {"page_bytes": mmap.PAGESIZE, "files": watcher.files.to_json()} if "io" in probes.levels else None,
        "probes": probes.to_json(),
        "functions": probes.named.found,
        "disturbances": watcher.disturbances(),
        "warnings": probes.warnings,
        "threads": list(watcher.threads.values()),
        "cost": cost,
        **about,
    }
