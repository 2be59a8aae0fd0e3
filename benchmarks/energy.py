"""Energy per token of planted laws: errors, and how often the intervals hold the truth.

sudo python -m benchmarks.energy [--drawn 100] [--real 6]

`drawn`: runs, sensors and their noise are drawn (workloads/drawn_power.py), which no method was chosen on: seeds from 100,000 on;
once with one power for each phase, once with one that depends on the kind of CPU and its clock, and of a power sensor of 70 Hz
that is read at 10 Hz.
`real`: a program is recorded under three stand-in sensors, a counter of 1,000 Hz, a power sensor of 70 Hz and a battery of 4 Hz,
whose values follow its real CPU time (workloads/programs/power_sensors.c). No device has confirmed either.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from analyzer.questions.energy import phase_energy
from analyzer.tables.store import load_tables
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from workloads.drawn_power import drawn_run, fitted_joules
from workloads.power_tree import PowerTree

RATES = (10, 100, 1000)
SAMPLED_HZ, OWN_HZ = 10, 70
"""A sensor that is read more rarely than it measures."""
FIRST_SEED = 100_000
Found = tuple[str, float, float, float, float]
"""Sensor, truth, estimate, and the ends of its interval."""


def drawn_figures(hz: int, count: int, kinds: bool = False) -> Iterator[Found]:
    """Joules of the phases of drawn runs; `kinds`: on two kinds of CPUs whose clock changes. Those not resolved are left out."""
    name = f"drawn{', two kinds of CPUs and clocks' if kinds else ''}, {hz} Hz"
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        run = drawn_run(seed + hz * count, float(hz), kinds=kinds)
        yield from ((name, run.joules[phase], *found) for phase, found in fitted_joules(run).items() if found[0] == found[0])


def sampled_figures(count: int) -> Iterator[Found]:
    """The same of a power sensor that is read more rarely than it measures."""
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        run = drawn_run(seed, SAMPLED_HZ, OWN_HZ)
        name = f"drawn, {OWN_HZ} Hz read at {SAMPLED_HZ} Hz"
        yield from ((name, run.joules[phase], *found) for phase, found in fitted_joules(run).items())


def real_figures(hz: int, count: int) -> Iterator[Found]:
    """Joules per token of the phases of recorded runs, by each sensor."""
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            tree = PowerTree(Path(folder))
            rows = phase_energy(load_tables(tree.record("--power", str(hz), steps=(4, 0.5, 60, 0.011, 0.006))))
            truth = tree.joules_per_token()
            for row in rows.dropna(subset=["joules"]).to_dict("records"):
                ends = (row[name] for name in ("j_per_token", "low_per_token", "high_per_token"))
                yield (f"real, {row['source']} read at {hz} Hz", truth[row["phase"]], *ends)


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
    report_figures(report, list(sampled_figures(args.drawn)))
    for hz in RATES:
        report_figures(report, list(drawn_figures(hz, args.drawn)))
        report_figures(report, list(drawn_figures(hz, args.drawn, kinds=True)))
        report_figures(report, list(real_figures(hz, args.real)))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
