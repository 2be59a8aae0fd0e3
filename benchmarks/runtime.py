"""Our runtime with every expert in memory, against llama.cpp and transformers on the CPU.

    python -m benchmarks.runtime [--rounds 16] [--against llama.cpp] [--sets avx2,avx512vnni] [--json FILE]

Shapes are those of workloads/gguf_model.py (`qwen-moe`: 8 layers of Qwen1.5-MoE-A2.7B), seeded weights: Q4_0 in llama.cpp,
4 bits in ours, both in blocks of 32 with a float16 scale: 4.5 bits per weight. --block 64: 4.25 bits in ours. Each engine is a
separate process and works in short windows, alternately (ABBA), while the other is stopped. A round gives one ratio of speeds
for decode and one for prefill; the figures are their medians and 95 % bootstrap intervals. transformers runs in float32 with
fewer layers, compared with ours with as many.

Orchestration is our runtime's time per decoded token outside ONNX Runtime's `run`.

--sets: instead, each of these instruction sets, forced on ours, against llama.cpp built for the same one. For a decoded token,
bytes of weights per second are compared with reading memory, four times as much as the largest cache holds, and for a prompt,
products of weights per second with the set's products of bytes in registers (programs/product_peak.c), each on as many threads
in the same round. Attention's products of keys and values are not counted. `plain` does an eighth of the work.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol, cast

import numpy as np

from benchmarks.lib.models import seeded_gguf
from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.seeded_moe import seeded_config, seeded_package
from benchmarks.lib.spread import bootstrap
from benchmarks.products import memory_area, peak_program, peak_rate, read_memory
from runtime.backends.instruction_sets import FORCED_SET
from workloads import ROOT
from workloads.gguf_model import SHAPES, Shape, tensor_shapes

PROMPT = 8  # tokens before a window of decoding
WARM_UP = 2  # tokens of a window that are not counted
FEWER = 8  # times less work for plain C
BITS, SCALE_BITS, PEER_BLOCK = 4, 16, 32
FEW_LAYERS = 2  # for transformers: all layers in float32 take 20 GB


class Peer(Protocol):
    """An engine in a separate process."""

    def begin(self, tokens: int) -> None:
        """Clear the context; make room for `tokens` tokens."""

    def feed(self, ids: list[int]) -> None:
        """One forward step, with logits of its last token."""

    def inside_ns(self) -> int:
        """Time spent in its library so far; 0 if not counted."""


class Ours:
    """The runtime, with its first `layers` layers."""

    def __init__(self, package: Path, threads: int, layers: int):
        from runtime.moe import MoE
        from runtime.package.layout import Package
        from runtime.placement.options import Options
        from runtime.step.sampling import Sampler, Sampling

        opened = Package(package, verify=False)
        opened.family = replace(opened.family, layers=layers)
        self.model = MoE(opened, Options(threads=threads, chunk=512))
        self.sampler = Sampler(Sampling())

    def begin(self, tokens: int) -> None:
        self.sequence = self.model.engine.begin_sequence(tokens)

    def feed(self, ids: list[int]) -> None:
        self.model.engine.step(self.sequence, ids, self.sampler)

    def inside_ns(self) -> int:
        return sum(self.model.log.graph_ns.values())


class Llama:
    """The llama.cpp inside the package xllamacpp, or the one built for an instruction set."""

    def __init__(self, path: Path, threads: int, instruction_set: str | None):
        import ctypes

        from benchmarks.lib import llama_sets
        from workloads.programs.llama_steps import load_library

        self.ctypes, self.lib = ctypes, llama_sets.load_library(instruction_set) if instruction_set else load_library()
        self.lib.llama_get_memory.restype, self.lib.llama_get_memory.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self.lib.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        self.lib.llama_backend_init()
        model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        self.context = ctypes.c_void_p(self.lib.llama_init_from_model(model, self.lib.llama_context_default_params()))
        self.lib.llama_set_n_threads(self.context, threads, threads)

    def begin(self, tokens: int) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def feed(self, ids: list[int]) -> None:
        array = (self.ctypes.c_int32 * len(ids))(*ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(ids))):
            raise SystemExit("llama_decode failed")

    def inside_ns(self) -> int:
        return 0


class Transformers:
    """transformers on the CPU in float32, with its own random weights."""

    def __init__(self, threads: int, shape: Shape):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**seeded_config(shape))).float().eval()

    def begin(self, tokens: int) -> None:
        self.past: Any = None

    def feed(self, ids: list[int]) -> None:
        with self.torch.no_grad():
            out = self.model(self.torch.tensor([ids]), past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past = out.past_key_values
        int(out.logits[0, -1].argmax())

    def inside_ns(self) -> int:
        return 0


PEERS: dict[str, Callable[[argparse.Namespace, Shape], Peer]] = {
    "ours": lambda args, shape: Ours(args.model, args.threads, shape.layers),
    "llama": lambda args, shape: Llama(args.model, args.threads, args.isa),
    "transformers": lambda args, shape: Transformers(args.threads, shape),
}


def serve_windows(peer: Peer, vocabulary: int) -> None:
    """Run windows: reads `decode N` or `prefill N`, prints ns per token and ns inside the library."""
    ids = np.random.default_rng(0).integers(0, vocabulary, 4096).tolist()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, count = line.split()[0], int(line.split()[1])
        peer.begin(PROMPT + WARM_UP + count)
        if what == "decode":
            peer.feed(ids[:PROMPT])
            feeds = [[token] for token in ids[PROMPT : PROMPT + WARM_UP + count]]
        else:
            feeds = [ids[:count]]
        times, inside = [], []
        for feed in feeds:
            before, began = peer.inside_ns(), perf_counter_ns()
            peer.feed(feed)
            times.append(perf_counter_ns() - began)
            inside.append(peer.inside_ns() - before)
        skip = WARM_UP if what == "decode" else 0
        print(json.dumps({"ns": times[skip:], "inside_ns": inside[skip:]}), flush=True)


@dataclass
class Window:
    """Medians over the tokens of one window, ns."""

    ns: float
    inside_ns: float


class Process:
    """A running engine that is stopped between windows."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None):
        command = [sys.executable, "-m", "benchmarks.runtime", *arguments]
        whole = os.environ | (environment or {})
        pipe = subprocess.PIPE
        # llama.cpp reports every graph on standard error.
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, cwd=ROOT, env=whole)
        self._read()
        os.kill(self.process.pid, signal.SIGSTOP)

    def ask(self, what: str, count: int) -> Window:
        """Run one window."""
        assert self.process.stdin
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        answer = self._read()
        os.kill(self.process.pid, signal.SIGSTOP)
        return Window(float(np.median(answer["ns"])), float(np.median(answer["inside_ns"])))

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(("{", '"ready"')):  # libraries print too
                return json.loads(line)
        ended = f"`{shlex.join(map(str, cast(list[Any], self.process.args)))}` ended with status {self.process.wait()}"
        raise SystemExit(f"{ended}: run it alone to see why")


