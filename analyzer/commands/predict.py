"""Predict a step on a device from a model's config.json: a roofline with measured kernel efficiencies, and the source of each.

examples:
  moescope predict --config DIR --device h20 --phase decode --batch 64 --context 4096
  moescope predict --config DIR --device h800 --phase prefill --batch 4 --context 4096 --ep 32 --overlap pipeline
  moescope predict --config DIR --device snapdragon-8-elite --unit npu --phase decode --weights int4
  moescope predict --config DIR --device here.toml --phase decode --json
  moescope predict --config DIR --device here.toml --phase decode --context 200 --beside RUN      against a recording
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from analyzer.commands._show import print_table as show_frame
from analyzer.model import BITS, read_config, with_weights
from analyzer.predict import devices
from analyzer.predict.beside import compare_operators, setup_differences
from analyzer.predict.energy import predicted_energy
from analyzer.predict.prediction import Prediction, predict_step
from analyzer.predict.setup import KV_BYTES, OVERLAPS, Setup
from analyzer.tables.store import load_tables
from moescope.answers import print_if_json
from moescope.arguments import add_json, add_phase
from moescope.plain import print_plain
from moescope.terminal import console, grid, words


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--config", metavar="PATH", type=Path, required=True, help="config.json of a Hugging Face model, or its folder")
    add("--device", metavar="NAME", required=True, help="device profile (`moescope predict device` lists them) or a TOML file")
    add_phase(parser, required=True)
    add("--batch", metavar="N", type=int, default=1, help="sequences on each device (default: 1)")
    add(
        "--context",
        metavar="N",
        type=int,
        default=1024,
        help="length of each prompt, or of each KV cache in decode (default: 1024)",
    )
    add("--ep", metavar="N", type=int, default=1, help="devices that share the experts (default: 1)")
    add("--tp", metavar="N", type=int, default=1, help="devices that share heads and dense layers (default: 1)")
    add("--overlap", choices=OVERLAPS, default="none", help="how communication overlaps with computing (default: none)")
    add("--micro-batches", metavar="N", type=int, default=2, help="micro-batches, with --overlap (default: 2)")
    add("--weights", choices=tuple(BITS), help="type of the stored weights (default: as in the config)")
    add("--kv", choices=tuple(KV_BYTES), default="fp16", help="type of the KV cache (default: fp16)")
    add("--unit", metavar="NAME", default="", help="compute unit (default: the profile's first)")
    add("--beside", metavar="RUN", type=Path, help="recording of the same model: shows its operators beside the predicted parts")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    model = read_config(args.config)
    if args.weights:
        model = with_weights(model, args.weights)
    setup = Setup(
        args.phase, args.batch, args.context, args.kv, args.ep, args.tp, args.overlap, args.micro_batches, args.unit
    )  # fmt: skip
    prediction = predict_step(model, devices.load_device(args.device), setup)
    tables = load_tables(args.beside) if args.beside else None
    measured = compare_operators(prediction, tables) if tables else None
    verify = measuring_commands(args)
    summary = prediction.summary() | predicted_energy(prediction)
    if print_if_json(args, {"parts": prediction.rows(), "summary": summary, "verify": verify, "measured": measured}):
        return 0
    print_prediction(prediction, summary, console())
    if measured is None:
        print_plain(f"to verify: {verify}")
    if measured is not None and tables:
        show_frame(measured, f"measured and predicted: the mean {setup.phase} step")
        if text := setup_differences(prediction, tables):
            print_plain(f"warning: {text}")
    return 0


def measuring_commands(args: argparse.Namespace) -> str:
    """The commands that measure what was predicted."""
    given = {"--weights": args.weights, "--unit": args.unit, "--batch": args.batch, "--context": args.context}
    words = " ".join(f"{name} {value}" for name, value in given.items() if value)
    again = f"moescope predict --config {args.config} --device {args.device} --phase {args.phase} {words} --beside RUN"
    return f"on that device, sudo moescope run -o RUN -- ENGINE; then {again}"


def print_prediction(prediction: Prediction, answer: dict[str, Any], screen: Console) -> None:
    """Print parts, the figures in `answer`, and warnings."""
    columns = ("part", "layers", "GFLOP", "weights", "KV", "us", "step ms", "bound")
    table = grid(*columns, left=("part", "bound"))
    for row in prediction.rows():
        sizes = (f"{row['gflop']:.3g}", _size_from_text(row["weight_bytes"]), _size_from_text(row["kv_bytes"]))
        times = (f"{row['us']:.1f}", f"{row['step_ms']:.2f}")
        table.add_row(row["part"], str(row["layers"]), *sizes, *times, row["bound"])
    screen.print(table)
    screen.print()
    screen.print(words(("from", "bold")))
    for row in prediction.rows():
        screen.print(f"{row['part']}: {row['source']}", soft_wrap=True)
    name = "TTFT" if answer["phase"] == "prefill" else "TPOT"
    screen.print()
    about = (f" ({answer['weights']}) on ", (answer["device"], "bold"), ", predicted, not measured")
    screen.print(words((answer["model"], "bold"), *about))
    screen.print(
        f"{name} {prediction.seconds * 1e3:.2f} ms, {prediction.tokens_per_s:,.1f} tokens/s and device; "
        f"a layer is {answer['formula']}"
    )
    screen.print(f"weights {_size_from_text(answer['weight_bytes'])}, KV cache {_size_from_text(answer['kv_bytes'])} per device")
    if "joules" in answer:
        watts = answer["joules"] / prediction.seconds
        screen.print(f"{answer['j_per_token']:.3g} J/token, {watts:.3g} W; {answer['energy_basis']}", soft_wrap=True)
    for text in answer["warnings"]:
        screen.print(words(("warning:", "yellow"), f" {text}"))


def _size_from_text(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return "-" if not count else f"{count:.0f} B"
