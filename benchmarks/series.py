"""Detection of slow first steps, level changes, drifts, periods and bursts in synthetic series, and false alarms on noise.

nice python -m benchmarks.series [all | faint] [--series 500] [--first-seed 0] [--json FILE]

`faint`: features that no single execution shows, in all of a series and in parts of it, and series without any structure.
workloads/drawn_series.py documents how series are drawn and which detections count.
"""

from collections import Counter

import numpy as np

from analyzer.questions.changepoints import SeriesParts, take_apart
from analyzer.questions.trends import periodic_disturbance
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single
from workloads import drawn_series
from workloads.drawn_series import NAMES, draw_series, found_in_noise, has_clear_drift, missed_in, noise, surplus_in

LENGTHS = (30, 100, 600, 2000)
FOLLOWS = (0.0, 0.3, 0.5, 0.7)
HEIGHTS, SEEN = (2.0, 3.0, 4.0, 5.0), 0.0
PARTS = (150, 300, 450)


def parts_of(ms: np.ndarray) -> tuple[SeriesParts, dict[str, float] | None]:
    """A series' parts, and its periodic disturbance as `trends` says it."""
    parts = take_apart(ms)
    return parts, periodic_disturbance(parts)


def add_shares(report: Report, label: str, verdicts: list[str]) -> None:
    for word in (drawn_series.RIGHT, drawn_series.WRONG):
        report.add(f"{label}: {word}", "%", single(100 * verdicts.count(word) / len(verdicts), len(verdicts)))


def part_of(seed: int, length: int) -> str:
    """The verdict on a part of a series with 19 of 23 spikes."""
    begin = int(np.random.default_rng((seed, length)).integers(0, drawn_series.EXECUTIONS - length))
    tolerance = max(0.3, 1.5 * drawn_series.EVERY / length)  # of a period that fewer spikes show
    return drawn_series.judged_spikes(*parts_of(drawn_series.faint_spikes(seed, SEEN)[begin : begin + length]), tolerance)


def report_faint(report: Report, seeds: range) -> None:
    """Shares of right and wrong detections of faint features, and of series without structure in which anything is found."""
    for rho in (0.0, 0.5):
        for height in (*HEIGHTS, SEEN):
            series = [drawn_series.faint_spikes(seed, height, rho) for seed in seeds]
            which = f"of {height:g} sigma" if height else "19 of 23, of 3.6 to 6.7 sigma"
            add_shares(report, f"spikes {which}, correlation {rho:g}", [drawn_series.judged_spikes(*parts_of(x)) for x in series])
        for height in HEIGHTS:
            add_bursts(report, f"burst of 10 of {height:g} sigma, correlation {rho:g}", seeds, height, rho)
    add_bursts(report, "burst of 10 of 4 sigma, lognormal noise", seeds, 4.0, skewed=True)
    for length in PARTS:
        add_shares(report, f"spikes 19 of 23, {length} executions of 600", [part_of(seed, length) for seed in seeds])
    for name in drawn_series.STRUCTURELESS:
        for length in (60, 100, 600):
            found = [drawn_series.names_found(*parts_of(drawn_series.structureless(name, seed, length))) for seed in seeds]
            share = 100 * sum(map(bool, found)) / len(seeds)
            report.add(f"{name}, {length} executions: something found", "%", single(share, len(seeds)))


def add_bursts(report: Report, label: str, seeds: range, height: float, rho: float = 0.0, skewed: bool = False) -> None:
    bursts = [drawn_series.faint_burst(seed, height, rho, skewed) for seed in seeds]
    add_shares(report, label, [drawn_series.judged_burst(*parts_of(ms), at) for ms, at in bursts])


def report_combined(report: Report, seeds: range) -> None:
    """Series with all features, and plain noise."""
    n = len(seeds)
    for rho in FOLLOWS:
        series = [draw_series(seed, rho) for seed in seeds]
        parts = [take_apart(drawn.ms) for drawn in series]
        wrong = [missed_in(found, drawn) for found, drawn in zip(parts, series, strict=True)]
        counts = Counter(name for each in wrong for name in each)
        label = f"noise 1 %, correlation {rho:g}"
        report.add(f"{label}: series in which all five are found, and nothing else", "%", single(100 * wrong.count(set()) / n, n))
        known = sum(has_clear_drift(seed, rho) for seed in seeds)
        report.add(f"{label}: drift can be found by one who knows the noise and the step", "%", single(100 * known / n, n))
        for name in NAMES:
            report.add(f"{label}: {name} not found as it is", "%", single(100 * counts[name] / n, n))
        more = sum(surplus_in(found) > 0 for found in parts)
        report.add(f"{label}: more found than there is", "%", single(100 * more / n, n))
    for rho in FOLLOWS:
        for length in LENGTHS:
            found = [found_in_noise(take_apart(noise(np.random.default_rng((seed, length)), length, rho))) for seed in seeds]
            share = 100 * sum(map(bool, found)) / n
            report.add(f"plain noise, correlation {rho:g}, {length} executions: something found", "%", single(share, n))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "faint"), default="all")
    parser.add_argument("--series", type=int, default=500, help="series of each make (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first series of each make (default: %(default)s)")
    args = parser.parse_args()
    report = Report("series", args)
    {"all": report_combined, "faint": report_faint}[args.what](report, range(args.first_seed, args.first_seed + args.series))
    report.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
