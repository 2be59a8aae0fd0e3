"""Kernel predictors on this machine: which pairs a backend fuses, how well regressors meet shapes and chains not seen.

    python -m benchmarks.kernel_predictors --start 60 --rounds 3 --extra 20 --held-out 40
    python -m benchmarks.kernel_predictors --backend htp --fusion-only    (x86-64: Qualcomm's emulator, its cycles are no NPU's)

Fusion: nn-Meter's verdict by time beside the backend's own account of its nodes. Accuracy: share within 10 % and RMSPE, each
kernel on held-out shapes, then chains that no kernel was trained from (expert-like: product, bias, activation, product).
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from analyzer.predict.kernels import fusion, graphs, regressors, sampling
from analyzer.predict.kernels.backends import Backend, Cpu, Htp

PAIRS = [
    ("Gemm", "Relu"), ("Gemm", "Sigmoid"), ("Gemm", "Tanh"), ("Gemm", "Softmax"), ("MatMul", "Add"), ("MatMul", "Relu"),
    ("MatMul", "Softmax"), ("Add", "Relu"), ("Mul", "Sigmoid"), ("Relu", "Softmax"),
]  # fmt: skip
CHAINS = [["Gemm", "Relu", "Gemm"], ["MatMul", "Add", "Sigmoid"], ["Gemm", "Tanh", "Gemm", "Softmax"]]
PRIOR = [(256, 512), (512, 256), (512, 1024), (1024, 512), (768, 768)]


def show_fusion(backend: Backend, shape: graphs.Shape) -> set[tuple[str, str]]:
    """Print every verdict; returns the pairs that fuse."""
    print(f"fusion on {backend.name}, {shape.rows} x {shape.k} x {shape.n}")
    verdicts = [fusion.detect(backend, *pair, shape, many) for pair, many in itertools.product(PAIRS, (False, True))]
    for v in verdicts:
        agree = "" if v.by_time == v.by_nodes else "  <- disagree"
        told = f"{v.first}+{v.second:8} outputs {v.outputs:4} saved {v.saved:6.2f}"
        print(f"  {told}  by time {v.by_time!s:5} by nodes {v.by_nodes!s:5}{agree}")
    right = sum(v.by_time == v.by_nodes for v in verdicts)
    print(f"  {right} of {len(verdicts)} verdicts by time agree with the backend's nodes")
    return fusion.rules(verdicts)


def times(backend: Backend, operators: list[str], shapes: list[graphs.Shape]) -> np.ndarray:
    """Measured times of a chain at these shapes, in batches so that few sessions live at once."""
    models = [graphs.model(graphs.chain(operators, shape)) for shape in shapes]
    return np.array([t for i in range(0, len(models), 8) for t in backend.times(models[i : i + 8])])


def kernels_of(fused: set[tuple[str, str]]) -> list[str]:
    """Kernels that the chains consist of."""
    shape = graphs.Shape(8, 64, 64)
    parts = [fusion.split(graphs.chain(chain, shape), fused) for chain in CHAINS]
    return sorted({fusion.kernel_name(kernel) for chain in parts for kernel in chain})


def show_accuracy(backend: Backend, predictors: regressors.Predictors, args: argparse.Namespace) -> None:
    """Train every kernel, then print figures on shapes and chains not seen."""
    random = np.random.default_rng(99)
    for kernel in kernels_of(predictors.fused):
        operators = kernel.split("+")
        fit = regressors.quick_fit(kernel)
        shapes, seen = sampling.adaptive(
            PRIOR, lambda s, o=operators: times(backend, o, s), fit, args.start, args.rounds, args.extra, limit=2048
        )  # fmt: skip
        predictors.train(kernel, shapes, seen)
        unseen = sampling.draw(PRIOR, args.held_out, random, 2048)
        told = regressors.accuracy(predictors.kernel(kernel, unseen), times(backend, operators, unseen))
        print(f"{kernel:16} trained on {len(shapes)}: {told['within_10_percent']:.0%} within 10 %, RMSPE {told['rmspe']:.1%}")
    for chain in CHAINS:
        unseen = sampling.draw(PRIOR, args.held_out, random, 2048)
        predicted = np.array([predictors.chain(graphs.chain(chain, shape))[0] for shape in unseen])
        told = regressors.accuracy(predicted, times(backend, chain, unseen))
        print(f"chain {'-'.join(chain):32} {told['within_10_percent']:.0%} within 10 %, RMSPE {told['rmspe']:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu")
    parser.add_argument("--fusion-only", action="store_true")
    parser.add_argument("--runs", type=int, default=15, help="runs of each model")
    parser.add_argument("--start", type=int, default=60, help="shapes from the prior")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--extra", type=int, default=20, help="shapes of each round")
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--save", type=Path, metavar="FILE")
    args = parser.parse_args()
    backend: Backend = Cpu(args.runs) if args.backend == "cpu" else Htp(min(args.runs, 5))
    size = graphs.Shape(512, 16, 512) if args.backend == "cpu" else graphs.Shape(32, 64, 64)
    predictors = regressors.Predictors(backend.unit, show_fusion(backend, size))
    if not args.fusion_only:
        show_accuracy(backend, predictors, args)
    if args.save:
        predictors.save(args.save, backend.name)


if __name__ == "__main__":
    main()
