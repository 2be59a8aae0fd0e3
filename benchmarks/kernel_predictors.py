"""Accuracy of kernel predictors on this machine: fused pairs, held-out shapes and unseen models.

    python -m benchmarks.kernel_predictors --start 60 --rounds 2 --extra 20 --held-out 30
    python -m benchmarks.kernel_predictors --backend htp --fusion-only    (x86-64: Qualcomm's emulator, not an NPU's cycles)

Fusion: nn-Meter's verdict by time, compared with the backend's own list of nodes. Accuracy: share within 10 % and RMSPE, for each
kernel on held-out shapes, then for expert subgraphs of models from which no shape was taken. For comparison, the accuracy of a
repeated measurement of the held-out shapes: no predictor can be better. All times are at the usual pace,
according to reference kernels. A noisy host shows in the repeated measurement.
"""

import argparse
import itertools
import json
import platform
from dataclasses import astuple
from functools import partial
from pathlib import Path

import numpy as np

from analyzer.predict.kernels import fusion, graphs, regressors, training
from analyzer.predict.kernels.backends import Backend, Cpu, Htp
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import single

UNSEEN = {"tinymoe": (256, 128), "granite-moe-1b": (1024, 512), "OLMoE": (2048, 1024), "Qwen1.5-MoE": (2048, 1408)}
"""Model → (hidden, width of an expert)."""
JUDGED = frozenset(widths for hidden, width in UNSEEN.values() for widths in ((hidden, width), (width, hidden)))
"""(k, n) of the subgraphs that are judged: no kernel is measured in one of them."""
ROWS = (1, 3, 8, 20, 64)


def find_fusion(backend: Backend, shape: graphs.Shape, report: Report) -> set[tuple[str, str]]:
    """Print every verdict; returns the pairs that fuse."""
    print(f"fusion on {backend.name}, {shape.rows} x {shape.k} x {shape.n}")
    verdicts = list(training.fusion_verdicts(backend, shape))
    for v in verdicts:
        agree = "" if v.by_time == v.by_nodes else "  <- disagree"
        pair = f"{v.first}+{v.second:8} outputs {v.outputs:4} saved {v.saved:6.2f}"
        print(f"  {pair}  by time {v.by_time!s:5} by nodes {v.by_nodes!s:5}{agree}")
    right = sum(v.by_time == v.by_nodes for v in verdicts)
    name = f"fusion on {backend.name}, {shape.rows} x {shape.k} x {shape.n}: verdicts that agree with the nodes"
    report.add(name, "%", single(100 * right / len(verdicts), len(verdicts)), labels=labels_of(backend))
    return fusion.fusing_pairs(verdicts)


def labels_of(backend: Backend) -> tuple[str, ...]:
    """Labels on the backend's times."""
    return ("emulator",) if isinstance(backend, Htp) and platform.machine() == "x86_64" else ()


def add_accuracy(report: Report, name: str, predicted: np.ndarray, measured: np.ndarray, again: np.ndarray) -> None:
    """Accuracy of predictions, and that of measuring twice."""
    for what, values in ((name, predicted), (f"{name}, measured again", again)):
        accuracy = regressors.accuracy(values, measured)
        report.add(f"{what}: within 10 %", "%", single(100 * accuracy["within_10_percent"], len(measured)))
        report.add(f"{what}: RMSPE", "%", single(100 * accuracy["rmspe"], len(measured)))


def train_all(backend: Backend, predictors: regressors.Predictors, args: argparse.Namespace, report: Report) -> None:
    """Train every kernel and report its accuracy on held-out shapes."""
    plan = training.TrainingPlan(
        training.CHAINS, training.PRIOR, args.start, args.rounds, args.extra, args.held_out, left_out=JUDGED
    )
    for one in training.train_all(backend, predictors, plan):
        unseen = shapes_with_times(one.unseen, one.measured, one.repeated, one.predicted)
        args.kept[one.kernel] = {"trained": shapes_with_times(one.shapes, one.times), "held out": unseen}
        judged, note = one.judged, ", again: the machine was slower before" if one.again else ""
        add_accuracy(report, f"{one.kernel}{note}", one.predicted[judged], one.measured[judged], one.repeated[judged])


def shapes_with_times(shapes: list[graphs.Shape], *columns: np.ndarray) -> list[list[float]]:
    """Shapes with columns of times, JSON-able."""
    return [[*astuple(shape), *map(float, row)] for shape, *row in zip(shapes, *columns, strict=True)]


def unseen_subgraphs() -> list[tuple[tuple[str, str, int], list[graphs.Link]]]:
    """((chain, model, rows), its links) for every unseen model."""
    return [
        (("-".join(chain), name, rows), graphs.chain(chain, graphs.Shape(rows, hidden, width), (hidden,)))
        for chain, (name, (hidden, width)), rows in itertools.product(training.CHAINS, UNSEEN.items(), ROWS)
    ]


def judge_subgraphs(backend: Backend, predictors: regressors.Predictors, args: argparse.Namespace, report: Report) -> None:
    """Figures of whole subgraphs: by chain, by model, by rows, and overall."""
    names, links = zip(*unseen_subgraphs(), strict=True)
    predicted = np.array([predictors.chain(one)[0] for one in links])
    first, again = (training.measured_times(backend, [partial(graphs.chain_model, one) for one in links]) for _ in range(2))
    args.kept["subgraphs"] = [[*name, *map(float, row)] for name, *row in zip(names, first, again, predicted, strict=True)]
    for part, prefix in enumerate(("", "", "rows ")):
        for value in dict.fromkeys(name[part] for name in names):
            mine = np.array([name[part] == value for name in names])
            add_accuracy(report, f"subgraphs, {prefix}{value}", predicted[mine], first[mine], again[mine])
    add_accuracy(report, "all subgraphs, of models not seen", predicted, first, again)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu")
    parser.add_argument("--fusion-only", action="store_true")
    parser.add_argument("--runs", type=int, default=9, help="bursts of each model")
    parser.add_argument("--start", type=int, default=60, help="shapes from the prior")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--extra", type=int, default=20, help="shapes of each round")
    parser.add_argument("--held-out", type=int, default=30)
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write as JSON what was measured and predicted")
    args = parser.parse_args()
    args.kept = {}
    backend: Backend = Cpu(args.runs) if args.backend == "cpu" else Htp(max(args.runs, 20))
    size = graphs.Shape(64, 16, 64) if args.backend == "cpu" else graphs.Shape(64, 256, 256)
    report = Report("kernel_predictors", args)
    predictors = regressors.Predictors(backend.unit, find_fusion(backend, size, report))
    if not args.fusion_only:
        train_all(backend, predictors, args, report)
        judge_subgraphs(backend, predictors, args, report)
    report.finish()
    if args.keep:
        args.keep.write_text(json.dumps(args.kept))
    if args.save:
        predictors.save(args.save, backend.name)


if __name__ == "__main__":
    main()
