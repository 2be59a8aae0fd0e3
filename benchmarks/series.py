"""Detection of slow first steps, level changes, drifts, periods and bursts in synthetic series, and false alarms on noise.

nice python -m benchmarks.series [--series 500] [--json FILE]

workloads/drawn_series.py documents how series are drawn and which detections count.
"""

from collections import Counter

import numpy as np

from analyzer.questions.changepoints import take_apart
from benchmarks.lib.report import Report, arguments
from benchmarks.lib.spread import single
from workloads.drawn_series import NAMES, draw, invented, knowable, missed, noise, surplus

LENGTHS = (30, 100, 600, 2000)
FOLLOWS = (0.0, 0.3, 0.5, 0.7)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--series", type=int, default=500, help="series of each make (default: %(default)s)")
    args = parser.parse_args()
    report, n = Report("series", args), args.series
    for rho in FOLLOWS:
        series = [draw(seed, rho) for seed in range(n)]
        parts = [take_apart(drawn.ms) for drawn in series]
        wrong = [missed(found, drawn) for found, drawn in zip(parts, series, strict=True)]
        counts = Counter(name for each in wrong for name in each)
        label = f"noise 1 %, correlation {rho:g}"
        report.add(f"{label}: series in which all five are found, and nothing else", "%", single(100 * wrong.count(set()) / n, n))
        known = sum(knowable(seed, rho) for seed in range(n))
        report.add(f"{label}: drift can be found by one who knows the noise and the step", "%", single(100 * known / n, n))
        for name in NAMES:
            report.add(f"{label}: {name} not found as it is", "%", single(100 * counts[name] / n, n))
        more = sum(surplus(found) > 0 for found in parts)
        report.add(f"{label}: more found than there is", "%", single(100 * more / n, n))
    for rho in FOLLOWS:
        for length in LENGTHS:
            found = [invented(take_apart(noise(np.random.default_rng((seed, length)), length, rho))) for seed in range(n)]
            share = 100 * sum(map(bool, found)) / n
            report.add(f"plain noise, correlation {rho:g}, {length} executions: something found", "%", single(share, n))
    report.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