def compare_with(ours: Process, other: Process, rounds: int, counts: dict[str, int], name: str, report: Report) -> None:
    """Run windows alternately, ABBA: two of each engine and kind in a round. counts: tokens of a window by kind."""
    for what, count in counts.items():
        for process in (ours, other):
            process.ask(what, count)
        seen = np.array([windows_of_round(ours, other, what, count) for _ in range(rounds)])
        mine, theirs, inside = seen.T
        per_token = 1e6 * (1 if what == "decode" else count)
        report.add(f"{what}, {name}: ours", "ms/token", bootstrap(mine / per_token))
        report.add(f"{what}, {name}: theirs", "ms/token", bootstrap(theirs / per_token))
        report.add(f"{what}, {name}: speed", "ratio", bootstrap(theirs / mine), against=name.partition(",")[0])
        report.add(f"{what}, {name}: ours outside ONNX Runtime", "%", bootstrap(100 * (1 - inside / mine)))


def windows_of_round(ours: Process, other: Process, what: str, count: int) -> tuple[float, float, float]:
    """(ns of ours, ns of the other, ns of ours within ONNX Runtime), means of two windows."""
    first, second, third, fourth = (process.ask(what, count) for process in (ours, other, other, ours))
    return (first.ns + fourth.ns) / 2, (second.ns + third.ns) / 2, (first.inside_ns + fourth.inside_ns) / 2


