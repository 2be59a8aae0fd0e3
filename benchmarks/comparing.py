"""Power and false alarms of comparisons: planted changes, unchanged runs, and speed.

python -m benchmarks.comparing power [--runs 5,10,20] [--repeats 200] [--noise 1.0]
python -m benchmarks.comparing words [--runs 5,10] [--repeats 400] [--noise 1.0]
python -m benchmarks.comparing few [--runs 3,4,5,6,7,8,9,10] [--repeats 100] [--noise 1.0]
python -m benchmarks.comparing alarms --recordings DIR [--pairs 200] [--runs 5]     DIR: runs without changes
python -m benchmarks.comparing windows --recordings DIR [DIR...] [--runs 5,10]    successive runs
python -m benchmarks.comparing stopping [--repeats 200] [--noise 3]               stopping as `moescope compare` does
python -m benchmarks.comparing speed [--runs 100] [--operators 5000]

`power`: one of 60 operators is slowed; runs vary by a common drift, individual noise, and rare disturbances.
`words`: changes of every size, and none, in all figures of speed; the verdict for each is right, wrong or "inconclusive".
Beyond the threshold, slower or faster is right, within it "the same"; any other verdict is wrong.
`few`: families of a recording: 5 figures of speed, 60 operators, 19 figures of experts and a hit rate of 1 in all runs. One
thing is changed, which `found` must report: TTFT from 2,862 to 10.4 ms; TPOT, decode step and decode speed by 10 %; one operator
by 10 %; the hit rate to 0.9567 in all runs. `others`: an unchanged figure of the same family is reported, too. `nothing`: a
family in which anything is reported. `asked for`: TPOT by 5 % at 3 % of noise; of the inconclusive verdicts that name a number
of further runs, the share that as many runs then decide.
`alarms`: pairs of groups drawn without replacement from real runs; an alarm is any reported change in a family of metrics.
`windows`: the same including the drift from run to run: of successive runs, the sides alternately (A B B A ..., and in pairs of
random order), one after the other, and one after the other separated by as many runs as a side has.
`stopping`: alarms for unchanged programs if one tests after every pair and stops at a verdict with that alpha.
For changes planted in recordings of real runs, see benchmarks.planted.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.metrics import DEFAULTS, METRICS, metric_keys
from analyzer.compare.results import Result, read_runs, value_matrices
from analyzer.compare.statistics import SUCCESSIVE, drift_factor
from analyzer.compare.verdicts import FASTER, PRACTICAL, SAME, SLOWER, UNKNOWN, Rules, judge_apart, judge_metrics
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import extremes, single
from tracer.commands.compare import EARLY_ALPHA, LEAST_PAIRS

METRICS_OF_SPEED, MOST_PAIRS, WIDTH = 5, 16, 0.03
OPERATORS, PLANTED = 60, (0.03, 0.05, 0.10)
SWEPT = (-0.2, -0.1, -0.05, -0.03, -0.01, 0.0, 0.01, 0.03, 0.05, 0.1, 0.2)


def draw_values(rng: np.random.Generator, runs: int, metrics: int, noise: float) -> np.ndarray:
    """Values [runs, metrics] of an unchanged program, around 1."""
    shape = (runs, metrics)
    drift = rng.normal(0, noise / 2, (runs, 1))
    disturbed = (rng.random(shape) < 0.05) * rng.exponential(10 * noise, shape)
    return np.exp(drift + rng.normal(0, noise, shape) + disturbed)


def measure_power(args: argparse.Namespace, report: Report) -> None:
    """Share of repeats in which only the slowed operator is reported as slower."""
    dims = pd.DataFrame({"family": "operator", "better": "lower", "offset": 0.0, "share": np.nan}, index=range(OPERATORS))
    report.note(f"noise {args.noise} % per run and operator, {OPERATORS} operators")
    for runs in map(int, args.runs.split(",")):
        for planted in (0.0, *PLANTED):
            rng, hits, wrong, open_ones = np.random.default_rng(runs), 0, 0, 0
            for _ in range(args.repeats):
                both = draw_values(rng, 2 * runs, OPERATORS, args.noise / 100)
                both[runs:, 0] *= 1 + planted
                verdict = judge_metrics(dims, both[:runs], both[runs:])["verdict"].to_numpy()
                hits += verdict[0] == SLOWER
                wrong += int(np.isin(verdict[1:], [SLOWER, FASTER]).any())
                open_ones += verdict[0] == "inconclusive"
            for what, count in (("found", hits), ("others reported", wrong), ("inconclusive", open_ones)):
                name = f"{runs} + {runs} runs, one operator {planted:+.0%}: {what}"
                report.add(name, "%", single(100 * count / args.repeats, args.repeats))


def measure_verdicts(args: argparse.Namespace, report: Report) -> None:
    """Share of repeats with a right, wrong or "inconclusive" verdict, and of "the same" with an interval beyond the threshold."""
    report.note(f"noise {args.noise} % per run and figure, {METRICS_OF_SPEED} figures of speed, all changed")
    for runs in map(int, args.runs.split(",")):
        outside = said = 0
        for planted in SWEPT:
            judged = speed_verdicts(runs, planted, args.repeats, args.noise / 100)
            told = pd.Series(verdict_of(row["verdict"], planted) for row in judged)
            for word in ("right", "wrong", UNKNOWN):
                share = 100 * float((told == word).mean())
                report.add(f"{runs} + {runs} runs, all figures {planted:+.0%}: {word}", "%", single(share, len(told)))
            same = [row for row in judged if row["verdict"] == SAME]
            said += len(same)
            outside += sum(not 1 - PRACTICAL <= row["low"] <= row["high"] <= 1 + PRACTICAL for row in same)
        report.add(f'{runs} + {runs} runs: "the same" of an interval outside the threshold', "", single(outside, said))


def speed_verdicts(runs: int, planted: float, repeats: int, noise: float) -> list[dict[str, Any]]:
    """The verdict row of the first figure of speed in each repeat."""
    dims = pd.DataFrame({"family": "speed", "better": "lower", "offset": 0.0, "share": np.nan}, index=range(METRICS_OF_SPEED))
    rng, out = np.random.default_rng(runs), []
    for _ in range(repeats):
        base, cand = (draw_values(rng, runs, METRICS_OF_SPEED, noise) for _ in range(2))
        out.append(dict(judge_metrics(dims, base, cand * (1 + planted)).iloc[0]))
    return out


FIGURES_OF_SPEED = ("TTFT", "TPOT, median", "decode step", "decode speed", "prefill speed")
EXPERT_FIGURES = 20


def recorded_dims() -> pd.DataFrame:
    """The metrics of `few`; the last one is the hit rate."""
    families = ["speed"] * len(FIGURES_OF_SPEED) + ["operator"] * OPERATORS + ["expert"] * EXPERT_FIGURES
    names = [*FIGURES_OF_SPEED, *["time"] * OPERATORS, *["run time"] * (EXPERT_FIGURES - 1), "hit rate"]
    dims = pd.DataFrame({"family": families, "metric": names, "layer": range(len(families))})
    dims["unit"] = dims["metric"].map({"hit rate": "share"}).fillna("ms")
    dims["share"] = dims["family"].map({"operator": 1 / OPERATORS})
    dims["offset"] = dims["metric"].map({"hit rate": 0.01}).fillna(0.0)
    dims["better"] = np.where(dims["metric"].isin(["decode speed", "prefill speed", "hit rate"]), "higher", "lower")
    return dims.assign(phase="decode", graph="", type="", shape="", backend="", expert=-1, label="")


def recorded_values(rng: np.random.Generator, runs: int, dims: pd.DataFrame, noise: float) -> np.ndarray:
    """Values [runs, metrics] of an unchanged program; speeds are those of their times."""
    both = draw_values(rng, runs, len(dims), noise)
    both[:, 0] *= 2862
    both[:, 2] = both[:, 1] * np.exp(rng.normal(0, noise / 10, runs))
    both[:, 3], both[:, 4], both[:, -1] = 1 / both[:, 1], 1 / both[:, 0], 1.0
    return both


def planted_changes(dims: pd.DataFrame) -> dict[str, tuple[list[int], np.ndarray]]:
    """Name → (metrics that must be reported, factor of every metric)."""
    operator, rate = len(FIGURES_OF_SPEED), len(dims) - 1

    def factors(by: dict[int, float]) -> tuple[list[int], np.ndarray]:
        factor = np.ones(len(dims))
        factor[list(by)] = list(by.values())
        return list(by), factor

    return {
        "nothing": factors({}),
        "TTFT from 2,862 to 10.4 ms": factors({0: 10.4 / 2862, 4: 2862 / 10.4}),
        "TPOT +10 %": factors({1: 1.1, 2: 1.1, 3: 1 / 1.1}),
        "an operator +10 %": factors({operator: 1.1}),
        "hit rate from 1 to 0.9567 in all runs": factors({rate: 0.9567}),
    }


def measure_few_runs(args: argparse.Namespace, report: Report) -> None:
    """Power and false alarms with few runs, of a recording's families."""
    dims = recorded_dims()
    report.note(f"noise {args.noise} % per run and figure, {len(dims)} figures in 3 families")
    for runs in map(int, args.runs.split(",")):
        for (what, (changed, factor)), order in product(planted_changes(dims).items(), ("", ", one after the other")):
            if order and what not in ("nothing", "TPOT +10 %"):
                continue
            rng, counts = np.random.default_rng(runs), {"found": 0, "others": 0, "speed": 0, "operator": 0, "expert": 0}
            for _ in range(args.repeats):
                base, cand = (recorded_values(rng, runs, dims, args.noise / 100) for _ in range(2))
                rules = Rules(drift=SUCCESSIVE if order else 1.0)
                judged = judge_apart(dims, base, cand * factor, rules)[0].iloc[: len(dims)]
                said = judged["verdict"].isin([SLOWER, FASTER]).to_numpy()
                for family in dims["family"].unique():
                    counts[family] += said[dims["family"] == family].any()
                same_family = dims["family"].isin(dims["family"].iloc[changed[:1]]).to_numpy(copy=True)
                same_family[changed] = False
                counts["found"] += bool(changed) and said[changed].all()
                counts["others"] += said[same_family].any()
            for name in ("found", "others") if changed else ("speed", "operator", "expert"):
                label = f"{runs} + {runs} runs{order}, {what}: {name}"
                report.add(label, "%", single(100 * counts[name] / args.repeats, args.repeats))
        asked_for(runs, args.repeats, report)


