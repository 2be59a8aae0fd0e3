"""Decode speed with memory for a share of the expert bytes, our runtime and llama.cpp.

    python -m benchmarks.memory_limited PACKAGE [--text FILE] [--shares 0.75,0.5,0.25] [--rounds 3] [--llama GGUF]
                                         [--bigmoe BMOE_CLI] [--set avx2] [--read-ahead 128,8192]

PACKAGE `qwen-moe`: the seeded one of benchmarks/lib/seeded_moe.py; GGUF `qwen-moe`: the same shape from workloads/gguf_model.py.
Embeddings and routers of both are drawn so that routes are nearly uniform and differ from token to token.

Each run is a separate process that gets the same tokens one by one (without --text: seeded random ids); modes alternate:

    resident          every expert in memory, no limit
    prefetch          in a memory cgroup: explicit direct reads, prefetched with the package's predictor
    demand            in the same cgroup, loading only experts that the router has chosen
    auto              in the same cgroup, prefetching if the trial favours it
    llama.cpp         in the same cgroup, its file mapped
    llama.cpp, whole  its file mapped, no limit
    BigMoeOnEdge      in the same cgroup: streams experts on llama.cpp's API, with a cache of the same bytes

BigMoeOnEdge takes text alone: it gets PROMPT random letters and draws each token at a high temperature, so that its routes, too,
differ from token to token; its figures are those of its own metrics, in which drawing a token is not counted. Its `--overlap`
needs its own branch of llama.cpp: give it in --bigmoe-flags if the build has it.

--set: this instruction set, forced on ours, and the llama.cpp built for it; otherwise the processor's best, and the llama.cpp
inside the package xllamacpp.

The cgroup's limit is our process's memory without experts, plus the share of the expert bytes; the cache gets that share less
the blocks in flight. llama.cpp needs less memory besides its experts; the rest is room for more of them. All files of both
engines are dropped from the page cache before each run. The first half of the tokens fills the caches; figures are of the
second half, or of the second half of the tokens decoded within --seconds. Bytes read and major faults are the kernel's counts
(getrusage) for either engine. Medians over rounds, and their range. The disk's read-ahead is part of a figure's name: the more
the kernel reads at a page fault, the slower a mapped file is where memory is scarce. --read-ahead: all shares with each of these
settings of the disk, KiB, which is put back afterwards.

A token's bounds are the time to read the experts loaded on demand, at the best speed of random direct reads of whole experts
or pieces from this disk, and the resident run's time: the larger one is reached if reads and computing overlap fully. While the
head runs, nothing is known of the next token's choices. Hidden is the share of load time that no layer waited for.

How near to them one can come is replayed (workloads/decode_replay.py) from these runs' routes, the resident run's times of
graphs, the disk's speed and the cache's rule: on demand; with reads ahead that find as many missing experts as a run that
predicts; with the next layer's choice known; with all of a token's as it begins; with the next token's before the head, too. The
replay is held against the measured times.
"""

import argparse
import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.decoding import default_library
from benchmarks.lib.llama_sets import PEERS
from benchmarks.lib.memory_cgroup import MemoryCgroup, NoMemoryCgroupError
from benchmarks.lib.models import seeded_gguf
from benchmarks.lib.page_cache import drop_pages
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.seeded_moe import seeded_package
from benchmarks.lib.spread import extremes, single
from benchmarks.lib.steps_log import LoggedStep, StepLog, read_log
from benchmarks.lib.turns import by_turns
from runtime.backends.cpu import CpuBackend
from runtime.backends.instruction_sets import FORCED_SET
from runtime.cache_rules.eviction import POLICIES
from runtime.moe import MoE
from runtime.package.layout import Package
from runtime.package.reader import BlockPool, FileRange, Reader
from runtime.package.tokens import read_tokenizer
from runtime.step.sampling import Sampler, Sampling
from workloads.decode_replay import DEMAND, NEXT_LAYER, NEXT_TOKEN, THIS_TOKEN, Costs, Knowledge, Replay