def measure_sets(args: argparse.Namespace, report: Report) -> None:
    """Measure every instruction set against its peer."""
    shape = SHAPES[args.shape]
    package, gguf = str(seeded_package(args.block, args.shape).folder), str(seeded_gguf(args.shape))
    weights = bytes_of_token(shape, args.block), bytes_of_token(shape, PEER_BLOCK)
    numbers = ["--shape", args.shape, "--threads", str(args.threads), "--layers", str(shape.layers)]
    for name in args.sets.split(","):
        fewer = FEWER if name == "plain" else 1
        ours_command, peer_command = ["--child", "ours", "--model", package], ["--child", "llama", "--model", gguf, "--isa", name]
        with (
            contextlib.closing(Process(*ours_command, *numbers, environment={FORCED_SET: name})) as ours,
            contextlib.closing(Process(*peer_command, *numbers)) as peer,
            peak_program() as program,
        ):
            label = name if args.block == PEER_BLOCK else f"{name} in blocks of {args.block}"
            rounds, count, prompt = max(args.rounds // fewer, 2), max(args.tokens // fewer, 4), max(args.prompt // fewer, 4)
            limits = partial(read_rate, args.threads), partial(peak_per_ns, program, name, args.threads)
            SetSides(ours, peer, "decode", count, "read bandwidth", limits[0], weights).compare(label, rounds, report)
            products = (products_of_prompt(shape, prompt),) * 2
            SetSides(ours, peer, "prefill", prompt, "peak products", limits[1], products).compare(label, rounds, report)


@dataclass
class SetSides:
    """Both engines in windows of one kind. limit_rate: measures what none exceeds, bytes or products per ns; work: bytes
    of weights per decoded token, or products of a prompt, ours and theirs.
    """

    ours: Process
    peer: Process
    what: str
    count: int
    limit: str
    limit_rate: Callable[[], float]
    work: tuple[int, int]

    def compare(self, name: str, rounds: int, report: Report) -> None:
        """Add the figures of `rounds` rounds."""
        for process in (self.ours, self.peer):
            process.ask(self.what, self.count)
        mine, theirs, limits = np.array([self._round() for _ in range(rounds)]).T
        tokens, label = 1 if self.what == "decode" else self.count, f"{name}, {self.what}"
        for who, times, work in (("ours", mine, self.work[0]), ("llama.cpp", theirs, self.work[1])):
            report.add(f"{label}: {who}", "ms/token", bootstrap(times / tokens / 1e6))
            if limits.all():
                report.add(f"{label}: {who}, share of {self.limit}", "", bootstrap(work / times / limits))
        report.add(f"{label}: speed", "ratio", bootstrap(theirs / mine), against="llama.cpp of the same set")

    def _round(self) -> tuple[float, float, float]:
        """(ns of ours, ns of the peer, the limit)."""
        mine, theirs, _ = windows_of_round(self.ours, self.peer, self.what, self.count)
        return mine, theirs, self.limit_rate()


def read_rate(threads: int) -> float:
    """Bytes per ns of reading memory, the best of a few tries."""
    area, times = memory_area(), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            began = perf_counter_ns()
            read_memory(area, pool, threads)
            times.append(perf_counter_ns() - began)
    return len(area) / min(times)


def peak_per_ns(program: Path, name: str, threads: int) -> float:
    """Products of bytes per ns in registers, on all threads at once."""
    return peak_rate(program, name, threads) / 1e9


def bytes_of_token(shape: Shape, block: int) -> int:
    """Bytes of weights that a decoded token reads."""
    return int(products_of_prompt(shape, 1) * (BITS + SCALE_BITS / block) / 8)


def products_of_prompt(shape: Shape, tokens: int) -> int:
    """Products of weights: all matrices except the embedding, only the experts used, and the head for one token."""
    products = 0.0
    for name, dims in tensor_shapes(shape):
        if len(dims) > 1 and not name.startswith("token_embd"):
            times = 1 if name.startswith("output.") else tokens
            products += times * float(np.prod(dims)) * (shape.used / shape.experts if "_exps" in name else 1)
    return int(products)


def measure_peers(args: argparse.Namespace, report: Report) -> None:
    """Measure our runtime against each requested peer."""
    package, threads = str(seeded_package(args.block, args.shape).folder), str(args.threads)
    for name in args.against.split(","):
        few = name == "transformers"
        layers, rounds = (FEW_LAYERS, max(args.rounds // 2, 1)) if few else (SHAPES[args.shape].layers, args.rounds)
        counts = {"decode": max(args.tokens // 4, 4) if few else args.tokens, "prefill": args.prompt}
        peer = ["transformers", "--model", ""] if few else ["llama", "--model", str(seeded_gguf(args.shape))]
        numbers = ["--shape", args.shape, "--threads", threads, "--layers", str(layers)]
        with (
            contextlib.closing(Process("--child", "ours", "--model", package, *numbers)) as ours,
            contextlib.closing(Process("--child", *peer, *numbers)) as other,
        ):
            compare_with(ours, other, rounds, counts, f"{name}, {args.shape}, {layers} layers, {threads} threads", report)


def main() -> None:
    parser = make_parser(__doc__, rounds=16)
    parser.add_argument("--shape", choices=[name for name in SHAPES if "moe" in name], default="qwen-moe")
    parser.add_argument("--tokens", type=int, default=32, help="of a window of decoding")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a window of prefill")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, default=32, help="weights that share a scale, in ours")
    parser.add_argument("--against", default="llama.cpp,transformers")
    parser.add_argument("--sets", metavar="SET,SET", help="instruction sets, each against llama.cpp of the same one")
    parser.add_argument("--isa", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        shape = replace(SHAPES[args.shape], layers=args.layers)
        serve_windows(PEERS[args.child](args, shape), shape.vocabulary)
    else:
        report = Report("runtime", args)
        (measure_sets if args.sets else measure_peers)(args, report)
        report.finish()


if __name__ == "__main__":
    main()
