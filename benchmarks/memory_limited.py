"""Decode speed with room for a share of the expert bytes.

    python -m benchmarks.memory_limited PACKAGE [--text FILE] [--share 0.5] [--rounds 3] [--llama GGUF]

PACKAGE `qwen-moe`: the seeded one of benchmarks/lib/seeded_moe.py.

Each run is a process of its own that feeds the text token by token (without --text: seeded random ids), in turn:

    resident   every expert in memory, no limit
    prefetch   in a memory cgroup: explicit direct reads, prefetched by the package's predictor
    demand     in the same cgroup, loading only what the router has asked for

The cgroup's limit is what a process with nearly no experts takes, plus the share of the expert bytes; the cache gets that share
less the blocks that are in flight. Direct reads bypass the page cache, and the package's pages are dropped beforehand. Bytes per
token are the kernel's own count (/proc/self/io). Medians over rounds, and their range.

The bound is what loading on demand must read, at the best speed that random direct reads of whole experts reach on this disk, or
the resident run's time, whichever is longer: reads wholly overlapped with compute. Hidden is the share of load time that no layer
waited for. With --llama, llama.cpp decodes the same shape under the same limit for a bounded time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.decoding import default_library
from benchmarks.lib.memory_cgroup import MemoryCgroup, NoMemoryCgroupError
from benchmarks.lib.report import Report, arguments
from benchmarks.lib.seeded_moe import seeded_package
from benchmarks.lib.spread import extremes, single
from benchmarks.lib.turns import by_turns
from runtime.backends.cpu import CpuBackend
from runtime.moe import MoE
from runtime.package.layout import Package
from runtime.package.reader import BlockPool, Reader
from runtime.step.sampling import Sampler, Sampling

MODES = ("resident", "prefetch", "demand")
IN_FLIGHT = 4  # blocks that are being read or wait to be
SLACK = 8 << 20  # of a process's own memory between two runs
UNLIMITED = 1 << 40
PROMPT = 32
DEPTHS = (1, 2, 4)  # reads under way at once, when the disk is measured
DISK_BYTES, DISK_SECONDS = 1 << 30, 2.0
POLL = 0.2
MIB = 1 << 20


def kernel_bytes() -> int:
    """Bytes this process has had fetched from storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def token_ids(model: Any, text: Path | None, count: int) -> list[int]:
    """Tokens to feed: from the middle of the text, or drawn with a seed."""
    if text is None:
        return np.random.default_rng(0).integers(0, model.package.family.vocabulary, count).tolist()
    ids = model.encode(text.read_text(encoding="utf-8"))
    start = max((len(ids) - count) // 2, 0)
    return list(ids[start : start + count])


def drop_pages(*paths: Path) -> None:
    """Out of the page cache with these files alone: the machine keeps what others have there."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(args: argparse.Namespace) -> None:
    """One run, its figures as JSON on standard output."""
    options = {"prefetch": "on" if args.child == "prefetch" else "off", "threads": args.threads, "cache_policy": args.policy}
    model = MoE.load(args.package, args.budget or None, **options)
    ids, engine, sampler = token_ids(model, args.text, PROMPT + 2 * args.tokens), model.engine, Sampler(Sampling())
    drop_pages(*model.package.folder.glob("*"))
    sequence = engine.begin_sequence(len(ids))
    engine.step(sequence, ids[:PROMPT], sampler)
    for token in ids[PROMPT : PROMPT + args.tokens]:
        engine.step(sequence, [token], sampler)
    log, read = model.log, kernel_bytes()
    before = log.statistics()
    steps = [engine.step(sequence, [token], sampler)[0] for token in ids[PROMPT + args.tokens :]]
    read, after = kernel_bytes() - read, log.statistics()
    delta = {name: after[name] - before[name] for name in ("hits", "misses", "prefetched", "loaded_bytes", "load_ns", "stall_ns")}
    model.close()
    figures = {
        "ns_per_token": statistics.median(step.duration_ns for step in steps),
        "mean_ns_per_token": statistics.mean(step.duration_ns for step in steps),
        "kernel_bytes_per_token": read / len(steps),
        "loaded_bytes_per_token": delta["loaded_bytes"] / len(steps),
        "hit_rate": delta["hits"] / max(delta["hits"] + delta["misses"], 1),
        "stall_ns_per_token": delta["stall_ns"] / len(steps),
        "hidden_share": 1 - delta["stall_ns"] / delta["load_ns"] if delta["load_ns"] else None,
        "peak_resident_bytes": status("VmHWM"),
        "tokens": [step.sampled for step in steps],
    }
    print(json.dumps(figures))


def disk_speed(package: Any) -> float:
    """Bytes per second of random direct reads of whole experts, the best of several depths."""
    family, reader, pool = package.family, Reader(), BlockPool(max(DEPTHS))
    experts = [(layer, e) for layer in range(family.layers) if layer not in family.dense for e in range(family.experts)]

    def read(place: tuple[int, int]) -> int:
        block = pool.take(package.expert_stride)
        reader.read(package.expert_range(*place), block)
        pool.give(block)
        return len(block)

    def speed(depth: int) -> float:
        order = np.random.default_rng(depth).permutation(len(experts))[: DISK_BYTES // package.expert_stride]
        done, began = 0, time.perf_counter()
        with ThreadPoolExecutor(depth) as threads:
            for first in range(0, len(order), 8 * depth):
                done += sum(threads.map(read, [experts[i] for i in order[first : first + 8 * depth]]))
                if time.perf_counter() - began > DISK_SECONDS:
                    break
        return done / (time.perf_counter() - began)

    return max(map(speed, DEPTHS))


def run_llama(args: argparse.Namespace, limit: int) -> dict[str, Any]:
    """Tokens that llama.cpp decodes under the limit within --llama-seconds, loading included and not."""
    drop_pages(args.llama)
    with tempfile.TemporaryDirectory() as folder, MemoryCgroup(limit) as group:
        log = Path(folder) / "tokens"
        command = [sys.executable, "-m", "benchmarks.programs.decode", default_library(), str(args.llama), str(log)]
        command += [str(args.threads), "mapped"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=group.join
        )
        began, loaded = time.monotonic(), None
        while time.monotonic() - began < args.llama_seconds and process.poll() is None:
            time.sleep(POLL)
            loaded = loaded or (time.monotonic() if log.exists() else None)
        ended = time.monotonic()
        tokens = log.stat().st_size // 16 if log.exists() else 0
        status, peak = process.poll(), group.peak()
        process.kill()
        process.wait()
    decoding = ended - loaded if loaded else 0.0
    return {"tokens": tokens, "decoding_s": decoding, "whole_s": ended - began, "status": status, "cgroup_peak_bytes": peak}


def run_child(args: argparse.Namespace, mode: str, budget: int, limit: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory_limited", str(args.package), "--child", mode, "--budget", str(budget)]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads), "--policy", args.policy]
    command += ["--text", str(args.text)] if args.text else []
    if limit is None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        peak = None
    else:
        with MemoryCgroup(limit) as group:
            done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=group.join)
            peak = group.peak()
    if done.returncode:
        raise SystemExit(f"{mode} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"cgroup_peak_bytes": peak, "cgroup_limit_bytes": limit}


def measure(args: argparse.Namespace, report: Report) -> None:
    """All runs of all rounds, then their figures."""
    package = Package(args.package)
    family, one = package.family, CpuBackend(package, 1).expert_bytes
    total = one * (family.layers - len(family.dense)) * family.experts
    smallest = one * max(2 * family.top_k, family.experts)
    base = run_child(args, "prefetch", smallest, UNLIMITED)["cgroup_peak_bytes"] - smallest
    limit = int(base + SLACK + args.share * total)
    budget = int(args.share * total) - IN_FLIGHT * one
    if budget < family.top_k * one:
        raise SystemExit(f"a share of {args.share} leaves room for fewer than {family.top_k} experts: give more")
    sizes = f"experts {total / MIB:.0f} MiB, limit {limit / MIB:.0f} MiB of which {budget / MIB:.0f} MiB expert cache"
    report.note(f"{sizes}; {args.tokens} tokens, {args.threads} threads")
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _, mode in by_turns(MODES, args.rounds):
        resident = mode == "resident"
        runs[mode].append(run_child(args, mode, 0 if resident else budget, None if resident else limit))
    same = len({tuple(one["tokens"]) for side in runs.values() for one in side}) == 1
    report.note("every run decoded the same tokens" if same else "runs decoded DIFFERENT tokens")
    add_figures(report, runs, disk_speed(package))
    if args.llama:
        add_llama(report, run_llama(args, limit), values(runs["prefetch"], "mean_ns_per_token"))


FIGURES = {
    "mean_ns_per_token": ("a token, mean", "ms", 1e6),
    "ns_per_token": ("a token, median", "ms", 1e6),
    "hit_rate": ("hits", "%", 0.01),
    "kernel_bytes_per_token": ("read per token, by the kernel's count", "MiB", MIB),
    "loaded_bytes_per_token": ("read per token, by its own count", "MiB", MIB),
    "stall_ns_per_token": ("layers wait per token", "ms", 1e6),
    "hidden_share": ("of load time that no layer waited for", "%", 0.01),
    "cgroup_peak_bytes": ("peak of the cgroup", "MiB", MIB),
}
"""Key of a run → (name, unit, divisor)."""


def values(runs: list[dict[str, Any]], name: str) -> np.ndarray:
    """A figure of every run that has it."""
    return np.array([run[name] for run in runs if run[name] is not None], float)


def add_figures(report: Report, runs: dict[str, list[dict[str, Any]]], disk_bytes_per_s: float) -> None:
    """Figures of every mode, their ratios by rounds, and the share of what the disk allows that was reached."""
    for mode, (name, (what, unit, divisor)) in product(MODES, FIGURES.items()):
        if len(seen := values(runs[mode], name)):
            report.add(f"{mode}: {what}", unit, extremes(seen / divisor))
    times = {mode: values(runs[mode], "mean_ns_per_token") for mode in MODES}
    for peer in ("resident", "demand"):
        report.add("prefetch: speed", "ratio", extremes(times[peer] / times["prefetch"]), against=peer)
    report.add("random direct reads of experts", "GB/s", single(disk_bytes_per_s / 1e9))
    read_ns = float(np.median(values(runs["demand"], "kernel_bytes_per_token"))) / disk_bytes_per_s * 1e9
    bound = max(read_ns, float(np.median(times["resident"])))
    report.add("bound of a token", "ms", single(bound / 1e6))
    for mode in ("prefetch", "demand"):
        report.add(f"{mode}: of the bound reached", "%", extremes(100 * bound / times[mode]))


def add_llama(report: Report, llama: dict[str, Any], prefetch_ns: np.ndarray) -> None:
    """What llama.cpp did under the same limit; without a token, it took at least the whole time for one.

    There is no ratio where it ended by itself: the kernel kills what does not fit, and what is dead is not slow.
    """
    report.add("llama.cpp: tokens", "count", single(llama["tokens"]))
    report.add("llama.cpp: time of decoding", "s", single(llama["decoding_s"]))
    report.add("llama.cpp: peak of the cgroup", "MiB", single(llama["cgroup_peak_bytes"] / MIB))
    if llama["status"] is not None:
        report.note(f"llama.cpp ended by itself with status {llama['status']}: no comparison")
        return
    per_token = llama["decoding_s"] / llama["tokens"] if llama["tokens"] else llama["whole_s"]
    labels = () if llama["tokens"] else ("at least",)
    report.add("prefetch: speed", "ratio", extremes(per_token * 1e9 / prefetch_ns), against="llama.cpp", labels=labels)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--llama", type=Path, metavar="GGUF", help="the same shape for llama.cpp")
    parser.add_argument("--llama-seconds", type=float, default=60)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.package == Path("qwen-moe"):
        args.package = seeded_package().folder
    if args.child:
        child(args)
        return
    report = Report("memory_limited", args)
    try:
        measure(args, report)
    except NoMemoryCgroupError as error:
        raise SystemExit(str(error)) from None
    report.finish()


if __name__ == "__main__":
    main()
