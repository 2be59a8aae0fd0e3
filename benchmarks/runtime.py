"""Our runtime with every expert in memory, against llama.cpp and transformers on the CPU: runtime.py [--rounds 16] [--json FILE].

The shape is `qwen-moe` of workloads/gguf_model.py (8 layers of Qwen1.5-MoE-A2.7B), seeded weights: Q4_0 in llama.cpp (blocks of 32,
float16 scales), 4 bits in ours (blocks of 64, float32 scales): 4.5 bits a weight in both. Each engine lives in a process of its
own and works in short windows, by turns (ABBA), while the other is stopped. A round gives one ratio of speeds for decode and one
for prefill; the table has their medians and 95 % bootstrap intervals. transformers runs in float32 with fewer layers, against
ours with as many.

Orchestration is the part of a decoded token that ours spends outside ONNX Runtime's `run`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from benchmarks.bootstrap import interval
from benchmarks.lib.seeded_moe import ROOT, config, seeded_package
from workloads.gguf_model import SHAPES, write

SHAPE = SHAPES["qwen-moe"]
PROMPT = 8  # tokens before a window of decoding
WARM_UP = 2  # of its tokens, which are not counted
FEW_LAYERS = 2  # that transformers gets: all of them in float32 take 20 GB


class Peer(Protocol):
    """An engine in its own process."""

    def begin(self, tokens: int) -> None:
        """Forget what was fed; room for so many tokens."""

    def feed(self, ids: list[int]) -> None:
        """One forward step, with logits of its last token."""

    def inside_ns(self) -> int:
        """Time spent in its library so far; 0 where nobody counts."""


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
    """The llama.cpp inside the package xllamacpp."""

    def __init__(self, path: Path, threads: int):
        import ctypes

        from workloads.programs.llama_steps import library

        self.ctypes, self.lib = ctypes, library()
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
    """transformers on the CPU in float32, weights as it draws them."""

    def __init__(self, threads: int, layers: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        sizes = config(replace(SHAPE, layers=layers))
        self.torch = torch
        self.model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes)).float().eval()

    def begin(self, tokens: int) -> None:
        self.past: Any = None

    def feed(self, ids: list[int]) -> None:
        with self.torch.no_grad():
            out = self.model(self.torch.tensor([ids]), past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past = out.past_key_values
        int(out.logits[0, -1].argmax())

    def inside_ns(self) -> int:
        return 0


def serve(peer: Peer) -> None:
    """Answer one window after the other: `decode N` or `prefill N` in, ns per token and ns inside the library out."""
    ids = np.random.default_rng(0).integers(0, SHAPE.vocabulary, 4096).tolist()
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
    """A living engine that is stopped whenever it is not asked."""

    def __init__(self, *arguments: str):
        command = [sys.executable, "-m", "benchmarks.runtime", *arguments]
        pipe = subprocess.PIPE
        # llama.cpp tells of every graph on standard error.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        self._read()
        os.kill(self.process.pid, signal.SIGSTOP)

    def ask(self, what: str, count: int) -> Window:
        """One window."""
        assert self.process.stdin
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        told = self._read()
        os.kill(self.process.pid, signal.SIGSTOP)
        return Window(float(np.median(told["ns"])), float(np.median(told["inside_ns"])))

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(("{", '"ready"')):  # libraries talk too
                return json.loads(line)
        told = f"`{' '.join(self.process.args)}` ended with status {self.process.wait()}"
        raise SystemExit(f"{told}: run it alone to see why")


def compare(ours: Process, other: Process, rounds: int, tokens: int, prompt: int) -> dict[str, Any]:
    """Windows by turns, ABBA: two of each engine and kind in a round."""
    found: dict[str, Any] = {}
    for what, count in (("decode", tokens), ("prefill", prompt)):
        for process in (ours, other):
            process.ask(what, count)
        ratios, mine, theirs, outside = [], [], [], []
        for _ in range(rounds):
            windows = [process.ask(what, count) for process in (ours, other, other, ours)]
            a, b = windows[0].ns + windows[3].ns, windows[1].ns + windows[2].ns
            ratios.append(b / a)
            mine.append(a / 2)
            theirs.append(b / 2)
            outside.append(1 - (windows[0].inside_ns + windows[3].inside_ns) / a)
        scale = 1e6 * (1 if what == "decode" else count)
        found[what] = {
            "speed_ratio": interval(np.array(ratios)),
            "ours_ms_per_token": interval(np.array(mine) / scale),
            "theirs_ms_per_token": interval(np.array(theirs) / scale),
            "orchestration_share": interval(np.array(outside)),
            "tokens": count,
            "rounds": rounds,
        }
    return found


def show(name: str, found: dict[str, Any]) -> None:
    for what, row in found.items():
        cells = [
            f"{row[key][0]:.3f} ({row[key][1]:.3f}..{row[key][2]:.3f})" for key in ("ours_ms_per_token", "theirs_ms_per_token")
        ]
        ratio, share = row["speed_ratio"], row["orchestration_share"]
        print(f"{what:<8} ours {cells[0]} ms/token   {name} {cells[1]}", end="   ")
        print(f"speed ratio {ratio[0]:.3f} ({ratio[1]:.3f}..{ratio[2]:.3f})", end="   ")
        print(f"orchestration {share[0]:.1%} ({share[1]:.1%}..{share[2]:.1%}); {row['rounds']} rounds of {row['tokens']} tokens")


def gguf() -> Path:
    """The same shape for llama.cpp, written the first time."""
    path = ROOT / "build" / "models" / "qwen-moe.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, SHAPE, quantized=True)
    return path


def measure(args: argparse.Namespace) -> dict[str, Any]:
    package, threads = str(seeded_package(args.block).folder), str(args.threads)
    facts: dict[str, Any] = {"shape": "qwen-moe", "layers": SHAPE.layers, "block": args.block, "threads": args.threads}
    pairs = {
        "llama.cpp": (SHAPE.layers, ["llama", str(gguf())], args.rounds, args.tokens),
        "transformers": (FEW_LAYERS, ["transformers", ""], max(args.rounds // 2, 3), max(args.tokens // 4, 4)),
    }
    for name in args.against.split(","):
        layers, other, rounds, tokens = pairs[name]
        numbers = ["--threads", threads, "--layers", str(layers)]
        processes = [Process("--child", "ours", "--model", package, *numbers)]
        processes.append(Process("--child", other[0], "--model", other[1], *numbers))
        try:
            found = compare(processes[0], processes[1], rounds, tokens, args.prompt)
        finally:
            for process in processes:
                process.close()
        facts[name] = {"layers": layers, **found}
        print(f"{layers} layers, {args.threads} threads, against {name}")
        show(name, found)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of a window of decoding")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a window of prefill")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, default=64, help="weights that share a scale, in ours")
    parser.add_argument("--against", default="llama.cpp,transformers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("ours", "llama", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "ours":
        serve(Ours(args.model, args.threads, args.layers))
    elif args.child == "llama":
        serve(Llama(args.model, args.threads))
    elif args.child == "transformers":
        serve(Transformers(args.threads, args.layers))
    else:
        facts = measure(args)
        if args.json:
            args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
