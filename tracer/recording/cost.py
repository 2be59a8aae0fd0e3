"""What tracing cost, by one computation and in one wording: for the summary, the report, `top` and the tracer's status line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTABLE = 0.05
"""Share of the steps' time, or of the target's CPU time, from which the cost is worth a warning."""


@dataclass(frozen=True)
class Cost:
    """The parts of a manifest's `cost`, in ns; None where it was not measured.

    `probes` and `probes_cold`: traps with warm and with cold caches, and the programs behind them, on the target's threads.
    Both are part of the target's CPU time, which bounds them. `kernel`: programs on kernel events, for every process of the
    machine. `tracer`: its CPU time while recording.
    """

    probes: float
    probes_cold: float
    kernel: float
    tracer: float | None
    target: float | None
    step: float | None
    """Time of all steps."""

    def share(self, ns: float | None, of: float | None) -> float | None:
        """ns / of; None if either is unknown."""
        return ns / of if ns is not None and of else None

    @property
    def of_steps(self) -> tuple[float, float] | None:
        """Time in probes as a share of the steps' time: with warm, and with cold caches; 1 if several threads were in probes."""
        return (min(self.probes / self.step, 1.0), min(self.probes_cold / self.step, 1.0)) if self.step else None

    @property
    def slowdown(self) -> tuple[float, float] | None:
        """By how much longer steps took for the probes, if their threads hit them one after the other: an upper bound."""
        shares = self.of_steps
        return (shares[0] / (1 - shares[0]), shares[1] / (1 - shares[1])) if shares and shares[1] < 1 else None

    @property
    def tracer_of_target(self) -> float | None:
        """The tracer's CPU time as a share of the target's."""
        return self.share(self.tracer, self.target)

    @property
    def is_notable(self) -> bool:
        """Whether steps or CPU time suffered noticeably."""
        return max((self.of_steps or (0.0,))[-1], self.tracer_of_target or 0.0) > NOTABLE


def cost_of(told: Mapping[str, Any], step_ns: float | None = None) -> Cost:
    """The cost from a manifest's `cost`; older ones have only the tracer's CPU time with its set-up."""
    ns = {name: float(value) for name, value in told.items() if isinstance(value, int | float) and value == value}
    programs = ns.get("bpf_ns", 0.0)
    warm = ns.get("trap_ns", 0.0) + programs
    cold = max(warm, ns.get("trap_cold_ns", 0.0) + programs)
    tracer, target = ns.get("tracer_recording_cpu_ns", ns.get("tracer_cpu_ns")), ns.get("target_cpu_ns") or None
    warm, cold = (min(probes, target or probes) for probes in (warm, cold))
    return Cost(warm, cold, ns.get("kernel_ns", 0.0), tracer, target, step_ns or None)


def interval(low: float, high: float, unit: str) -> str:
    """Two figures with their unit, or one if they are equal; decimals where they count."""
    texts = list(dict.fromkeys(f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" for value in (low, high)))
    return f"{' to '.join(texts)} {unit}"


def show_ms(*ns: float) -> str:
    """A time, or an interval of times, in ms."""
    return interval(ns[0] / 1e6, ns[-1] / 1e6, "ms")


def cost_lines(cost: Cost) -> list[str]:
    """The cost in two lines: for the steps, and for the machine."""
    spent = f"{show_ms(cost.probes, cost.probes_cold)} in probes"
    heat = " (cold caches)" if cost.probes_cold > cost.probes else ""
    slower = cost.slowdown
    lines = [f"steps slowed by {interval(100 * slower[0], 100 * slower[1], '%')}{heat}; {spent}" if slower else spent + heat]
    parts = [f"programs on kernel events {show_ms(cost.kernel)}"]
    if cost.tracer is not None:
        share = cost.tracer_of_target
        of = f", {interval(100 * share, 100 * share, '%')} of the target's" if share else ""
        parts.insert(0, f"tracer's CPU {show_ms(cost.tracer)}{of}")
    return [*lines, "; ".join(parts)]


def probes_lately(ns: float, seconds: float) -> str:
    """Time in probes during the last seconds, for live lines."""
    return f"probes {max(0.0, ns) / seconds / 1e9:.1%} of a CPU"
