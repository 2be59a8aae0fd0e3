"""Replay a recording's routing with other settings or on another device: TTFT, TPOT, hit rate, stalls. Does not need the device.

Without --device the costs are fitted to the recordings, for the recorded machine. The first one gives the routes and every
setting that is not given, and is simulated itself to print the error. More recordings of the same model add what it does not show
(a cache that misses, one that holds everything, prefetching). With --device and --config costs are a roofline's: what to expect
there, by default on the CPU with everything in memory. Lists of settings are swept.

examples:
  moescope simulate RUN --cache 50%
  moescope simulate RUN ALL --cache 25%,50%,100% --prefetch off,recorded      which settings are worth their memory
  moescope simulate RUN --cache 25%,50%,75%,100% --html pareto.html                     memory against time, as a page
  moescope simulate RUN --device snapdragon-8-elite --config MODEL_DIR --weights int4 --prefill npu --cache 25%
  moescope simulate trace.csv --device snapdragon-8-elite --config MODEL_DIR      routes that another program wrote
  moescope simulate qwen.route.csv --measured qwen.metrics --cache 2000MiB,4000MiB,6000MiB     with that engine's times
  moescope simulate RUN --cache 50% --timeline SIM && moescope write SIM --only trace
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from analyzer.commands._show import number
from analyzer.errors import PredictError
from analyzer.imports.routes import tables_of
from analyzer.model import BITS, Model, read_config, with_weights
from analyzer.predict import costs, devices, measured, recorded, simulator, timeline, trace
from analyzer.predict.energy import StepWatts, device_watts, recorded_watts, with_energy
from analyzer.predict.sizes import byte_count
from analyzer.records import manifest
from moescope.answers import json_text, print_if_json
from moescope.arguments import add_json
from moescope.plain import print_plain
from moescope.terminal import console, counted, grid, words
from tracer.recording.format import Recording
from views.pareto import write_pareto

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
    add("--measured", metavar="FILE", type=Path, help="times per step of the engine that wrote the routes (.metrics)")
    add("--timeline", metavar="DIR", type=Path, help="write the first simulated run as a folder for `moescope write`")
    add("--html", metavar="FILE", type=Path, help="write the page of the sweep: memory against time")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate every combination and print them."""
    recordings = [tables_of(path) for path in args.run_dirs]
    routes = trace.from_tables(recordings[0])
    times = measured.read_steps(args.measured) if args.measured else None
    cost = _costs_for(args, recordings, routes, times)
    known = None if args.device or times else recorded.recorded_run(recordings[0], routes, command_of(args.run_dirs[0]))
    settings = list(all_settings(args, routes, cost, known.settings if known else simulator.Settings()))
    outcomes = [simulator.simulate_trace(routes, cost, setting) for setting in settings]
    best = simulator.on_pareto_front(outcomes)
    if args.timeline:
        timeline.write_run(args.timeline, outcomes[0], cost.source)
    beside = known.against(simulator.simulate_trace(routes, cost, known.settings)) if known else None
    if times and (same := _at_recorded_size(outcomes, times)):
        beside = times.against(same, recordings[0])
    rows = [{**outcome.summary(), "pareto": flag} for outcome, flag in zip(outcomes, best, strict=True)]
    watts = watts_for(args, recordings[0], settings[0])
    rows = with_energy(rows, outcomes, watts)
    warnings = [*cost.warnings, *doubts_about(outcomes, routes)]
    warnings += recorded.prefetch_warnings(routes, known, settings, max(cost.expert_bytes.values()))
    facts = {"costs": cost.source, "warnings": warnings, "steps": len(routes.steps), "dropped_steps": routes.dropped}
    facts |= {"energy": watts.basis if watts else ""}
    verify = measuring_command(args)
    document = {**facts, "recorded": beside, "verify": verify, "runs": rows}
    if args.html:
        write_pareto(json.loads(json_text(document)), args.html)
    if print_if_json(args, document):
        return 0
    if beside:
        show_recorded(known, beside)
    print_outcomes(rows, cost.source, len(routes.steps))
    for text in warnings:
        console(soft_wrap=True).print(words(("warning:", "yellow"), f" {text}"))
    if watts:
        print_plain(f"energy: modelled, not measured: {watts.basis}")
    print_plain(f"to verify: {verify}")
    return 0


def watts_for(args: argparse.Namespace, tables: costs.Tables, setting: simulator.Settings) -> StepWatts | None:
    """Watts of the device profile, or of the recording; None without."""
    if args.device:
        units = {"prefill": setting.prefill_unit, "decode": setting.decode_unit}
        return device_watts(stored_model(args), devices.load_device(args.device), units)
    return recorded_watts(tables) if "power" in tables else None


