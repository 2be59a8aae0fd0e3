"""Overhead of tracing on a decoding engine: the tracer attaches to one running process and leaves it, many times.

    sudo python -m benchmarks.overhead llama-1b [--rounds 60] [--json FILE] [--library libllama.so]
    sudo python -m benchmarks.overhead runtime

One process decodes continuously and logs the begin and end of every token itself. In every round `moescope attach` records it
for one window and ends; the order of the variants alternates. A window begins when the probes stand, and a
window's speed is its median token without the first (returning probes record structure again); a round gives two ratios, of
the window with probes to those without before and after it. The figure is the median of all ratios and its 95 %
bootstrap interval over rounds. (Swapping the two inverts each ratio: unlike one ratio to both windows together, which have
twice as many tokens, this is not biased.) Rounds in which the host took more than 2 % of the CPUs' time are omitted as long as
others remain. "nothing" changes nothing and shows the noise of a comparison.

Separately, the accounting, without a comparison: hits of each probe times the calibrated cost of a hit (warm and cold
caches) plus the measured time in its BPF program, per thread and time with probes; time in programs on the kernel's events,
which run for every process, as a share of all CPUs; and the CPU time of recorder and planner within windows, as a share of one
core.

"causes" records everything that the causes of a step's time need. "limited" records operators only part of the time, by
--max-overhead 10; its rounds compare mean tokens of windows of 10 s. "bpftrace" is the naive way: entry and return probes at
the symbol of each ggml_compute_forward_* that the model runs; their hits are counted in a separate run and cost at least as
much as an empty program's. It takes seconds to attach and detach, so that few of its rounds fit into a steady phase of the
machine: "naive" attaches a BCC program at the same places, which is fast. "empty" attaches a BCC program that does nothing at
the one place that a recording probes once per operator: the least that a uprobe per operator costs on this machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.tables.store import load_tables
from benchmarks.lib.decoding import Engine, default_library
from benchmarks.lib.models import demo_model, seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import quartiles, single
from benchmarks.lib.turns import by_turns
from benchmarks.lib.windows import TOO_SLOW, Block, alternate_windows, follow_engine, measure_slowdown, token_times, wait_window
from moescope.terminal import counted
from tracer.kernel.bcc_helper import import_bcc
from tracer.probes.elf import read_binary
from tracer.probes.plan import KERNEL
from workloads.gguf_model import SHAPES
from workloads.uprobes import attach_uprobe, detach_all

THREADS = {"runtime": 1}  # of the engine; two for llama.cpp
WARM_UP_S = 3.0
BLOCKS = 3  # number of blocks of each variant's rounds
OPERATOR = "--levels token,graph,operator,expert"
VARIANTS = {
    "nothing": "",
    "token, graph": "--levels token,graph",
    "operator": OPERATOR,
    "operator, sched": f"{OPERATOR},sched",
    "operator, causes": f"{OPERATOR},qnn,sched,io",
    "operator, stacks": f"{OPERATOR} --stacks 199 --long-wait 1ms",
    "operator, pmc": f"{OPERATOR} --pmc minor-faults,context-switches",
    "operator, bcc": f"{OPERATOR} --loader bcc",
    "operator, perf buffer": f"{OPERATOR} --buffer perf",
    "operator, limited": f"{OPERATOR} --max-overhead 10",
    "empty": "empty",
    "naive": "naive",
    "bpftrace": "bpftrace",
}
NAIVE_PROGRAM = """
BPF_HASH(at, u32, u64);
int seen(struct pt_regs *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    u64 now = bpf_ktime_get_ns();
    at.update(&tid, &now);
    return 0;
}"""
EMPTY_PROGRAM = "int seen(struct pt_regs *ctx) { return 0; }"
OPERATOR_ENDS = ("ggml_op_done", "ggml_graph_done")
COUNT_S = 3  # seconds in which the naive way's hits are counted
BPFTRACE_ENDS_S = 4.0  # usually 2.5 s; sometimes it misses the signal and needs another
LIMITED_S = 10.0  # seconds of a window with or without a limited recording, which switches its probes itself
SETTLE_S = 5.0  # in which it measures what its probes cost


LEAST_TOKENS = 4  # in a window, including the omitted first
LATEST_TOKENS = 8  # whose times decide on the length of windows


def long_enough(engine: Engine, seconds: float) -> float:
    """The length of windows, at least a few of the engine's tokens; the first ones, which may read a cold file, do not count."""
    tokens = engine.tokens()[-LATEST_TOKENS:]
    least = LEAST_TOKENS * float(np.quantile(tokens[:, 1] - tokens[:, 0], 0.9)) / 1e9
    if least > seconds:
        print(f"windows of {least:.2f} s instead of {seconds:.2f}: a token takes {least / LEAST_TOKENS:.2f} s", file=sys.stderr)
    return max(least, seconds)