def asked_for(runs: int, repeats: int, report: Report) -> None:
    """Whether as many further runs as a verdict asks for decide."""
    dims, rng, noise, effect = recorded_dims().iloc[:5], np.random.default_rng((runs, 5)), 0.03, 1.05
    asked, decided = [], 0
    for _ in range(repeats):
        base, cand = (recorded_values(rng, runs, recorded_dims(), noise)[:, :5] for _ in range(2))
        cand[:, 1] *= effect
        row = judge_metrics(dims, base, cand).iloc[1]
        if row["verdict"] == UNKNOWN and row["more_runs_known"] and row["estimate"] > 0:
            total = runs + int(row["more_runs"])
            base, cand = (recorded_values(rng, total, recorded_dims(), noise)[:, :5] for _ in range(2))
            cand[:, 1] *= np.exp(row["estimate"])
            asked.append(total)
            decided += judge_metrics(dims, base, cand).iloc[1]["verdict"] != UNKNOWN
    share = 100 * decided / len(asked) if asked else 0.0
    report.add(f"{runs} + {runs} runs, TPOT +5 % at 3 % of noise: asked for, then decided", "%", single(share, len(asked)))


def verdict_of(verdict: str, planted: float) -> str:
    """Classify a verdict for a known relative change: right, wrong, or inconclusive."""
    truth = SAME if abs(planted) <= PRACTICAL else SLOWER if planted > 0 else FASTER
    return UNKNOWN if verdict == UNKNOWN else "right" if verdict == truth else "wrong"