def stored_model(args: argparse.Namespace) -> Model:
    """The model of --config with the weights of --weights."""
    model = read_config(args.config)
    return with_weights(model, args.weights) if args.weights else model


def _at_recorded_size(outcomes: list[simulator.Outcome], times: measured.MeasuredSteps) -> simulator.Outcome | None:
    """The outcome with the cache that the measured engine had; None if it was not asked for."""
    budget = times.sums.get("cache_budget_MiB")
    return next((o for o in outcomes if budget and o.settings.cache_bytes == round(budget * MIB)), None)


def measuring_command(args: argparse.Namespace) -> str:
    """The command that would measure what was simulated."""
    first = args.run_dirs[0]
    cache = _list_of(args.cache)[:1] or ["SIZE"]
    if first.is_file():
        return f"run the engine that wrote {first} with an expert cache of {cache[0]}, and compare its figures"
    engine = f"moescope generate PACKAGE --expert-cache {cache[0]}"
    return f"sudo moescope run -o RUN -- {engine}; then moescope summary RUN"


def command_of(path: Path) -> list[str]:
    """The recorded command line; empty for a file of routes."""
    return [] if path.is_file() else manifest.command_of(Recording(path).manifest)


def all_settings(args: argparse.Namespace, routes: trace.Trace, cost: costs.Costs, base: simulator.Settings) -> Any:
    """One Settings for each element of the product of the lists; other settings are those of `base`."""
    total_bytes = cost.all_experts(routes.layers, routes.experts)
    caches = [cache_bytes(word, total_bytes) for word in _list_of(args.cache)] or [base.cache_bytes]
    thresholds = [parse_threshold(word) for word in _list_of(args.prefetch)] or [base.prefetch]
    chunks = [_number_from(word, int) for word in _list_of(args.chunk)] or [base.chunk]
    tiers = tuple(sorted(_number_from(word, int) for word in _list_of(args.tiers))) or base.tiers
    units = {"prefill_unit": args.prefill or base.prefill_unit, "decode_unit": args.decode or base.decode_unit}
    for cache, prefetch, chunk in itertools.product(caches, thresholds, chunks):
        yield replace(base, cache_bytes=cache, chunk=chunk, tiers=tiers, prefetch=prefetch, **units)


def _list_of(words: str | None) -> list[str]:
    return [word.strip() for word in words.split(",")] if words is not None else []


def parse_threshold(word: str) -> float | str | None:
    """`off`, `recorded` or a probability."""
    if word in ("off", simulator.RECORDED):
        return None if word == "off" else word
    return float(_number_from(word, float))


def cache_bytes(word: str, total_bytes: int) -> int | None:
    """A size from `64MiB`, `1500000`, `25%` of `total_bytes` or `all`; None if everything fits."""
    if word.strip().lower() == "all":
        return None
    share = word.strip().endswith("%")
    size = int(_number_from(word.strip()[:-1], float) * total_bytes / 100) if share else byte_count(word)
    return None if size >= total_bytes else size


def show_recorded(known: recorded.RecordedRun | None, beside: dict[str, Any]) -> None:
    """Print the recording, or the measured steps, compared with their own simulation."""
    screen = console(soft_wrap=True)
    if known:
        s = known.settings
        cache = "all" if s.cache_bytes is None else f"{s.cache_bytes / MIB:.2f} MiB ({s.policy})"
        where = f"prefill {s.prefill_unit}, decode {s.decode_unit}, prefetch {s.prefetch or 'off'}"
        screen.print(f"recorded with cache {cache}, chunk {s.chunk}, {where}; {'; '.join(known.remarks)}")
    for who in ("recorded", "simulated"):

        def part(label: str, name: str, scale: float = 1.0, unit: str = "ms", who: str = who) -> str:
            value, error = beside.get(f"{who}_{name}"), beside.get(f"error_{name}")
            text = f"{label} {number(value / scale if value is not None else None, ',.2f')} {unit}"
            return text + (f" ({number(error, '+.1%')})" if who == "simulated" else "")

        read = [part("read in decode", "decode_bytes", MIB, "MiB")] if "recorded_decode_bytes" in beside else []
        times = [part("TTFT", "ttft_ms"), part("decode step", "tpot_ms"), *read]
        screen.print(f"{who:9} {', '.join(times)}, hits {number(beside[f'{who}_hit_rate'], '.1%')}")
    if beside.get("median_error_of_a_step") is not None:
        screen.print(f"half of the single steps are within {beside['median_error_of_a_step']:.1%} of the measured ones")
    screen.print()


