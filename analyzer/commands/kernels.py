"""Kernel predictors after nn-Meter: fused operators, a kernel's time by its shape, a chain as the sum of its kernels.

`train` measures shapes on this machine and writes predictors; `predict` uses them on any machine; `fusion` shows only which pairs
of operators the backend fuses. Times are CPU seconds of one thread (cpu) or cycles (htp; on x86-64 Qualcomm's emulator,
microseconds of this machine, not of an NPU).

examples:
  moescope predict kernels fusion
  moescope predict kernels train --out here.kernels.json                       some minutes; --start 20 --rounds 0 for a look
  moescope predict kernels train --config MODEL_DIR --out here.kernels.json    shapes near those of this model
  moescope predict kernels predict here.kernels.json --chain Gemm,Relu,Gemm --rows 1,8,64 --widths 1024,512,1024
  moescope predict kernels predict here.kernels.json --chain Gemm,Relu,Gemm --config MODEL_DIR --json
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from analyzer.commands._show import print_table
from analyzer.errors import PredictError
from analyzer.model import read_config
from moescope.answers import print_if_json
from moescope.arguments import add_json

if TYPE_CHECKING:
    from analyzer.predict.kernels.backends import Backend
    from analyzer.predict.kernels.fusion import Verdict
    from analyzer.predict.kernels.graphs import Link
    from analyzer.predict.kernels.regressors import Predictors

FEWEST_SHAPES = 8


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="train|predict|fusion")
    train = actions.add_parser("train", help="measure kernels on this machine and write predictors")
    predict = actions.add_parser("predict", help="predict a chain of operators from trained predictors")
    fusion = actions.add_parser("fusion", help="detect which pairs of operators are fused into one kernel")
    for action in (train, fusion):
        action.add_argument(
            "--backend", choices=("cpu", "htp"), default="cpu", help="backend that runs the kernels (default: cpu)"
        )
        action.add_argument("--runs", metavar="N", type=int, default=9, help="measurements of each model (default: 9)")
    add = train.add_argument
    add("--out", metavar="FILE", type=Path, required=True, help="file for the predictors (JSON)")
    add(
        "--config",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="models around whose matrix shapes to sample; default: common ones",
    )
    add("--start", metavar="N", type=int, default=60, help="initial number of shapes per kernel (default: 60)")
    add("--rounds", metavar="N", type=int, default=2, help="rounds of further shapes where the error is large (default: 2)")
    add("--extra", metavar="N", type=int, default=20, help="shapes added in each round (default: 20)")
    add("--held-out", metavar="N", type=int, default=30, help="shapes held out for evaluation (default: 30)")
    add = predict.add_argument
    add("file", metavar="FILE", type=Path, help="predictors that `train` wrote")
    add(
        "--chain",
        metavar="OPERATORS",
        default="Gemm,Relu,Gemm",
        help="operators of the chain, in order (default: Gemm,Relu,Gemm)",
    )
    add("--rows", metavar="ROWS", default="1", help="input rows, or a list: 1,8,64 (default: 1)")
    sizes = predict.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--widths", metavar="N,N", help="input columns, then the output columns of each matrix")
    sizes.add_argument("--config", metavar="PATH", type=Path, help="take the widths of this model's experts")
    for action in (train, predict, fusion):
        add_json(action)


def run(args: argparse.Namespace) -> int:
    """Train, predict, or show which pairs fuse."""
    return {"train": train_and_write, "predict": print_prediction, "fusion": show_fusion}[args.action](args)


def show_fusion(args: argparse.Namespace) -> int:
    """Print every pair: the saved share of the shorter operator's time, and whether the backend reports one node."""
    backend = _backend_from(args)
    rows = pd.DataFrame([_shape_from(verdict) for verdict in _verdict_rows(backend, args)])
    if print_if_json(args, {"backend": backend.name, "unit": backend.unit, "pairs": rows}, "fusion"):
        return 0
    print_table(rows, f"pairs of operators on {backend.name}")
    agree = int((rows["by_time"] == rows["by_nodes"]).sum())
    print(f"{agree} of {len(rows)} verdicts by time agree with the backend's own report, which decides")
    return 0


