"""Drawn runs with power sensors of known laws: requests, readings with jitter, noise, resolution and delay, the truth."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.questions.energy import fitted
from analyzer.questions.energy_readings import RailReadings, rail_readings, thinned
from analyzer.questions.energy_running import EXPONENTS, Activity, Growth, Running
from analyzer.records.intervals import Intervals, overlaps

MS, S = 1_000_000, 1_000_000_000
IDLE_S = 1.0


@dataclass(frozen=True)
class DrawnRun:
    """What a recording would hold of a run, and the truth: joules by phase."""

    running: Running
    readings: RailReadings
    joules: dict[str, float]
    tokens: dict[str, int]


def drawn_steps(rng: np.random.Generator, even: bool = False) -> tuple[dict[str, Intervals], dict[str, Intervals]]:
    """(steps by phase, CPU time by phase): requests of a prefill and decode steps that compute a share of their time.

    `even`: steps of a phase that have one length and follow each other at once, so that a sensor may beat with them.
    """
    at = int(IDLE_S * S)
    steps: dict[str, list[tuple[int, int]]] = {"prefill": [], "decode": []}
    cpu: dict[str, list[tuple[int, int]]] = {"prefill": [], "decode": []}
    share, decode_ms = rng.uniform(0.3, 1.0), rng.uniform(8, 60)
    for _ in range(rng.integers(2, 6)):
        for phase, count, usual_ms in (("prefill", 1, rng.uniform(300, 1500)), ("decode", rng.integers(40, 150), decode_ms)):
            for _ in range(count):
                length, pause = int(usual_ms * (1 if even else rng.uniform(0.8, 1.25)) * MS), 0 if even else rng.uniform(0, 1)
                steps[phase].append((at, at + length))
                cpu[phase].append((at, at + (length if phase == "prefill" else int(share * length))))
                at += length + int(pause * MS)
        at += int(rng.uniform(20, 400) * MS)
    as_intervals = [{name: Intervals.of(*np.array(rows).T) for name, rows in each.items()} for each in (steps, cpu)]
    return as_intervals[0], as_intervals[1]


def drawn_run(
    seed: int, hz: float, own_hz: float = 0.0, kinds: bool = False, depends: bool = True, even: bool = False, uneven: float = 0.0
) -> DrawnRun:
    """A run that a sensor of a drawn kind watched at `hz`.

    `own_hz`: a power sensor that measures as often, however often it is read; `uneven`: by this share of its period at other
    moments. `even`: steps of one length. `kinds`: on two kinds of CPUs whose clock changes, and on
    which power `depends`.
    """
    rng = np.random.default_rng(seed)
    steps, cpu = drawn_steps(rng, even)
    running = law = Running.of_spans(steps, {(phase, ""): span for phase, span in cpu.items()})
    watts = np.append(rng.uniform(0.5, 4), rng.uniform(1, 8, len(cpu)))
    end = max(int(span.end.max()) for span in steps.values()) + S // 2
    delay = rng.choice([0.0, rng.uniform(0, 3 / hz)])
    if kinds:
        running, law = drawn_kinds(np.random.default_rng([seed, 1]), steps, cpu, watts[1:], end, depends)
        watts = np.append(watts[0], np.ones(len(law.activities)))
    if own_hz:
        readings = sampled_readings(rng, law, watts, end, hz, own_hz, uneven)
    else:
        readings = drawn_readings(rng, law, watts, end, hz, delay)
    joules = {phase: float(law.amounts(phase) @ watts) for phase in steps}
    return DrawnRun(running, readings, joules, {name: len(span) for name, span in steps.items()})


def drawn_kinds(
    rng: np.random.Generator,
    steps: dict[str, Intervals],
    cpu: dict[str, Intervals],
    watts: np.ndarray,
    end: int,
    depends: bool,
) -> tuple[Running, Running]:
    """(a program that moves between two kinds of CPUs whose clock changes, as recorded; its joules above idle power)."""
    edges = np.append(0, np.cumsum(rng.uniform(0.2, 2, 5 * (end // S + 2)) * S).astype(np.int64))
    blocks, clock = Intervals.of(edges[:-1], edges[1:]), rng.uniform(0.4, 1, len(edges) - 1)
    on_big = rng.uniform(size=len(clock)) < 0.5
    little, power = (rng.uniform(0.15, 0.6), rng.uniform(1, 3)) if depends else (1.0, 0.0)
    recorded, law = [], []
    for (phase, span), each in zip(cpu.items(), watts.tolist(), strict=True):
        met = overlaps(span, blocks)
        for kind, factor, chosen in (("big", 1.0, on_big[met.right]), ("little", little, ~on_big[met.right])):
            pieces, share = Intervals.of(met.begin[chosen], met.end[chosen]), clock[met.right[chosen]]
            if len(pieces):
                recorded += [Activity(phase, kind, Growth.of(pieces, share**n), n) for n in (0, *EXPONENTS)]
                law.append(Activity(phase, kind, Growth.of(pieces, each * factor * share**power)))
    return Running(tuple(recorded), steps), Running(tuple(law), steps)


def drawn_readings(
    rng: np.random.Generator, running: Running, watts: np.ndarray, end: int, hz: float, delay: float
) -> RailReadings:
    """Readings by a counter or by a power sensor with noise; other programs draw power too, that wanders."""
    ts = np.arange(0, end, S / hz)
    ts = np.sort(ts + rng.uniform(0, 0.02 * S / hz, len(ts)))  # as the recorder notes it
    shown = (
        ts - delay * S + rng.uniform(-1, 1, len(ts)) * rng.choice([0.1, 1.0]) * min(1.0, 100 / hz) * MS
    )  # when the sensor took it
    begin, close = shown[:-1], shown[1:]
    joules = running.seconds(begin.astype(np.int64), close.astype(np.int64)) @ watts
    wander, size, lasting = 0.0, rng.uniform(0, 0.15), np.exp(-1 / (hz * rng.uniform(0.05, 2)))
    other = np.empty(len(joules))
    for i, shock in enumerate(rng.normal(size=len(joules)) * size * np.sqrt(1 - lasting**2)):
        wander = wander * lasting + shock
        other[i] = wander
    joules = joules + other * (close - begin) / S
    of_counter = bool(rng.uniform() < 0.5)
    if of_counter:
        resolution = 10 ** rng.uniform(-5, -2) * joules.mean() * 10
        joules = np.diff(np.floor(np.append(0, np.cumsum(joules)) / resolution)) * resolution
    else:
        joules = (joules / (close - begin) + rng.normal(size=len(joules)) * rng.uniform(0, 0.3) / S) * np.diff(ts)
    return RailReadings(ts[:-1].astype(np.int64), ts[1:].astype(np.int64), joules, of_counter)


def sampled_readings(
    rng: np.random.Generator, running: Running, watts: np.ndarray, end: int, hz: float, own_hz: float, uneven: float
) -> RailReadings:
    """Readings at `hz` of a sensor that shows the mean of its last 1 / own_hz seconds until its next update."""
    own = np.arange(-S, end, S / own_hz) + rng.uniform(0, S / own_hz)
    own = np.sort(own + rng.uniform(-0.5, 0.5, len(own)) * uneven * S / own_hz).astype(np.int64)
    seconds = running.seconds(own[:-1], own[1:])
    shown = seconds @ watts / seconds[:, 0] + rng.normal(size=len(own) - 1) * rng.uniform(0, 0.3)
    ts = np.arange(0, end, S / hz)
    ts = np.sort(ts + rng.uniform(0, 0.02 * S / hz, len(ts))).astype(np.int64)
    watts = shown[np.searchsorted(own[1:], ts[1:], "right") - 1]
    table = {"begin_ns": ts[:-1], "end_ns": ts[1:], "joules": watts * np.diff(ts) / S, "watts": watts}
    return rail_readings(pd.DataFrame(table), False)


def fitted_joules(run: DrawnRun) -> dict[str, tuple[float, float, float]]:
    """(joules, low, high) of each phase, as the analyzer finds them."""
    readings = thinned(run.readings)
    fit = fitted(run.running, readings)
    assert fit is not None
    return {phase: fit.total(run.running.amounts(phase)) for phase in run.running.steps}