def doubts_about(outcomes: list[simulator.Outcome], routes: trace.Trace) -> list[str]:
    """What outcomes without hits, and incomplete routes, have to say."""
    rows = [outcome.summary() for outcome in outcomes]
    none = any(row["decode_hit_rate"] == 0 for row in rows)
    doubts = ["a cache below about one token's experts hits nothing in decode"] if none else []
    left_out = f"left out, as routes are missing: {counted(routes.dropped, 'step')}"
    return [*doubts, left_out] if routes.dropped else doubts


def print_outcomes(rows: list[dict[str, Any]], source: str, steps: int) -> None:
    """Print one line per run; a star marks runs on the Pareto front of memory and time per token."""
    swept = [name for name in ("prefetch", "chunk") if len({str(row[name]) for row in rows}) > 1]
    powered = ["J/token"] if any(row["j_per_token"] is not None for row in rows) else []
    sizes = ("loaded MiB", "decode MiB", *powered, "")
    table = grid("peak MiB", *swept, "TTFT ms", "step ms", "p90", "hits", "decode hits", "stall ms", *sizes, left=0)
    for row in rows:
        settings = (brief_number(row["peak_cache_bytes"] / MIB), *(str(row[name] or "off") for name in swept))
        times = (brief_number(row[name]) for name in ("ttft_ms", "tpot_ms", "tpot_p90_ms"))
        hits = (number(row[name], ".1%") for name in ("hit_rate", "decode_hit_rate"))
        loaded = (brief_number(row[name] / MIB) for name in ("loaded_bytes", "decode_loaded_bytes"))
        joules = [number(row["j_per_token"], ".3g") for _ in powered]
        table.add_row(*settings, *times, *hits, brief_number(row["stall_ms"]), *loaded, *joules, "*" if row["pareto"] else "")
    screen = console(soft_wrap=True)
    screen.print(table)
    screen.print()
    common = ", ".join(f"{name} {rows[0][name] or 'off'}" for name in ("prefetch", "chunk") if name not in swept)
    text = f"simulated, not measured: {counted(steps, 'step')} of the recorded routes"
    screen.print(f"{text}{f', {common}' if common else ''}; * on the Pareto front; costs {source}")


def brief_number(value: float | None) -> str:
    """A figure in few characters; "-" if unknown."""
    return number(value, ",.0f" if value is not None and value >= 1000 else ".2f")


def _costs_for(
    args: argparse.Namespace, recordings: Sequence[costs.Tables], routes: trace.Trace, times: measured.MeasuredSteps | None
) -> costs.Costs:
    if bool(args.device) != bool(args.config) or (times and args.device):
        raise PredictError("give --device with --config, for a roofline's costs, or --measured alone")
    if times:
        prompts = recordings[0]["tokens"].query("phase == 'prefill'")["token_id"]
        loads = recordings[0]["loads"]
        return times.costs(routes, int(loads.loc[loads["token_id"].isin(prompts), "bytes"].sum()))
    if not args.device and args.run_dirs[0].is_file():
        raise PredictError(f"{args.run_dirs[0]} holds routes without times: add --device and --config, or --measured")
    if not args.device:
        return costs.from_tables(*recordings)
    model = stored_model(args)
    check_contradictions(routes, model, args.config)
    cost = costs.from_device(model, devices.load_device(args.device))
    sized = costs.with_recorded_sizes(cost, routes.expert_bytes)
    # --weights of another size than the recorded ones asks what they would change.
    return cost if args.weights and sized.warnings != cost.warnings else sized


def check_contradictions(routes: trace.Trace, model: Model, config: Path) -> None:
    """Refuse routes that another model, or this one with other settings, must have written."""
    mixture, layers = model.mixture, sum(model.routed)
    if not mixture:
        return
    found = {"layers with experts": (routes.layers, layers), "experts per token": (routes.top_k, mixture.top_k)}
    wrong = [f"{ours} {name}, the config {its}" for name, (ours, its) in found.items() if ours != its]
    if routes.experts > mixture.experts:
        wrong.append(f"an expert {routes.experts - 1}, the config {mixture.experts} experts")
    if wrong:
        hint = "give the model's own config.json, or a copy with the setting of the engine (num_experts_per_tok)"
        raise PredictError(f"the routes contradict {config}: they have {'; '.join(wrong)}: {hint}")


def _number_from(word: str, kind: Any) -> Any:
    try:
        value = kind(word)
        if not isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise PredictError(f"{word!r} is not a number") from None