PREFETCH = {"resident": "off", "prefetch": "on", "demand": "off", "auto": "auto"}
"""Our ways, and what each says to prefetching."""
LLAMA, LLAMA_WHOLE, BIGMOE = "llama.cpp", "llama.cpp, whole", "BigMoeOnEdge"
UNBOUND = ("resident", LLAMA_WHOLE)
IN_FLIGHT = 4  # blocks being read or queued
BASE_RUNS = 2
SLACK = 8 << 20  # variation of a process's memory between two runs
UNLIMITED = 1 << 40
PROMPT = 32
DEPTHS = (1, 2, 4)  # concurrent reads in the disk measurement
PIECE = 3 << 19  # about as many bytes are read ahead at a time: runtime/experts/_slots.c
AGREEMENT = 0.05  # by which a replay may differ from the measured time
DISK_BYTES, DISK_SECONDS = 1 << 30, 2.0
POLL = 0.2
MIB = 1 << 20


def token_ids(package: Package, text: Path | None, count: int) -> list[int]:
    """Input tokens: from the middle of the text, or drawn with a seed."""
    if text is None:
        return np.random.default_rng(0).integers(0, package.family.vocabulary, count).tolist()
    ids = read_tokenizer(package.folder).encode(text.read_text(encoding="utf-8")).ids
    start = max((len(ids) - count) // 2, 0)
    return list(ids[start : start + count])


def held_bytes() -> int:
    """Memory of this process, including mapped weights and libraries."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def run_child(args: argparse.Namespace) -> None:
    """A run of our runtime: logs each token; prints the runtime's own figures of the second half as JSON."""
    options = {"prefetch": PREFETCH[args.child], "threads": args.threads, "cache_policy": args.policy}
    model, ids = MoE.load(args.package, args.budget or None, **options), array("i", args.ids.read_bytes()).tolist()
    sequence, sampler, steps = model.engine.begin_sequence(len(ids)), Sampler(Sampling()), StepLog(args.log)
    model.engine.step(sequence, ids[:PROMPT], sampler)
    before = model.log.statistics()
    sampled: list[Any] = []
    for token in ids[PROMPT:]:
        if 2 * len(sampled) == len(ids) - PROMPT:
            before = model.log.statistics()
        begin = time.monotonic_ns()
        sampled.append(model.engine.step(sequence, [token], sampler)[0].sampled)
        steps.add(begin)
    after = model.log.statistics()
    delta = {name: after[name] - before[name] for name in ("hits", "misses", "loaded_bytes", "load_ns", "stall_ns")}
    tokens = len(sampled) - len(sampled) // 2
    named = ("loads", "graph_ns")
    per_token = {what: {name: (n - before[what].get(name, 0)) / tokens for name, n in after[what].items()} for what in named}
    figures = {
        "loaded_bytes_per_token": delta["loaded_bytes"] / tokens,
        "hit_rate": delta["hits"] / max(delta["hits"] + delta["misses"], 1),
        "stall_ns_per_token": delta["stall_ns"] / tokens,
        "hidden_share": 1 - delta["stall_ns"] / delta["load_ns"] if delta["load_ns"] else None,
        "sampled": sampled,
        **per_token,
        "routes": [chosen[0].tolist() for _, _, chosen, _ in model.log.routing if len(chosen) == 1],
        "prefetching": model.log.prefetching,
        "beside_experts_bytes": held_bytes() - after["resident_bytes"],
    }
    model.close()
    print(json.dumps(figures))


def disk_speed(package: Package, piece: int = 0) -> float:
    """Bytes per second of random direct reads of whole experts, or of pieces of this size; the best of several depths."""
    family, reader, pool, size = package.family, Reader(), BlockPool(max(DEPTHS)), piece or package.expert_stride
    whole = [package.expert_range(layer, e) for layer in family.routed for e in range(family.experts)]
    firsts = range(0, package.expert_stride, size)
    parts = [FileRange(of.path, of.offset + first, min(size, of.bytes - first)) for of in whole for first in firsts]

    def read(part: FileRange) -> int:
        block = pool.take(size)
        reader.read(part, block)
        pool.give(block)
        return part.bytes

    def speed(depth: int) -> float:
        order = np.random.default_rng(depth).permutation(len(parts))[: DISK_BYTES // size]
        done, began = 0, time.perf_counter()
        with ThreadPoolExecutor(depth) as threads:
            for first in range(0, len(order), 8 * depth):
                done += sum(threads.map(read, [parts[i] for i in order[first : first + 8 * depth]]))
                if time.perf_counter() - began > DISK_SECONDS:
                    break
        return done / (time.perf_counter() - began)

    return max(map(speed, DEPTHS))


@contextmanager
def read_ahead(file: Path, kib: int | None) -> Iterator[str]:
    """What the kernel reads ahead on the file's disk, which an engine that maps its file depends on; kib: set meanwhile."""
    device = file.stat().st_dev
    setting = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/bdi/read_ahead_kb")
    before = setting.read_text() if setting.exists() else ""
    if kib is not None:
        setting.write_text(str(kib))
    try:
        yield f"read-ahead {setting.read_text().strip()} KiB" if before else "read-ahead unknown"
    finally:
        if kib is not None:
            setting.write_text(before)


def second_half(steps: list[LoggedStep]) -> dict[str, float]:
    """Figures of the second half of the tokens; empty if fewer than four were decoded."""
    kept = steps[(len(steps) - 1) // 2 :]
    if len(kept) < 3:
        return {}
    first, last, tokens = kept[0], kept[-1], len(kept) - 1
    return {
        "mean_ns_per_token": (last.end_ns - first.end_ns) / tokens,
        "ns_per_token": float(np.median([step.end_ns - step.begin_ns for step in kept[1:]])),
        "kernel_bytes_per_token": (last.read_bytes - first.read_bytes) / tokens,
        "major_faults_per_token": (last.major_faults - first.major_faults) / tokens,
    }


def bigmoe_command(args: argparse.Namespace, budget: int, metrics: Path) -> list[str]:
    """BigMoeOnEdge's command line for one run."""
    letters = "".join(map(chr, np.random.default_rng(0).integers(97, 123, PROMPT).tolist()))
    sizes = ["-n", 2 * args.tokens, "-t", args.threads, "-c", 1024, "--cache-mb", budget // MIB, "--force-cache"]
    drawn = ["--temp", 100, "--top-k", 0, "--top-p", 1, "--seed", 1]
    given = ["-m", seeded_gguf("qwen-moe", tokenizer=True), "-p", letters, "--moe-stream", "--csv", metrics]
    return [str(args.bigmoe), *map(str, [*given, *sizes, *drawn, *args.bigmoe_flags.split()])]


def bigmoe_figures(metrics: Path) -> dict[str, float]:
    """The second half of the tokens of BigMoeOnEdge's metrics."""
    lines = [line for line in metrics.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    kept = rows[len(rows) // 2 :]
    if len(kept) < 3:
        return {"tokens": len(rows)}
    seen = {name: np.array([float(row[name]) for row in kept]) for name in ("wall_ms", "read_bytes", "majflt", "cache_hit_pct")}
    return {
        "tokens": len(rows),
        "mean_ns_per_token": float(seen["wall_ms"].mean()) * 1e6,
        "ns_per_token": float(np.median(seen["wall_ms"])) * 1e6,
        "loaded_bytes_per_token": float(seen["read_bytes"].mean()),
        "major_faults_per_token": float(seen["majflt"].mean()),
        "hit_rate": float(seen["cache_hit_pct"].mean()) / 100,
    }


def bigmoe_commit(program: Path) -> str:
    """The commit that the program's folder is at."""
    asked = ["git", "-C", str(program.resolve().parent), "log", "-1", "--format=%h"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


@dataclass
class Setting:
    """The settings common to all runs: package, llama.cpp's file, token file, and a cgroup's limit in bytes."""

    args: argparse.Namespace
    package: Package
    ids: Path
    limit: int = UNLIMITED
    budget: int = 0

    def run(self, mode: str) -> dict[str, Any]:
        """The figures of one run in a new process and cgroup."""
        others = [self.args.llama] if self.args.llama else []
        others += [seeded_gguf("qwen-moe", tokenizer=True)] if self.args.bigmoe else []
        drop_pages(*self.package.folder.glob("*"), *others)
        with tempfile.TemporaryDirectory() as folder, MemoryCgroup(UNLIMITED if mode in UNBOUND else self.limit) as group:
            log, output, errors = (Path(folder) / name for name in ("log", "output", "errors"))
            with output.open("wb") as out, errors.open("wb") as err:
                command, environment = self._command(mode, log), os.environ | self._forced()
                process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, preexec_fn=group.join)
                status = self._wait(process, log)
            peak = group.peak()
            if mode == BIGMOE and not status:
                return {"cgroup_peak_bytes": peak} | bigmoe_figures(log)
            steps = read_log(log)
            if status or (status is None and mode in PREFETCH):
                raise SystemExit(f"{mode} ended with {status}: {errors.read_text()[-400:].strip()}")
            own = json.loads(output.read_text().splitlines()[-1]) if mode in PREFETCH else {}
        return {"cgroup_peak_bytes": peak, "tokens": len(steps)} | second_half(steps) | own

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> int | None:
        """The exit status; None if it had not ended --seconds after its first token."""
        began = time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - began < self.args.seconds:
                began = began if log.exists() else time.monotonic()
                time.sleep(POLL)
            return process.poll()
        finally:
            process.kill()
            process.wait()

    def _forced(self) -> dict[str, str]:
        """The variable that forces an instruction set on our runtime; llama.cpp ignores it."""
        return {FORCED_SET: self.args.set} if self.args.set else {}

    def _command(self, mode: str, log: Path) -> list[str]:
        args, program = self.args, [sys.executable, "-m"]
        if mode == BIGMOE:
            return bigmoe_command(args, self.budget, log)
        if mode not in PREFETCH:
            given = [args.set or default_library(), args.llama, self.ids, log, PROMPT, args.threads]
            return [*program, "benchmarks.programs.decode_given", *map(str, given)]
        budget = 0 if mode == "resident" else self.budget
        words = ["--child", mode, "--budget", budget, "--threads", args.threads, "--policy", args.policy]
        return [*program, "benchmarks.memory_limited", *map(str, [self.package.folder, *words, "--ids", self.ids, "--log", log])]


def measure_shares(setting: Setting, report: Report) -> None:
    """Measure all shares."""
    args, package = setting.args, setting.package
    family, one = package.family, CpuBackend(package, 1).expert_bytes
    total = one * len(family.routed) * family.experts
    setting.budget = one * max(2 * family.top_k, family.experts)
    # Pages mapped temporarily around the requested ones make a run look larger than necessary.
    base = min(setting.run("demand")["beside_experts_bytes"] for _ in range(BASE_RUNS))
    speeds = {"experts": disk_speed(package), "pieces of experts": disk_speed(package, PIECE)}
    for what, speed in speeds.items():
        report.add(f"random direct reads of {what}", "GB/s", single(speed / 1e9))
    for kib, share in itertools.product(args.read_ahead or [None], args.shares):
        setting.limit, setting.budget = int(base + SLACK + share * total), int(share * total) - IN_FLIGHT * one
        if setting.budget < family.top_k * one:
            raise SystemExit(f"a share of {share} leaves room for fewer than {family.top_k} experts: give more")
        sizes = f"limit {setting.limit / MIB:.0f} MiB of which {setting.budget / MIB:.0f} MiB expert cache"
        sizes += f", {(setting.limit - share * total) / MIB:.0f} MiB for all else"
        report.note(f"{share:.0%}: experts {total / MIB:.0f} MiB, {sizes}; {args.tokens} tokens, {args.threads} threads")
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
        with read_ahead(package.folder, kib) as said:
            for _, mode in by_turns(args.modes, args.rounds):
                runs[mode].append(setting.run(mode))
            predicting = setting.run("prefetch") if {"demand", "resident"} <= runs.keys() else None
        label = ", ".join([f"{share:.0%}", *([args.set] if args.set else []), said])
        add_figures(report, label, runs)
        if predicting:
            add_replays(report, label, setting, runs, predicting, max(speeds.values()))


FIGURES = {
    "tokens": ("tokens decoded", "count", 1),
    "mean_ns_per_token": ("a token, mean", "ms", 1e6),
    "ns_per_token": ("a token, median", "ms", 1e6),
    "hit_rate": ("hits", "%", 0.01),
    "kernel_bytes_per_token": ("read per token, by the kernel's count", "MiB", MIB),
    "loaded_bytes_per_token": ("read per token, by its own count", "MiB", MIB),
    "major_faults_per_token": ("major faults per token", "count", 1),
    "stall_ns_per_token": ("layers wait per token", "ms", 1e6),
    "hidden_share": ("of load time that no layer waited for", "%", 0.01),
    "cgroup_peak_bytes": ("peak of the cgroup", "MiB", MIB),
}
"""Key of a run → (name, unit, divisor)."""
IN_LAYER = (("attention", "router"), ("mlp",), ("combine",))
"""Kinds of graphs until a layer has chosen, until its experts run, and after them."""


def values_of(runs: list[dict[str, Any]], name: str) -> np.ndarray:
    """A figure of all runs that have it."""
    return np.array([run[name] for run in runs if run.get(name) is not None], float)


def add_figures(report: Report, share: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Figures of every mode, and ratios by round."""
    for mode, measured in runs.items():
        for name, (what, unit, divisor) in FIGURES.items():
            if len(seen := values_of(measured, name)):
                report.add(f"{share}, {mode}: {what}", unit, extremes(seen / divisor))
    same = len({tuple(run["sampled"]) for measured in runs.values() for run in measured if "sampled" in run}) <= 1
    report.note(f"{share}: all our runs chose the same tokens" if same else f"{share}: our runs chose DIFFERENT tokens")
    for run in runs.get("auto", []):
        report.note(f"{share}, auto: {run['prefetching']}")
    times = {mode: values_of(measured, "mean_ns_per_token") for mode, measured in runs.items()}
    for mode, peer in ((a, b) for a in times for b in times if a in PREFETCH and a not in UNBOUND and b != a):
        if len(times[mode]) == len(times[peer]):
            report.add(f"{share}, {mode}: speed", "ratio", extremes(times[peer] / times[mode]), against=peer)


def median_of(runs: list[dict[str, Any]], name: str) -> float:
    """The median of a figure over runs."""
    return float(np.median(values_of(runs, name)))


def add_bounds(report: Report, share: str, runs: dict[str, list[dict[str, Any]]], disk_bytes_per_s: float) -> float:
    """Both bounds, demand reads and computing, and how far each of our modes is from the larger one, which is returned, ns."""
    read_ns = median_of(runs["demand"], "kernel_bytes_per_token") / disk_bytes_per_s * 1e9
    compute_ns = median_of(runs["resident"], "mean_ns_per_token")
    report.add(f"{share}: bound of a token by reading", "ms", single(read_ns / 1e6))
    report.add(f"{share}: bound of a token by computing", "ms", single(compute_ns / 1e6))
    bound = max(read_ns, compute_ns)
    for mode in (mode for mode in runs if mode in PREFETCH and mode not in UNBOUND):
        times = values_of(runs[mode], "mean_ns_per_token") / bound
        report.add(f"{share}, {mode}: times the larger bound", "ratio", extremes(times))
    return bound


def costs_of(package: Package, runs: list[dict[str, Any]], bytes_per_s: float) -> Costs:
    """What the replay needs to know of resident runs and of the disk. Whatever is not in a layer counts as the head."""
    family, count = package.family, len(package.family.routed)
    spent = {kind: float(np.median([run["graph_ns"][kind] for run in runs])) for kind in runs[0]["graph_ns"]}
    choose, shared, combine = (sum(spent.get(kind, 0) for kind in kinds) / count for kinds in IN_LAYER)
    head = median_of(runs, "mean_ns_per_token") - count * (choose + shared + combine) - spent["expert"]
    pieces, expert = max(round(package.expert_stride / PIECE), 1), spent["expert"] / count / family.top_k
    return Costs(choose, shared, expert, combine, head, package.expert_stride / pieces / bytes_per_s * 1e9, pieces)


def replays_of(setting: Setting, runs: dict[str, list[dict[str, Any]]], costs: Costs, found: Knowledge) -> dict[str, float]:
    """ns per token by what is known ahead, on the routes of these runs: `found` where the runtime predicts."""
    package, family = setting.package, setting.package.family
    known = {"demand": DEMAND, "prefetch": found, "next layer known": NEXT_LAYER}
    known |= {"whole token known": THIS_TOKEN, "next token known": NEXT_TOKEN}
    routes = np.array(runs["demand"][0]["routes"]).reshape(-1, len(family.routed), family.top_k)
    room, policy = setting.budget // CpuBackend(package, 1).expert_bytes, POLICIES[setting.args.policy]
    return {name: Replay(routes, family.experts, room, costs, policy(), what).run()[0] for name, what in known.items()}


def add_replays(
    report: Report,
    share: str,
    setting: Setting,
    runs: dict[str, list[dict[str, Any]]],
    predicting: dict[str, Any],
    disk_bytes_per_s: float,
) -> None:
    """Both bounds, the replays beside them, and how far those are from the measured times. predicting: a run that always does."""
    bound = add_bounds(report, share, runs, disk_bytes_per_s)
    measured, needed = {"prefetch": [predicting]} | runs, runs["demand"][0]["loads"]["demand"]
    ahead, right = max(predicting["loads"]["prefetch"], 1e-9), max(needed - predicting["loads"]["demand"], 0)
    found = Knowledge(right / needed, min(right / ahead, 1)) if right else DEMAND
    costs = costs_of(setting.package, runs["resident"], disk_bytes_per_s)
    took = replays_of(setting, runs, costs, found)
    if "auto" in runs:  # its trial predicts for some of the tokens
        on = min(float(np.mean([run["loads"]["prefetch"] for run in runs["auto"]])) / ahead, 1)
        took["auto"] = took["demand"] + on * (took["prefetch"] - took["demand"])
    for name, ns in took.items():
        report.add(f"{share}, {name}, replayed: a token, mean", "ms", single(ns / 1e6))
        report.add(f"{share}, {name}, replayed: times the larger bound", "ratio", single(ns / bound))
        ratio = ns / median_of(measured[name], "mean_ns_per_token") if name in measured else 1
        if name in measured:
            report.add(f"{share}, {name}, replayed: a token", "ratio", single(ratio), against="measured")
        if abs(ratio - 1) > AGREEMENT:
            report.note(f"{share}, {name}: the replay is off by more than {AGREEMENT:.0%} and does not describe these runs")
    times = ", ".join(f"{name} {ns / 1e6:.3f}" for name, ns in vars(costs).items() if name != "pieces")
    what = f"predictions find {found.recall:.0%} of missing experts, {found.precision:.0%} of what they read is chosen"
    report.note(f"{share}: {what}; replayed with ms: {times} of {costs.pieces}")


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("package", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--shares", default="0.75,0.5,0.25", type=lambda text: [float(share) for share in text.split(",")])
    parser.add_argument("--tokens", type=int, default=200, help="of the second half, and of the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--llama", type=Path, metavar="GGUF", help="the same shape for llama.cpp")
    parser.add_argument("--bigmoe", type=Path, metavar="BMOE_CLI", help="BigMoeOnEdge's program, in its repository")
    parser.add_argument("--bigmoe-flags", default="--dense-weights mmap --ubatch 64", help="more of its options")
    parser.add_argument("--set", choices=PEERS, help="an instruction set for both engines")
    parser.add_argument("--seconds", type=float, default=300, help="that one run's tokens may take")
    parser.add_argument("--modes", type=lambda text: text.split("/"), help="these alone, between slashes (default: all)")
    parser.add_argument("--read-ahead", type=lambda text: list(map(int, text.split(","))), metavar="KIB,...", help="of the disk")
    for hidden, kind in (("child", str), ("budget", int), ("ids", Path), ("log", Path)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
        return
    package = seeded_package() if args.package == Path("qwen-moe") else Package(args.package)
    args.llama = seeded_gguf("qwen-moe") if args.llama == Path("qwen-moe") else args.llama
    args.modes = args.modes or [*PREFETCH, *((LLAMA, LLAMA_WHOLE) if args.llama else ()), *([BIGMOE] if args.bigmoe else [])]
    report = Report("memory_limited", args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that settings are put back
    if args.bigmoe:
        report.note(f"BigMoeOnEdge at {bigmoe_commit(args.bigmoe)}, {args.bigmoe_flags}")
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids"
        ids.write_bytes(array("i", token_ids(package, args.text, PROMPT + 2 * args.tokens)).tobytes())
        try:
            measure_shares(Setting(args, package, ids), report)
        except NoMemoryCgroupError as error:
            raise SystemExit(str(error)) from None
    report.finish()


if __name__ == "__main__":
    main()
