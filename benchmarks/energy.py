"""Energy per token of planted laws: errors, and how often the intervals hold the truth.

sudo python -m benchmarks.energy [--drawn 100] [--real 6]

`drawn`: runs, sensors and their noise are drawn (workloads/drawn_power.py), which no method was chosen on: seeds from 100,000 on;
once with one power for each phase, once with one that depends on the kind of CPU and its clock, and of power sensors that are
read at another rate than their own, also of irregular ones and under steps of one length, with which they may beat.
`real`: a program is recorded under three stand-in sensors, a counter of 1,000 Hz, a power sensor of 70 Hz and a battery of 4 Hz,
whose values follow its real CPU time (workloads/programs/power_sensors.c). No device has confirmed either. What the threads that
read these sensors cost is CPU time of the recorder, which a loaded machine raises.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.questions.energy import phase_energy
from analyzer.tables.store import load_tables
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from tracer.recording.format import Recording
from workloads.drawn_power import drawn_run, fitted_joules
from workloads.power_tree import PowerTree

RATES = (10, 100, 1000)
OTHER_RATES = ((10, 70, 0.0), (100, 70, 0.0), (100, 70, 1.0), (100, 105, 0.0), (100, 300, 0.0))
"""How often a power sensor is read, how often it measures, and by which share of its period at other moments."""
FIRST_SEED = 100_000
Found = tuple[str, float, float, float, float]
"""Sensor, truth, estimate, and the ends of its interval."""


def drawn_figures(hz: int, count: int, kinds: bool = False) -> Iterator[Found]:
    """Joules of the phases of drawn runs; `kinds`: on two kinds of CPUs whose clock changes. Those not resolved are left out."""
    name = f"drawn{', two kinds of CPUs and clocks' if kinds else ''}, {hz} Hz"
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        run = drawn_run(seed + hz * count, float(hz), kinds=kinds)
        yield from ((name, run.joules[phase], *found) for phase, found in fitted_joules(run).items() if found[0] == found[0])


def other_rate_figures(hz: int, own_hz: int, uneven: float, count: int) -> Iterator[Found]:
    """The same of a power sensor that has a rate of its own; every other run has steps of one length."""
    name = f"drawn, {'irregular ' * bool(uneven)}{own_hz} Hz read at {hz} Hz"
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        run = drawn_run(seed + (hz + own_hz) * count, float(hz), own_hz, even=seed % 2 == 1, uneven=uneven)
        yield from ((name, run.joules[phase], *found) for phase, found in fitted_joules(run).items() if found[0] == found[0])


def real_figures(hz: int, count: int, costs: list[float]) -> Iterator[Found]:
    """Joules per token of the phases of recorded runs, by each sensor; `costs` gets the cost of reading them, per mille."""
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            tree = PowerTree(Path(folder))
            recording = tree.record("--power", str(hz), steps=(4, 0.5, 60, 0.011, 0.006))
            costs.append(reading_cost(Recording(recording).manifest))
            rows = phase_energy(load_tables(recording))
            truth = tree.joules_per_token()
            for row in rows.dropna(subset=["joules"]).to_dict("records"):
                ends = (row[name] for name in ("j_per_token", "low_per_token", "high_per_token"))
                yield (f"real, {row['source']} read at {hz} Hz", truth[row["phase"]], *ends)


def reading_cost(manifest: dict[str, Any]) -> float:
    """The CPU time of the threads that read power sensors, per mille of a core while it was recorded."""
    return 1e3 * sum(source["cpu_ns"] for source in manifest["power"]["sources"]) / manifest["duration_ns"]


def report_figures(report: Report, figures: list[Found]) -> None:
    """The share of intervals that hold the truth, and the errors, by sensor."""
    for name in dict.fromkeys(each[0] for each in figures):
        mine = np.array([each[1:] for each in figures if each[0] == name])
        truth, found, low, high = mine.T
        report.add(f"{name}: intervals that hold the truth", "%", single(100 * float(np.mean((low <= truth) & (truth <= high)))))
        report.add(f"{name}: error", "%", extremes(100 * np.abs(found / truth - 1)))
        report.add(f"{name}: half an interval", "%", extremes(50 * (high - low) / truth))


def main() -> int:
    """Draw, record and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--drawn", type=int, default=100, help="drawn runs for each rate (default: %(default)s)")
    parser.add_argument("--real", type=int, default=6, help="recorded runs for each rate (default: %(default)s)")
    args = parser.parse_args()
    report = Report("energy", args)
    for rates in OTHER_RATES:
        report_figures(report, list(other_rate_figures(*rates, args.drawn)))
    for hz in RATES:
        report_figures(report, list(drawn_figures(hz, args.drawn)))
        report_figures(report, list(drawn_figures(hz, args.drawn, kinds=True)))
        costs: list[float] = []
        report_figures(report, list(real_figures(hz, args.real, costs)))
        if costs:
            report.add(f"three sensors read at {hz} Hz: CPU time", "per mille of a core", extremes(costs))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
