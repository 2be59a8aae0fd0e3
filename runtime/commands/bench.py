"""moescope bench: prefill and decode speed, in llama-bench's rows."""

import argparse
import csv
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from moescope.answers import print_if_json
from moescope.arguments import add_model
from runtime.commands import add_count
from runtime.commands.generate import add_placement, load_model

if TYPE_CHECKING:
    from runtime.cache_rules.forms import Reason
    from runtime.moe import MoE
    from runtime.telemetry.log import RunLog

EXAMPLES = """examples:
  moescope bench /models/qwen3-moe.package --threads 2
  moescope bench /models/qwen3-moe.package -p 0 -n 128 -r 3 -o json --expert-cache 1GiB"""
SEED = 0


@dataclass(frozen=True)
class Row:
    """One test. Speeds are tokens per second, mean and standard deviation over repetitions; all else is summed, then per token.

    stall_ms: time that layers waited for experts. padding_waste: share of rows that NPU shapes added. peak_pss_bytes: the
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
    add_count(parser, "-p", "--n-prompt", default=512, help="prompt tokens of the pp test; 0: no such test")
    add_count(parser, "-n", "--n-gen", default=128, help="generated tokens of the tg test; 0: no such test")
    add_count(parser, "-r", "--repetitions", default=5, help="repetitions of each test, after a warm-up")
    parser.add_argument("-o", "--output", choices=("md", "csv", "json"), default="md", help="format (default: md)")
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="the same as --output json")
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    args.json = args.output == "json"
    from runtime.errors import RequestError

    if args.repetitions < 1 or args.n_prompt < 0 or args.n_gen < 0 or not args.n_prompt + args.n_gen:
        raise RequestError("give at least one repetition of at least one test with tokens")
    with load_model(args)[0] as model:
        tests = [(f"pp{args.n_prompt}", args.n_prompt, 0), (f"tg{args.n_gen}", 0, args.n_gen)]
        rows = [run_test(model, name, p, n, args.repetitions) for name, p, n in tests if p + n]
    print_rows(args, rows)
    return 0


def run_test(model: "MoE", name: str, prompt: int, generated: int, repetitions: int) -> Row:
    """Run one test: seeded token ids, a warm-up repetition, then the counted ones."""
    import numpy as np

    from runtime.cache_rules.forms import Reason
    from runtime.telemetry.probes import Phase

    decoding, speeds = bool(generated), []
    run_once(model, prompt or 1, min(generated, 4) if decoding else 1)
    log, peak = model.log, memory_in_use()
    before, counted = log_counts(log), 0
    for _ in range(repetitions):
        first = log.next_seq
        run_once(model, prompt or 1, generated + 1 if decoding else 1)
        phase = Phase.DECODE if decoding else Phase.PREFILL
        steps = [step for step in log.steps if step.seq >= first and step.phase == phase]
        tokens = sum(step.n_tokens for step in steps)
        speeds.append(tokens / sum(step.duration_ns for step in steps) * 1e9)
        counted, peak = counted + tokens, max(peak, memory_in_use())
    spent, engine = log_counts(log) - before, model.describe()
    asked, rows = spent["hits"] + spent["misses"], spent["expert_rows"] + spent["padding_rows"]
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
        hit_rate=spent["hits"] / asked if asked else None,
        demand_bytes_per_token=spent[Reason.DEMAND] / counted,
        prefetched_bytes_per_token=spent[Reason.PREFETCH] / counted,
        stall_ms_per_token=spent["stall_ns"] / counted / 1e6,
        padding_waste=spent["padding_rows"] / rows if rows else 0.0,
        peak_pss_bytes=peak,
    )


def run_once(model: "MoE", prompt: int, limit: int) -> None:
    """Process a seeded prompt, and generate tokens even beyond the end token."""
    import numpy as np

    ids = np.random.default_rng(SEED).integers(0, model.package.family.vocabulary, prompt).tolist()
    for _ in model.generate(ids, limit, ignore_end=True):
        pass


def log_counts(log: "RunLog") -> "Counter[str | Reason]":
    """The runtime log's counts so far, by name, and bytes loaded by reason."""
    names = ("hits", "misses", "stall_ns", "expert_rows", "padding_rows")
    return Counter({name: getattr(log, name) for name in names} | log.load_bytes)


def memory_in_use() -> int:
    """Proportional set size of this process in bytes; 0 if the kernel does not report it."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def print_rows(args: argparse.Namespace, rows: list[Row]) -> None:
    """Print rows as Markdown, CSV or JSON."""
    from runtime.units import show_bytes

    if args.output == "csv":
        writer = csv.DictWriter(sys.stdout, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        return
    if print_if_json(args, {"tests": rows}):
        return
    heads = ["model", "size", "backend", "threads", "set", "test", "t/s", "hits", "demand/token", "prefetched/token"]
    heads += ["stall ms/token", "padding", "peak PSS"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for r in rows:
        cells = [r.model, show_bytes(r.bytes), r.backend, str(r.threads), r.instruction_set or "none", r.test]
        cells += [f"{r.tokens_per_second:.2f} ± {r.deviation:.2f}", "none" if r.hit_rate is None else f"{r.hit_rate:.1%}"]
        cells += [show_bytes(r.demand_bytes_per_token), show_bytes(r.prefetched_bytes_per_token)]
        cells += [f"{r.stall_ms_per_token:.3f}", f"{r.padding_waste:.1%}", show_bytes(r.peak_pss_bytes)]
        print(f"| {' | '.join(cells)} |")
