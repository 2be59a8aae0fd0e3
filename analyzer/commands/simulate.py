"""Replay a recording's routing with other settings or on another device: TTFT, TPOT, hit rate, stalls. Does not need the device.

Without --device the costs are fitted to the recordings, for the recorded machine. The first one gives the routes and every
setting that is not given, and is simulated itself to print the error. More recordings of the same model add what it does not show
(a cache that misses, one that holds everything, prefetching). With --device and --config costs are a roofline's: what to expect
there, by default on the CPU with everything in memory. Lists of settings are swept.

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
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from analyzer.commands._show import number, printed
from analyzer.commands.routes import tables_of
from analyzer.errors import PredictError
from analyzer.model import BITS, read_config, with_weights
from analyzer.predict import costs, devices, recorded, simulator, timeline, trace
from analyzer.records import manifest
from moescope.arguments import add_json
from moescope.terminal import console, grid, words
from tracer.recording.format import Recording

MIB = 2**20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("run_dirs", metavar="RUN", type=Path, nargs="+", help="folder of a recording with routes, then others that add costs")
    add(
        "--cache",
        metavar="SIZES",
        help="size of the expert cache, in bytes or as a share of all experts, or a list: 25%%,64MiB",
    )
    add(
        "--prefetch",
        metavar="P",
        help="prefetch experts from this probability on, `recorded` as in the recording, or `off`; or a list",
    )
    add("--chunk", metavar="ROWS", help="prompt rows of one attention run, or a list")
    add("--tiers", metavar="ROWS", help="rows of the experts' static shapes on the NPU")
    add("--prefill", choices=("cpu", "npu"), help="backend for the prompt")
    add("--decode", choices=("cpu", "npu"), help="backend for new tokens")
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
    known = None if args.device else recorded.of(recordings[0], routes, command_of(args.run_dirs[0]))
    settings = list(combinations(args, routes, cost, known.settings if known else simulator.Settings()))
    outcomes = [simulator.simulate(routes, cost, setting) for setting in settings]
    best = simulator.pareto(outcomes)
    if args.timeline:
        timeline.write_run(args.timeline, outcomes[0], cost.source)
    beside = known.against(simulator.simulate(routes, cost, known.settings)) if known else None
    rows = [{**outcome.summary(), "pareto": flag} for outcome, flag in zip(outcomes, best, strict=True)]
    facts = {"costs": cost.source, "warnings": cost.warnings, "steps": len(routes.steps), "recorded": beside}
    if printed(args, {**facts, "runs": rows}):
        return 0
    if known and beside:
        show_recorded(known, beside)
    show(outcomes, best, cost, len(routes.steps))
    return 0


def command_of(path: Path) -> list[str]:
    """The recorded command line; empty for a file of routes."""
    return [] if path.is_file() else manifest.command_of(Recording(path).manifest)


def combinations(args: argparse.Namespace, routes: trace.Trace, cost: costs.Costs, base: simulator.Settings) -> Any:
    """One Settings for each element of the product of the lists; other settings are those of `base`."""
    total_bytes = routes.layers * routes.experts * max(cost.expert_bytes.values())
    caches = [cache_bytes(word, total_bytes) for word in _list(args.cache)] or [base.cache_bytes]
    thresholds = [threshold(word) for word in _list(args.prefetch)] or [base.prefetch]
    chunks = [_number(word, int) for word in _list(args.chunk)] or [base.chunk]
    tiers = tuple(sorted(_number(word, int) for word in _list(args.tiers))) or base.tiers
    units = {"prefill_unit": args.prefill or base.prefill_unit, "decode_unit": args.decode or base.decode_unit}
    for cache, prefetch, chunk in itertools.product(caches, thresholds, chunks):
        yield replace(base, cache_bytes=cache, chunk=chunk, tiers=tiers, prefetch=prefetch, **units)


def _list(words: str | None) -> list[str]:
    return [word.strip() for word in words.split(",")] if words is not None else []


def threshold(word: str) -> float | str | None:
    """`off`, `recorded` or a probability."""
    if word in ("off", simulator.RECORDED):
        return None if word == "off" else word
    return float(_number(word, float))


def cache_bytes(word: str, total_bytes: int) -> int | None:
    """A size from `64MiB`, `1500000`, `25%` of `total_bytes` or `all`; None if everything fits."""
    if word.strip().lower() == "all":
        return None
    share = word.strip().endswith("%")
    size = int(_number(word.strip()[:-1], float) * total_bytes / 100) if share else recorded.byte_count(word)
    return None if size >= total_bytes else size


def show_recorded(known: recorded.Recorded, beside: dict[str, Any]) -> None:
    """Print the recording compared with its own simulation."""
    s, screen = known.settings, console(soft_wrap=True)
    cache = "all" if s.cache_bytes is None else f"{s.cache_bytes / MIB:.2f} MiB ({s.policy})"
    where = f"prefill {s.prefill_unit}, decode {s.decode_unit}, prefetch {s.prefetch or 'off'}"
    screen.print(f"recorded with cache {cache}, chunk {s.chunk}, {where}; {'; '.join(known.remarks)}")
    for who in ("recorded", "simulated"):
        errors = {name: number(beside[f"error_{name}"], "+.1%") for name in ("ttft_ms", "tpot_ms")}
        times = [
            f"{label} {number(beside[f'{who}_{name}'], ',.2f')} ms" + (f" ({errors[name]})" if who == "simulated" else "")
            for label, name in (("TTFT", "ttft_ms"), ("decode step", "tpot_ms"))
        ]
        screen.print(f"{who:9} {', '.join(times)}, hits {number(beside[f'{who}_hit_rate'], '.1%')}")
    screen.print()


def show(outcomes: list[simulator.Outcome], best: list[bool], cost: costs.Costs, steps: int) -> None:
    """Print one line per run; a star marks runs on the Pareto front of memory and time per token."""
    columns = ("peak MiB", "prefetch", "chunk", "TTFT ms", "decode step ms", "p90", "hits", "stall ms", "loaded MiB", "Pareto")
    table = grid(*columns, left=0)
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
        raise PredictError("--device and --config must be given together: the roofline needs both")
    if not args.device:
        return costs.from_tables(*recordings)
    model = read_config(args.config)
    return costs.from_device(with_weights(model, args.weights) if args.weights else model, devices.load(args.device))


def _number(word: str, kind: Any) -> Any:
    try:
        value = kind(word)
        if not isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise PredictError(f"{word!r} is not a number") from None
