"""What tracing costs a decoding engine: interleaved windows of one running process, untraced and traced in several ways.

    sudo python -m benchmarks.overhead llama-1b [--rounds 15] [--json FILE] [--library libllama.so]
    sudo python -m benchmarks.overhead runtime

One process decodes without end and notes the begin and end of every token itself. In every round each variant gets a window,
with untraced windows before and behind it. A slowdown is the ratio of the median token in the window to the median token
of the two neighbours; the table gives the median over the rounds and its 95 % bootstrap interval. "nothing" is a window in
which nothing is done: what the noise alone makes of it. Beside it stands the accounting, which needs no comparison: hits of each
probe times the calibrated cost of a hit (warm and cold caches) plus the measured time in its BPF program, per thread; and
the tracer's own CPU time, as a share of one core.

`bpftrace` is the naive way: entry and return probes at the symbol of each ggml_compute_forward_* that the model runs.
"""

import argparse
import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_model import SHAPES, write
from tracer.elf import read_binary
from tracer.paths import BUILD

THREADS = 2
WARM_UP_S = 3.0
VARIANTS = {
    "nothing": None,
    "token, graph": "--levels token,graph",
    "operator": "--levels token,graph,operator,expert",
    "operator, sched": "--levels token,graph,operator,expert,sched",
    "operator, pmc": "--levels token,graph,operator,expert --pmc minor-faults,context-switches",
    "operator, bcc": "--levels token,graph,operator,expert --loader bcc",
    "operator, perf buffer": "--levels token,graph,operator,expert --buffer perf",
    "bpftrace": "bpftrace",
}


@dataclass
class Window:
    """One traced stretch of time, ns, and what the tracer said of its cost."""

    begin: int
    end: int
    accounted_warm: float = 0.0
    accounted_cold: float = 0.0
    tracer_cpu: float = 0.0
    bytes_per_token: float = 0.0
    lost: int = 0


