"""Replay a recording's routing with other settings or on another device: TTFT, TPOT, hit rate, stalls. Needs no such device.

Without --device the costs are fitted to the recordings: what would happen here. The first one gives the routes; more of the same
model add what it does not show (a cache that misses, one that holds everything, prefetching). With --device and --config costs
are a roofline's: what to expect there. --cache takes bytes (64MiB) or a share of all experts (50%); lists are swept.

examples:
  python -m analyzer simulate RUN --cache 50%
  python -m analyzer simulate RUN ALL --cache 25%,50%,100% --prefetch off,recorded      which settings are worth their memory
  python -m analyzer simulate RUN --cache 25%,50%,75%,100% --json > sweep.json && python -m views pareto sweep.json
  python -m analyzer simulate RUN --device snapdragon-8-elite --config MODEL_DIR --weights int4 --prefill npu --cache 25%
  python -m analyzer simulate trace.csv --device snapdragon-8-elite --config MODEL_DIR      routes that another program wrote
  python -m analyzer simulate RUN --cache 50% --timeline SIM && python -m views trace SIM
"""

import argparse
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analyzer.commands._show import number
from analyzer.commands.routes import tables_of
from analyzer.errors import PredictError
from analyzer.model import BITS, read_config, with_weights
from analyzer.predict import costs, devices, simulator, timeline, trace
from moescope.arguments import add_json
from moescope.terminal import console, grid, words

SCALES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MIB = 2**20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("run_dirs", metavar="RUN", type=Path, nargs="+", help="folder of a recording with routes, then others that add costs")
    add(
        "--cache",
        metavar="SIZES",
        default="100%",
        help="size of the expert cache, in bytes or as a share of all experts, or a list: 25%%,64MiB (default: 100%%)",
    )
    add(
        "--prefetch",
        metavar="P",
        default="off",
        help="prefetch experts from this probability on, `recorded` as in the recording, or `off`; or a list (default: off)",
    )
    add("--chunk", metavar="ROWS", default="64", help="prompt rows of one attention run, or a list (default: 64)")
    add("--tiers", metavar="ROWS", default="1,8,32", help="rows of the experts' static shapes on the NPU (default: 1,8,32)")
    add("--prefill", choices=("cpu", "npu"), default="cpu", help="where the prompt runs (default: cpu)")
    add("--decode", choices=("cpu", "npu"), default="cpu", help="where new tokens run (default: cpu)")
    add("--device", metavar="NAME", help="device profile, with --config")
    add("--config", metavar="PATH", type=Path, help="config.json of the model whose roofline gives the costs, with --device")
    add("--weights", choices=tuple(BITS), help="type of that model's stored weights")
    add("--timeline", metavar="DIR", type=Path, help="write the first simulated run as a folder for `python -m views trace`")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate every combination and print them."""
    recordings = [tables_of(path) for path in args.run_dirs]
    routes = trace.from_tables(recordings[0])
    cost = _costs(args, recordings)
    settings = list(combinations(args, routes, cost))
    outcomes = [simulator.simulate(routes, cost, setting) for setting in settings]
    best = simulator.pareto(outcomes)
    if args.timeline:
        timeline.write_run(args.timeline, outcomes[0], cost.source)
    if args.json:
        rows = [{**outcome.summary(), "pareto": flag} for outcome, flag in zip(outcomes, best, strict=True)]
        print(json.dumps({"costs": cost.source, "warnings": list(cost.warnings), "steps": len(routes.steps), "runs": rows}))
        return 0
    show(outcomes, best, cost, len(routes.steps))
    return 0


def combinations(args: argparse.Namespace, routes: trace.Trace, cost: costs.Costs) -> Any:
    """One Settings for each element of the product of the lists."""
    total_bytes = routes.layers * routes.experts * max(cost.expert_bytes.values())
    caches = [cache_bytes(word, total_bytes) for word in args.cache.split(",")]
    thresholds = [threshold(word.strip()) for word in args.prefetch.split(",")]
    chunks = [_number(word, int) for word in args.chunk.split(",")]
    tiers = tuple(sorted(_number(word, int) for word in args.tiers.split(",")))
    for cache, prefetch, chunk in itertools.product(caches, thresholds, chunks):
        yield simulator.Settings(cache, chunk, tiers, prefetch, args.prefill, args.decode)


def threshold(word: str) -> float | str | None:
    """`off`, `recorded` or a probability."""
    if word in ("off", simulator.RECORDED):
        return None if word == "off" else word
    return float(_number(word, float))


def cache_bytes(word: str, total_bytes: int) -> int | None:
    """A size from `64MiB`, `1500000` or `25%` of `whole` bytes; None where everything fits."""
    match = re.fullmatch(r"([0-9.]+)\s*(%|[a-z]*)", word.strip().lower())
    if not match or (match[2] != "%" and match[2] not in SCALES):
        raise PredictError(f"cache size {word!r} is none: write 64MiB, 1500000 or 50%")
    size = _number(match[1], float) * (total_bytes / 100 if match[2] == "%" else SCALES[match[2]])
    return None if size >= total_bytes else int(size)


def show(outcomes: list[simulator.Outcome], best: list[bool], cost: costs.Costs, steps: int) -> None:
    """One line a run; a star marks what nothing beats in both memory and time per token."""
    columns = ("cache MiB", "prefetch", "chunk", "TTFT ms", "TPOT ms", "p90", "hits", "stall ms", "loaded MiB", "Pareto")
    table = grid(*columns, left=0, fold=True)
    for outcome, flag in zip(outcomes, best, strict=True):
        s = outcome.summary()
        sizes = (f"{outcome.peak_bytes / MIB:.2f}", str(s["prefetch"] or "off"), str(s["chunk"]))
        times = (number(s[name], ".2f") for name in ("ttft_ms", "tpot_ms", "tpot_p90_ms"))
        hits, stall = number(s["hit_rate"], ".1%"), number(s["stall_ms"], ".2f")
        table.add_row(*sizes, *times, hits, stall, f"{s['loaded_bytes'] / MIB:.1f}", "*" if flag else "")
    screen = console(soft_wrap=True)
    screen.print(table)
    screen.print()
    screen.print(f"simulated, not measured: {steps} steps of the recorded routes; costs {cost.source}")
    for text in cost.warnings:
        screen.print(words(("warning:", "yellow"), f" {text}"))


def _costs(args: argparse.Namespace, recordings: Sequence[costs.Tables]) -> costs.Costs:
    if bool(args.device) != bool(args.config):
        raise PredictError("--device and --config go together: the roofline needs both")
    if not args.device:
        return costs.from_tables(*recordings)
    model = read_config(args.config)
    return costs.from_device(with_weights(model, args.weights) if args.weights else model, devices.load(args.device))


def _number(word: str, kind: Any) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise PredictError(f"{word!r} is no number") from None