def train_and_write(args: argparse.Namespace) -> int:
    """Detect fusion, measure and train every kernel, write the file, print the accuracy on held-out shapes."""
    from analyzer.predict.kernels import fusion, regressors, sampling, training

    if args.start < FEWEST_SHAPES or min(args.rounds, args.extra, args.runs) < 0 or args.held_out < 1:
        raise PredictError(f"give at least {FEWEST_SHAPES} shapes to start from, 1 held out, and no negative number")
    prior = sampling.widths_of([read_config(path) for path in args.config]) if args.config else training.PRIOR
    plan = training.TrainingPlan(training.CHAINS, prior, args.start, args.rounds, args.extra, args.held_out)
    args.out.touch()  # fail before minutes of measuring if the file is not writable
    backend = _backend_from(args)
    predictors = regressors.Predictors(backend.unit, fusion.fusing_pairs(_verdict_rows(backend, args)))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("training", total=len(training.kernels_of(plan.chains, predictors.fused)))
        trained = {}
        for result in training.train_all(backend, predictors, plan):
            regressor = predictors.kernels[result.kernel].chosen
            trained[result.kernel] = {"regressor": regressor, "trained_on": len(result.shapes)} | result.figures()
            progress.update(task, advance=not result.again, description=f"trained {result.kernel}")
    predictors.save(args.out, backend.name)
    rows = pd.DataFrame([{"kernel": name, **facts} for name, facts in trained.items()])
    if print_if_json(args, {"file": str(args.out), "measured_on": predictors.environment, "kernels": rows}, "train"):
        return 0
    print_table(rows, f"held-out shapes on {backend.name}; repeated: measured again")
    print(f"wrote {args.out}")
    return 0


def print_prediction(args: argparse.Namespace) -> int:
    """Print the predicted time of the chain for each number of rows, its kernels, and shapes outside the measured range."""
    from analyzer.predict.kernels import regressors

    predictors = regressors.load_predictors(args.file)
    predictions, messages = [], []
    for rows in _numbers_from(args.rows, "--rows"):
        links = _links_from(args, rows)
        time, texts = predictors.chain(links)
        parts = [{"kernel": name, "time": value} for name, _, value in predictors.parts(links)]
        predictions.append({"rows": rows, "time": time, "kernels": parts})
        messages += texts
    facts = {"unit": predictors.unit, "measured_on": predictors.environment, "chain": args.chain}
    verify = "moescope predict kernels train on that machine prints the error on shapes held out of the training"
    if print_if_json(args, {**facts, "predictions": predictions, "warnings": messages, "verify": verify}, "predict"):
        return 0
    show_predictions(predictors, args.chain, predictions)
    print(f"to verify: {verify}")
    for text in messages:
        print(f"warning: {text}")
    return 0


def show_predictions(predictors: "Predictors", chain: str, predictions: list[dict[str, Any]]) -> None:
    """Print a line for each number of rows: the times of the chain and of its kernels."""
    rows = []
    for prediction in predictions:
        kernels = " + ".join(f"{part['kernel']} {part['time']:.3g}" for part in prediction["kernels"])
        rows.append({"rows": prediction["rows"], f"time, {predictors.unit}": prediction["time"], "kernels": kernels})
    environment = predictors.environment
    print_table(pd.DataFrame(rows), f"{chain}, predicted for {environment.get('backend')} on {environment.get('processor')}")


def _backend_from(args: argparse.Namespace) -> "Backend":
    from analyzer.predict.kernels.backends import Cpu, Htp

    return Cpu(args.runs) if args.backend == "cpu" else Htp(args.runs)


def _verdict_rows(backend: "Backend", args: argparse.Namespace) -> "list[Verdict]":
    from analyzer.predict.kernels import training
    from analyzer.predict.kernels.graphs import Shape

    # Small enough that the time of the operator next to the matrix matters; the NPU's clock is coarser.
    shape = Shape(64, 16, 64) if args.backend == "cpu" else Shape(64, 256, 256)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        pairs = progress.track(training.fusion_verdicts(backend, shape), 2 * len(training.PAIRS), description="which pairs fuse")
        return list(pairs)


def _shape_from(verdict: "Verdict") -> dict[str, Any]:
    names = {"first": verdict.first, "second": verdict.second, "outputs": verdict.outputs}
    return {**names, "saved": verdict.saved, "by_time": verdict.by_time, "by_nodes": verdict.by_nodes}


def _links_from(args: argparse.Namespace, rows: int) -> "list[Link]":
    from analyzer.predict.kernels.graphs import OPERATORS, Shape, chain

    operators = args.chain.split(",")
    if unknown := [name for name in operators if name not in OPERATORS]:
        raise PredictError(f"operator {unknown[0]!r} is unknown: choose from {', '.join(OPERATORS)}")
    widths = _expert_widths(args.config) if args.config else _numbers_from(args.widths, "--widths")
    matrices = sum(OPERATORS[name].weight == "matrix" for name in operators)
    if args.widths and len(widths) != matrices + 1:
        raise PredictError(f"{args.chain} has {matrices} matrices: give --widths {matrices + 1} numbers")
    return chain(operators, Shape(rows, widths[0], widths[1] if matrices else widths[0]), tuple(widths[2:]))


def _expert_widths(config: Path) -> list[int]:
    """[hidden, inner, hidden] of a model's experts, or of its dense layers if it has none."""
    model = read_config(config)
    return [model.hidden, model.mixture.width if model.mixture else model.dense_width, model.hidden]


def _numbers_from(text: str, name: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise PredictError(f"{name} {text!r}: write whole numbers of 1 or more, such as 1,8,64")
    return numbers