def measure_alarms(args: argparse.Namespace, report: Report) -> None:
    """Share of pairs with an alarm, by family of metrics."""
    results = [run for folder in args.recordings for run in read_runs(Path(folder))]
    rng, size = np.random.default_rng(0), int(args.runs.split(",")[0])
    if len(results) < 2 * size:
        sys.exit(f"{len(results)} runs are too few for pairs of {size} + {size}")
    dims, every, *_ = value_matrices(results, results[:1])
    counts: dict[str, int] = {}
    for _ in range(args.pairs):
        order = rng.permutation(len(results))[: 2 * size]
        add_alarms(counts, judge_apart(dims, every[order[:size]], every[order[size:]])[0])
    report.note(f"drawn from {len(results)} runs, {len(dims)} metrics")
    for family, n in counts.items():
        report.add(f"{size} + {size} drawn runs: alarms of {family}", "%", single(100 * n / args.pairs, args.pairs))


def add_alarms(counts: dict[str, int], judged: pd.DataFrame) -> None:
    """Count the families in which a comparison has an alarm."""
    for family, rows in judged.groupby("family"):
        counts[str(family)] = counts.get(str(family), 0) + bool(rows["verdict"].isin([SLOWER, FASTER]).any())


def measure_windows(args: argparse.Namespace, report: Report) -> None:
    """Share of windows of successive runs with an alarm, by family and by the order in which the sides were recorded."""
    for size in map(int, args.runs.split(",")):
        turns = np.resize([0, 1, 1, 0], 2 * size)
        one, gap = np.zeros(size, int), np.full(size, -1)
        orders = {"alternately": turns, "in random pairs": None, "one after the other": np.r_[one, one + 1]}
        orders["with a gap"] = np.r_[one, gap, one + 1]
        for name, order in orders.items():
            counts: dict[str, int] = {}
            seen: dict[str, int] = {}
            for folder in args.recordings:
                for judged in judged_windows(sorted(read_runs(Path(folder)), key=lambda run: run.began), size, order):
                    add_alarms(counts, judged)
                    for family in judged["family"].unique():
                        seen[family] = seen.get(family, 0) + 1
            for family, n in sorted(counts.items()):
                report.add(f"{size} + {size} {name}: alarms of {family}", "%", single(100 * n / seen[family], seen[family]))