def start_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """Start the decoding process."""
    log, python = folder / "tokens.bin", sys.executable
    threads = THREADS.get(args.engine, 2)
    if args.engine == "runtime":
        return Engine([python, "-m", "benchmarks.programs.decode_runtime", str(demo_model()), str(log)], log, threads)
    words = [args.library or default_library(), str(seeded_gguf(args.engine)), str(log), str(threads)]
    return Engine([python, "-m", "benchmarks.programs.decode", *words], log, threads)


def measure_variant(engine: Engine, words: str, rounds: int, seconds: float, folder: Path) -> Block:
    """Rounds of one variant: without probes, with, without ... without."""
    is_limited = "--max-overhead" in words
    seconds, settle_s = (LIMITED_S, SETTLE_S) if is_limited else (seconds, 0.0)
    windows, manifests = alternate_windows(engine, words, rounds, seconds, folder, settle_s)
    with_probes = sum(manifest["duration_ns"] for manifest in manifests)
    standing = [row for manifest in manifests for row in hit_rows(manifest)]
    of_engine, of_kernel = ([row for row in standing if (row["engine"] == KERNEL) == kernel] for kernel in (False, True))
    warm, cold = (accounted_ns(of_engine, cost) for cost in ("ns_per_hit", "ns_per_hit_cold"))
    steps = sum(manifest["records"].get("token_end", 0) for manifest in manifests)
    return Block(
        windows,
        np.mean if is_limited else np.median,
        warm=warm / (engine.threads * with_probes - warm),
        cold=cold / (engine.threads * with_probes - cold),
        kernel=accounted_ns(of_kernel, "ns_per_hit") / (os.cpu_count() or 1) / with_probes,
        bytes_per_token=sum(manifest["written"] for manifest in manifests) / max(1, steps),
        lost=sum(sum(manifest["lost"].values()) for manifest in manifests),
    )


