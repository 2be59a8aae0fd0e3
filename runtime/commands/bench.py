"""python -m runtime bench: prefill and decode speed, in llama-bench's rows."""

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.arguments import add_model
from runtime.commands.generate import add_placement

if TYPE_CHECKING:
    from runtime.cache_rules.forms import Reason
    from runtime.moe import MoE

EXAMPLES = """examples:
  python -m runtime bench /models/qwen3-moe.package --threads 2
  python -m runtime bench /models/qwen3-moe.package -p 0 -n 128 -r 3 -o json --expert-cache 1GiB"""
SEED = 0


@dataclass(frozen=True)
class Row:
    """One test. Speeds are tokens per second, mean and deviation over repetitions; the rest is summed and given per token.

    stall_ms: a layer stood still for experts to come. padding_waste: share of rows that NPU shapes added. peak_pss_bytes: the
    largest proportional set size seen after loading and after each repetition. instruction_set: of products with quantized
    weights; None where experts are floats.
    """

    model: str
    bytes: int
    backend: str
    threads: int
    instruction_set: str | None
    test: str
    tokens_per_second: float
    deviation: float
    repetitions: int
    hit_rate: float | None
    demand_bytes_per_token: float
    prefetched_bytes_per_token: float
    stall_ms_per_token: float
    padding_waste: float
    peak_pss_bytes: int


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument(
        "-p",
        "--n-prompt",
        type=int,
        default=512,
        metavar="N",
        help="prompt tokens of the pp test; 0: no such test (default: 512)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        type=int,
        default=128,
        metavar="N",
        help="generated tokens of the tg test; 0: no such test (default: 128)",
    )
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N", help="repetitions of each test, after a warm-up (default: 5)"
    )
    parser.add_argument("-o", "--output", choices=("md", "csv", "json"), default="md", help="format (default: md)")
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from runtime.commands import show_progress
    from runtime.commands.generate import engine_options
    from runtime.errors import RequestError
    from runtime.moe import MoE

    if args.repetitions < 1 or args.n_prompt < 0 or args.n_gen < 0 or not args.n_prompt + args.n_gen:
        raise RequestError("give at least one repetition of at least one test with tokens")
    with show_progress("converting") as progress:
        model = MoE.load(args.model, args.expert_cache, args.package, progress, **engine_options(args))
    try:
        tests = [(f"pp{args.n_prompt}", args.n_prompt, 0), (f"tg{args.n_gen}", 0, args.n_gen)]
        rows = [measure(model, name, p, n, args.repetitions) for name, p, n in tests if p + n]
    finally:
        model.close()
    show(rows, args.output)
    return 0


def measure(model: "MoE", name: str, prompt: int, generated: int, repetitions: int) -> Row:
    """One test: seeded token ids, a repetition to warm up, then the counted ones."""
    import numpy as np

    from runtime.cache_rules.forms import Reason
    from runtime.telemetry.probes import Phase

    decoding, speeds = bool(generated), []
    run_once(model, prompt or 1, min(generated, 4) if decoding else 1)
    log, peak = model.log, pss()
    before, counted = Counts.of(model), 0
    for _ in range(repetitions):
        first = len(log.steps)
        run_once(model, prompt or 1, generated + 1 if decoding else 1)
        wanted = Phase.DECODE if decoding else Phase.PREFILL
        steps = [step for step in log.steps[first:] if step.phase == wanted]
        tokens = sum(step.n_tokens for step in steps)
        speeds.append(tokens / sum(step.duration_ns for step in steps) * 1e9)
        counted, peak = counted + tokens, max(peak, pss())
    spent, engine = Counts.of(model).since(before), model.describe()
    asked = spent.hits + spent.misses
    return Row(
        model=f"{model.package.manifest['model_type']} {model.package.manifest['target']['bits']} bit",
        bytes=sum(entry["bytes"] for entry in model.package.manifest["files"].values()),
        backend=engine["backends"]["decode" if decoding else "prefill"],
        threads=engine["threads"],
        instruction_set=engine["instruction_set"],
        test=name,
        tokens_per_second=float(np.mean(speeds)),
        deviation=float(np.std(speeds, ddof=1)) if repetitions > 1 else 0.0,
        repetitions=repetitions,
        hit_rate=spent.hits / asked if asked else None,
        demand_bytes_per_token=spent.loaded.get(Reason.DEMAND, 0) / counted,
        prefetched_bytes_per_token=spent.loaded.get(Reason.PREFETCH, 0) / counted,
        stall_ms_per_token=spent.stall_ns / counted / 1e6,
        padding_waste=spent.padding / (spent.rows + spent.padding) if spent.rows else 0.0,
        peak_pss_bytes=peak,
    )


def run_once(model: "MoE", prompt: int, limit: int) -> None:
    """One seeded prompt, and new tokens whatever they are."""
    import numpy as np

    ids = np.random.default_rng(SEED).integers(0, model.package.family.vocabulary, prompt).tolist()
    for _ in model.generate(ids, limit, ignore_end=True):
        pass


@dataclass(frozen=True)
class Counts:
    """What the runtime's log has counted so far."""

    hits: int
    misses: int
    stall_ns: int
    rows: int
    padding: int
    loaded: "dict[Reason, int]"

    @classmethod
    def of(cls, model: "MoE") -> "Counts":
        """Now."""
        log = model.log
        return cls(log.hits, log.misses, log.stall_ns, log.expert_rows, log.padding_rows, dict(log.load_bytes))

    def since(self, before: "Counts") -> "Counts":
        """The difference."""
        loaded = {reason: size - before.loaded.get(reason, 0) for reason, size in self.loaded.items()}
        numbers = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self) if f.name != "loaded"}
        return Counts(**numbers, loaded=loaded)


def pss() -> int:
    """Proportional set size of this process in bytes; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def show(rows: list[Row], output: str) -> None:
    """Print rows as Markdown, CSV or JSON."""
    from runtime.units import show_bytes

    if output == "json":
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    if output == "csv":
        writer = csv.DictWriter(sys.stdout, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        return
    heads = ["model", "size", "backend", "threads", "set", "test", "t/s", "hits", "demand/token", "prefetched/token"]
    heads += ["stall ms/token", "padding", "peak PSS"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for r in rows:
        cells = [
            r.model,
            show_bytes(r.bytes),
            r.backend,
            str(r.threads),
            r.instruction_set or "none",
            r.test,
            f"{r.tokens_per_second:.2f} ± {r.deviation:.2f}",
        ]
        cells += ["none" if r.hit_rate is None else f"{r.hit_rate:.1%}", show_bytes(r.demand_bytes_per_token)]
        cells += [show_bytes(r.prefetched_bytes_per_token), f"{r.stall_ms_per_token:.3f}", f"{r.padding_waste:.1%}"]
        print(f"| {' | '.join([*cells, show_bytes(r.peak_pss_bytes)])} |")