def judged_windows(results: list[Result], size: int, order: np.ndarray | None) -> Iterator[pd.DataFrame]:
    """For every window, the comparison of the runs with 0 in `order` (None: drawn by pairs) with those with 1."""
    dims, every, *_ = value_matrices(results, results[:1])
    began, rng = np.array([run.began for run in results]), np.random.default_rng(0)
    for first in range(len(results) - (2 * size if order is None else len(order)) + 1):
        places = rng.permuted(np.tile([0, 1], (size, 1)), axis=1).ravel() if order is None else order
        base, cand = (first + np.flatnonzero(places == side) for side in (0, 1))
        rules = Rules(drift=drift_factor(began[base], began[cand]))
        yield judge_apart(dims, every[base], every[cand], rules)[0]


def measure_stopping(args: argparse.Namespace, report: Report) -> None:
    """Share of unchanged programs that are finally reported as changed, by the alpha of the verdict that stops the runs."""
    dims = pd.DataFrame({"family": "speed", "better": "lower", "offset": 0.0, "share": np.nan}, index=range(METRICS_OF_SPEED))
    report.note(f"noise {args.noise} %, at most {MOST_PAIRS} pairs")
    for early in (0.05, EARLY_ALPHA):
        rng, alarmed, pairs = np.random.default_rng(0), 0, []
        for _ in range(args.repeats):
            base, cand = (draw_values(rng, MOST_PAIRS, METRICS_OF_SPEED, args.noise / 100) for _ in range(2))
            for n in range(LEAST_PAIRS, MOST_PAIRS + 1):
                seen = judge_metrics(dims, base[:n], cand[:n], Rules(alpha=early))
                if not (~seen["verdict"].isin([SLOWER, FASTER]) & (seen["high"] - seen["low"] > WIDTH)).any():
                    break
            alarmed += bool(judge_metrics(dims, base[:n], cand[:n])["verdict"].isin([SLOWER, FASTER]).any())
            pairs.append(n)
        report.add(f"alarms, a verdict of p < {early} stops", "%", single(100 * alarmed / args.repeats, args.repeats))
        report.add(f"pairs, a verdict of p < {early} stops", "count", extremes(pairs))


def measure_speed(args: argparse.Namespace, report: Report) -> None:
    """Seconds to compare stored results of the given size."""
    rng, count = np.random.default_rng(0), int(args.runs.split(",")[0])
    frame = pd.DataFrame([DEFAULTS] * args.operators)[[c.name for c in METRICS]]
    layer = np.arange(args.operators)
    frame = frame.assign(
        family="operator", metric="time", phase="decode", type="MUL_MAT", layer=layer, share=1 / args.operators, unit="ms", n=1.0
    )
    frame.loc[frame.index[: args.operators // 2], "share"] = 0.01
    frame.index = pd.Index(metric_keys(frame), name="key")
    results = []
    for i in range(count):
        jittered = draw_values(rng, 1, args.operators, 0.02)[0]
        results.append(Result(f"run-{i}", frame.assign(value=jittered, mean=jittered), {}, rng.normal(10, 1, 500).tolist()))
    began = time.perf_counter()
    result = compare_runs(results[: count // 2], results[count // 2 :])
    compared = time.perf_counter()
    as_document(result)
    for what, seconds in (("compared", compared - began), ("document written", time.perf_counter() - compared)):
        report.add(f"{count} runs x {args.operators} operators: {what}", "s", single(seconds))


MEASURES = {  # what → how it is measured, and with how many runs
    "power": (measure_power, "5,10,20"),
    "words": (measure_verdicts, "5,10"),
    "few": (measure_few_runs, "3,4,5,6,7,8,9,10"),
    "alarms": (measure_alarms, "5"),
    "windows": (measure_windows, "5,10"),
    "stopping": (measure_stopping, ""),
    "speed": (measure_speed, "100"),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--runs", default="")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--noise", type=float, default=1.0, help="percent")
    parser.add_argument("--recordings", nargs="*", default=[])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--operators", type=int, default=5000)
    args = parser.parse_args()
    measure, usual_runs = MEASURES[args.what]
    args.runs = args.runs or usual_runs
    report = Report("comparing", args)
    measure(args, report)
    report.finish()


if __name__ == "__main__":
    main()
