"""lm-Meter's harmonic quantization score: speed gained by quantization against quality lost in accuracy.

Speed comes from two recordings of the same work, accuracy from you: perplexities of the same text, or any score where higher is
better. 1 is the original; a single bad part lowers the score, whatever the others gained.

examples:
  moescope predict quantization RUN_FP32 RUN_INT4 --perplexity 11.2 11.9
  moescope predict quantization RUN_FP32 RUN_INT4 --accuracy 0.71 0.69 --json
"""

import argparse
from pathlib import Path

import pandas as pd

from analyzer.commands._show import print_table
from analyzer.errors import PredictError
from analyzer.predict.quantization import PHASES, QuantizedResult, from_perplexity, harmonic_score
from analyzer.questions.summary import token_summary
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("original", metavar="ORIGINAL", type=Path, help="recording of the original model")
    parser.add_argument("quantized", metavar="QUANTIZED", type=Path, help="recording of the quantized model")
    accuracy = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("--perplexity", "perplexity of each model on the same text, 1 or more"),
        ("--accuracy", "score of each model, above 0; higher is better"),
    ):
        accuracy.add_argument(name, metavar=("ORIGINAL", "QUANTIZED"), type=float, nargs=2, help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the figures of each recording, then the score and its parts."""
    speeds = [ms_per_token(folder) for folder in (args.original, args.quantized)]
    if args.perplexity:
        original, quantized = (from_perplexity(p, speed) for p, speed in zip(args.perplexity, speeds, strict=True))
    else:
        original, quantized = (QuantizedResult(a, speed) for a, speed in zip(args.accuracy, speeds, strict=True))
    score = harmonic_score(quantized, original)
    if print_if_json(args, {"original": vars(original), "quantized": vars(quantized), **score}):
        return 0
    rows = [
        {"run": name, "accuracy": p.accuracy, **{f"{phase} ms/token": p.ms_per_token[phase] for phase in PHASES}}
        for name, p in (("original", original), ("quantized", quantized))
    ]
    print_table(
        pd.DataFrame([*rows, {"run": "kept or gained", **dict(zip(list(rows[0])[1:], list(score.values())[1:], strict=True))}])
    )
    print(f"harmonic quantization score {score['score']:.3f} (1: as good as the original)")
    return 0


def ms_per_token(folder: Path) -> dict[str, float]:
    """Phase → ms per token of a recording, from the speeds in `summary`."""
    figures = token_summary(load_tables(folder))
    speeds = {phase: figures.get(f"{phase}_tokens_per_s") for phase in PHASES}
    if missing := [phase for phase, speed in speeds.items() if not speed]:
        raise PredictError(f"{folder} shows no speed of {' and '.join(missing)}: record a prompt and some decoded tokens")
    return {phase: 1e3 / float(speed) for phase, speed in speeds.items() if speed}