def hit_rows(manifest: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """A row for each program that has the hits of all its probes; those of removed probes do not count."""
    return {row["program"]: row for row in manifest["probes"] if not row["retired_ns"]}.values()


def accounted_ns(probes: Iterable[dict[str, Any]], cost: str) -> float:
    """The cost of probes in ns."""
    return sum(row["hits"] * (row[cost] + row["bpf_ns_per_hit"]) for row in probes)


@dataclass
class Naive:
    """Entry and return probes at the symbols, and the slowdown of the engine's threads by accounting."""

    command: list[str]
    library: str
    offsets: list[int]
    warm: float
    cold: float


def naive_way(engine: Engine, folder: Path) -> Naive:
    """Entry and return probes on every function that computes one of the model's operators."""
    library, functions, per_hit = forward_functions(engine, folder)
    command = ["bpftrace", "-B", "none", "-f", "json", "-p", str(engine.process.pid), "-e"]
    counting = [f'uprobe:{library}:{name} {{ @["{name}"] = count(); }}' for name in functions]
    script = f"{' '.join(counting)} interval:s:{COUNT_S} {{ exit(); }}"
    printed = subprocess.run([*command, script], capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.strip()]
    calls = next(row["data"]["@"] for row in rows if row["type"] == "map")
    costs_ns = [sum(calls.values()) * per_hit[f"{heat}return"] for heat in ("", "cold_")]
    slowdowns = [cost / (COUNT_S * 1e9 * engine.threads - cost) for cost in costs_ns]
    probes = [f"{kind}:{library}:{name} {{ @[tid] = nsecs; }}" for name in functions for kind in ("uprobe", "uretprobe")]
    ready = 'BEGIN { printf("ready\\n"); }'
    binary = read_binary(library)
    offsets = [offset for name in functions if (offset := binary.symbol(name)) is not None]
    return Naive([*command, f"{ready} {' '.join(probes)}"], library, offsets, *slowdowns)


def measure_naive(way: Naive, rounds: int, seconds: float) -> Block:
    """Rounds of the naive way, with a BCC program."""
    places = [(offset, at_return) for offset in way.offsets for at_return in (False, True)]
    return replace(measure_program(NAIVE_PROGRAM, way.library, places, rounds, seconds), warm=way.warm, cold=way.cold)


def measure_program(program: str, library: str, places: list[tuple[int, bool]], rounds: int, seconds: float) -> Block:
    """Rounds of a BCC program at places (offset, at return) of a library, without a tracer."""
    bcc = import_bcc()
    module, windows = bcc.BPF(text=program), [wait_window(seconds)]
    handler = module.load_func(b"seen", bcc.BPF.KPROBE).fd
    for _ in range(rounds):
        probes = [attach_uprobe(handler, library, *place) for place in places]
        windows.append(wait_window(seconds))
        detach_all(probes)
        windows.append(wait_window(seconds))
    module.cleanup()
    return Block(windows)


def measure_empty(engine: Engine, folder: Path, rounds: int, seconds: float) -> Block:
    """Rounds of an empty program where a recording notes the end of every operator."""
    manifest = short_recording(engine, folder)
    shutil.rmtree(folder)
    rows = [row for row in manifest["probes"] if row["program"] in OPERATOR_ENDS and not row["retired_ns"]]
    return measure_program(EMPTY_PROGRAM, rows[0]["library"], [(row["offset"], False) for row in rows], rounds, seconds)


def measure_bpftrace(way: Naive, rounds: int, seconds: float) -> Block:
    """Rounds of the naive way, with bpftrace."""
    windows = [wait_window(seconds)]
    for _ in range(rounds):
        with subprocess.Popen(way.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as peer:
            assert peer.stdout is not None
            while "ready" not in peer.stdout.readline():
                pass
            windows.append(wait_window(seconds))
            ended = False
            while not ended:
                peer.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.communicate(timeout=BPFTRACE_ENDS_S)
                    ended = True
        windows.append(wait_window(seconds))
    return Block(windows, warm=way.warm, cold=way.cold)


NAIVE_WAYS = {"naive": measure_naive, "bpftrace": measure_bpftrace}
OF_LLAMA = {*NAIVE_WAYS, "empty"}


def short_recording(engine: Engine, folder: Path) -> dict[str, Any]:
    """The manifest of a recording of operators that is left in `folder`."""
    with follow_engine(engine, OPERATOR, folder):
        time.sleep(1)
    return json.loads((folder / "manifest.json").read_text())


def forward_functions(engine: Engine, folder: Path) -> tuple[str, list[str], dict[str, float]]:
    """(library, the ggml_compute_forward_* that the model runs, ns per hit by class), from a short recording and symbols."""
    manifest = short_recording(engine, folder)
    types = set("+".join(load_tables(folder)["operators"]["type"].unique()).split("+"))
    library = next(row["library"] for row in manifest["probes"] if row["program"] == "ggml_op_begin")
    shutil.rmtree(folder)
    names = {f"ggml_compute_forward_{name.lower()}" for name in types} | {"ggml_compute_forward_rms_norm_mul_fused"}
    binary = read_binary(library)
    return library, sorted(name for name in names if binary.symbol(name) is not None), manifest["cost"]["calibration_ns"]


def measure_variants(engine: Engine, variants: dict[str, str], args: argparse.Namespace, folder: Path) -> dict[str, list[Block]]:
    """The blocks of every variant."""
    blocks: dict[str, list[Block]] = {name: [] for name in variants}
    peer = naive_way(engine, folder / "run") if NAIVE_WAYS.keys() & variants.keys() else None
    rounds = -(-args.rounds // BLOCKS)
    for number, name in by_turns(list(variants), min(BLOCKS, args.rounds)):
        if name == "nothing":
            block = Block([wait_window(args.seconds) for _ in range(2 * rounds + 1)])
        elif peer and name in NAIVE_WAYS:
            block = NAIVE_WAYS[name](peer, rounds, args.seconds)
        elif name == "empty":
            block = measure_empty(engine, folder / "run", rounds, args.seconds)
        else:
            block = measure_variant(engine, variants[name], rounds, args.seconds, folder / "run")
        blocks[name].append(block)
        print(f"block {number + 1}: {name}", file=sys.stderr, flush=True)
    return blocks


def add_variant(report: Report, engine: str, name: str, blocks: list[Block], tokens: np.ndarray) -> None:
    """The figures of one variant."""
    cost, name = measure_slowdown(blocks, tokens), f"{engine}, {name}"
    report.add(f"{name}: decode slows down by", "%", cost.spread.scaled(100), against="no probes")
    if np.isfinite(warm := float(np.median([block.warm for block in blocks]))):
        cold = float(np.median([block.cold for block in blocks]))
        report.add(f"{name}: accounted, warm caches", "%", single(100 * warm))
        report.add(f"{name}: accounted, cold caches", "%", single(100 * cold))
    if np.isfinite(kernel := float(np.median([block.kernel for block in blocks]))):
        report.add(f"{name}: programs on the kernel's events", "% of all CPUs", single(100 * kernel))
    if np.isfinite(size := float(np.median([block.bytes_per_token for block in blocks]))):
        report.add(f"{name}: the tracer's CPU time", "% of a core", single(100 * cost.tracer_cpu))
        report.add(f"{name}: on disk, per token", "B", single(size))
        report.add(f"{name}: records lost", "count", single(sum(block.lost for block in blocks)))
    if cost.left_out:
        report.note(f"{name}: {counted(cost.left_out, 'round')} left out, for the host took CPU time")


def main() -> None:
    parser = make_parser(__doc__, rounds=60, help_rounds="pairs per variant")
    parser.add_argument(
        "engine", choices=[*SHAPES, "runtime"], help="a shape for llama.cpp, or our own runtime on its demo model"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="length of each window: short ones compare before the machine drifts"
    )
    parser.add_argument("--library", help="file that exports llama.h's functions (default: the package xllamacpp)")
    parser.add_argument("--variants", default="", help=f"a choice of: {'; '.join(VARIANTS)} (separated by semicolons)")
    args = parser.parse_args()
    names = [name.strip() for name in args.variants.split(";") if name.strip()] or list(VARIANTS)
    variants = {name: VARIANTS[name] for name in names if not (args.engine == "runtime" and name in OF_LLAMA)}
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(start_engine(args, Path(folder))) as engine:
        engine.wait_for_tokens(2)
        time.sleep(WARM_UP_S)
        args.seconds = long_enough(engine, args.seconds)
        blocks = measure_variants(engine, variants, args, Path(folder))
        engine.close()
        tokens = engine.tokens()
    report = Report("overhead", args)
    quiet = token_times(tokens, *(window for each in blocks.values() for block in each for window in block.windows[::2]))
    if not len(quiet):
        sys.exit(TOO_SLOW)
    report.add(f"{args.engine}: a token without probes", "ms", quartiles(quiet / 1e6))
    for name, each in blocks.items():
        add_variant(report, args.engine, name, each, tokens)
    report.finish()


if __name__ == "__main__":
    main()