class Engine:
    """A decoding process and its log of tokens."""

    def __init__(self, command: list[str], log: Path):
        self.log = log
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def tokens(self) -> np.ndarray:
        """(begin, end) of each token so far, ns, shape [n, 2]."""
        raw = np.fromfile(self.log, "<u8") if self.log.exists() else np.empty(0, "<u8")
        return raw[: len(raw) // 2 * 2].reshape(-1, 2).astype(np.int64)

    def wait_for_tokens(self, count: int) -> None:
        """Return once it has decoded so many."""
        while len(self.tokens()) < count:
            if self.process.poll() is not None:
                sys.exit(f"the engine ended with status {self.process.returncode}")
            time.sleep(0.2)

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None  # a pipe, as asked for
        self.process.stdin.close()
        self.process.wait()


def default_library() -> str:
    """The llama.cpp inside the package xllamacpp."""
    package = importlib.util.find_spec("xllamacpp")
    if package is None or not package.submodule_search_locations:
        sys.exit("xllamacpp is not installed; give a llama.cpp with --library")
    return str(next(Path(package.submodule_search_locations[0]).glob("*.so")))


def llama(shape: str, library: str, log: Path) -> list[str]:
    """The command that decodes a model of this shape."""
    path = BUILD / "models" / f"{shape}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, SHAPES[shape], quantized=True)
    return [sys.executable, "-m", "benchmarks.decode", library, str(path), str(log), str(THREADS)]


def traced(engine: Engine, options: str, seconds: float, settle: float, folder: Path) -> Window:
    """Attach for a while; the window begins once the tracer has learnt where to stand."""
    words = [sys.executable, "-m", "tracer", "attach", "--no-views", "--pid", str(engine.process.pid), "-o", str(folder)]
    subprocess.run([*words, *options.split(), "--duration", str(seconds + settle)], check=True, capture_output=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    bytes_written = sum(path.stat().st_size for path in folder.glob("*.bin"))
    shutil.rmtree(folder)
    begin = manifest["clocks"][0]["monotonic_ns"]
    lasted = manifest["clocks"][-1]["monotonic_ns"] - begin
    warm, cold = accounted(manifest, lasted)
    return Window(
        begin + int(settle * 1e9),
        begin + int((settle + seconds) * 1e9),
        warm,
        cold,
        manifest["cost"]["tracer_cpu_ns"] / lasted,
        bytes_written / max(1, manifest["records"].get("token_end", 0)),
        sum(manifest["lost"].values()),
    )


def accounted(manifest: dict[str, Any], lasted: int) -> tuple[float, float]:
    """(warm, cold): probes that stood to the end, as a share of the engine's thread time."""
    shares = []
    for cost in ("ns_per_hit", "ns_per_hit_cold"):
        standing = [row for row in manifest["probes"] if not row["retired_ns"]]
        spent = sum(row["hits"] * (row[cost] + row["bpf_ns_per_hit"]) for row in standing)
        shares.append(spent / (THREADS * lasted))
    return shares[0], shares[1]


def naive(engine: Engine, library: str, functions: list[str], seconds: float) -> Window:
    """bpftrace, which places what it is told to at the symbol."""
    probes = [f"{kind}:{library}:{name} {{ @[tid] = nsecs; }}" for name in functions for kind in ("uprobe", "uretprobe")]
    script = 'BEGIN { printf("ready\\n"); } ' + " ".join(probes)
    with subprocess.Popen(["bpftrace", "-p", str(engine.process.pid), "-e", script], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        while "ready" not in peer.stdout.readline():
            pass
        time.sleep(0.5)
        begin = time.monotonic_ns()
        time.sleep(seconds)
        end = time.monotonic_ns()
        peer.terminate()
        peer.communicate()
    return Window(begin, end)


def forward_functions(engine: Engine, folder: Path) -> tuple[str, list[str]]:
    """(library, the ggml_compute_forward_* that the model runs), from a short recording and the library's symbols."""
    words = [sys.executable, "-m", "tracer", "attach", "--no-views", "--pid", str(engine.process.pid), "--duration", "2"]
    subprocess.run([*words, "--levels", "token,graph,operator", "-o", str(folder)], check=True, capture_output=True)
    from analyzer.tables import load

    types = set("+".join(load(folder)["operators"]["type"].unique()).split("+"))
    manifest = json.loads((folder / "manifest.json").read_text())
    library = next(row["library"] for row in manifest["probes"] if row["program"] == "ggml_op_begin")
    shutil.rmtree(folder)
    names = {f"ggml_compute_forward_{name.lower()}" for name in types} | {"ggml_compute_forward_rms_norm_mul_fused"}
    binary = read_binary(library)
    return library, sorted(name for name in names if binary.symbol(name) is not None)


def quiet(seconds: float) -> Window:
    """A stretch in which nothing is traced."""
    begin = time.monotonic_ns()
    time.sleep(seconds)
    return Window(begin, time.monotonic_ns())


def times(tokens: np.ndarray, *windows: Window) -> np.ndarray:
    """Durations, ns, of the tokens that lie within one of the windows."""
    inside = [(tokens[:, 0] >= window.begin) & (tokens[:, 1] <= window.end) for window in windows]
    return (tokens[:, 1] - tokens[:, 0])[np.any(inside, axis=0)]


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95 % bootstrap interval."""
    medians = np.median(np.random.default_rng(0).choice(values, (10_000, len(values))), axis=1)
    return float(np.median(values)), float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def measure(engine: Engine, variants: dict[str, str | None], args: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    """Per variant its (window, quiet before, quiet behind) of every round."""
    found: dict[str, list[Any]] = {name: [] for name in variants}
    library, functions = forward_functions(engine, folder / "run") if "bpftrace" in variants else ("", [])
    before = quiet(args.seconds)
    for number in range(args.rounds):
        names = list(variants)
        for name in names if number % 2 == 0 else reversed(names):
            options = variants[name]
            if options is None:
                window = quiet(args.seconds)
            elif options == "bpftrace":
                window = naive(engine, library, functions, args.seconds)
            else:
                window = traced(engine, options, args.seconds, args.settle, folder / "run")
            behind = quiet(args.seconds)
            found[name].append((window, before, behind))
            before = behind
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return found


def summarize(name: str, rounds: list[Any], tokens: np.ndarray) -> dict[str, Any]:
    """One row of the table."""
    ratios = [np.median(times(tokens, window)) / np.median(times(tokens, before, behind)) for window, before, behind in rounds]
    median, low, high = interval(np.array(ratios) - 1)
    windows = [window for window, *_ in rounds]
    middle = {field: float(np.median([getattr(w, field) for w in windows])) for field in FIELDS}
    return {"variant": name, "slowdown": median, "low": low, "high": high, "rounds": len(rounds), **middle}


FIELDS = ("accounted_warm", "accounted_cold", "tracer_cpu", "bytes_per_token", "lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "engine", choices=[*SHAPES, "runtime"], help="a shape for llama.cpp, or our own runtime on its demo model"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each window")
    parser.add_argument("--settle", type=float, default=2.0, help="from the tracer's start to its window")
    parser.add_argument("--library", help="file that exports llama.h's functions (default: the package xllamacpp)")
    parser.add_argument("--variants", default="", help=f"a choice of: {'; '.join(VARIANTS)}, separated by semicolons")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name.strip() for name in args.variants.split(";") if name.strip()] or list(VARIANTS)
    variants = {name: VARIANTS[name] for name in names if not (args.engine == "runtime" and name == "bpftrace")}
    with tempfile.TemporaryDirectory() as text, contextlib.closing(start(args, Path(text))) as engine:
        engine.wait_for_tokens(2)
        time.sleep(WARM_UP_S)
        found = measure(engine, variants, args, Path(text))
        engine.close()
        tokens = engine.tokens()
    rows = [summarize(name, rounds, tokens) for name, rounds in found.items()]
    plain = float(np.median(np.concatenate([times(tokens, before) for _, before, _ in found[names[0]]]))) / 1e6
    print(f"{args.engine}: {plain:.3f} ms per token untraced")
    print(
        f"{'variant':22} {'slowdown %':>10} {'95 % interval':>16} {'accounted %, warm..cold':>24} {'own CPU %':>9} {'B/token':>9}"
    )
    for row in rows:
        bounds = f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        probes = f"{100 * row['accounted_warm']:.2f} .. {100 * row['accounted_cold']:.2f}"
        figures = f"{100 * row['tracer_cpu']:9.2f} {row['bytes_per_token']:9.0f}"
        print(f"{row['variant']:22} {100 * row['slowdown']:10.2f} {bounds:>16} {probes:>24} {figures}")
    if args.json:
        args.json.write_text(json.dumps({"engine": args.engine, "ms_per_token": plain, "variants": rows}, indent=1))


def start(args: argparse.Namespace, folder: Path) -> Engine:
    """The decoding process."""
    log = folder / "tokens.bin"
    if args.engine == "runtime":
        return Engine([sys.executable, "-m", "benchmarks.decode_runtime", str(BUILD / "demo-model"), str(log)], log)
    return Engine(llama(args.engine, args.library or default_library(), log), log)


if __name__ == "__main__":
    main()
