"""What tracing costs a decoding engine: probes go on and off in one running process, many times, in several ways.

    sudo python -m benchmarks.overhead llama-1b [--rounds 60] [--json FILE] [--library libllama.so]
    sudo python -m benchmarks.overhead runtime

One process decodes without end and notes the begin and end of every token itself. For each variant one tracing session follows
it; its probes are removed and attached again in every round, and the order of the variants is turned round and round. A window's
speed is its median token, the first left out (probes that return tell structure anew); a round gives two ratios, of the window
with probes to that without before it and to that behind it. The table gives the median of all ratios and its 95 % bootstrap
interval over rounds. (Were with and without to change places, each ratio would turn over: unlike one ratio to both windows
together, which hold twice as many tokens, this has no leaning of its own.) Rounds in which the host took more than 2 % of the
CPUs' time are left out as long as others remain. "nothing" changes nothing: what the noise alone makes of a comparison.

Beside it stands the accounting, which compares nothing: hits of each probe times the calibrated cost of a hit (warm and cold
caches) plus the measured time in its BPF program, per thread and time with probes; and the tracer's own CPU time meanwhile,
as a share of one core.

"limited" records operators for part of the time only, by --max-overhead 10; its rounds compare mean tokens of windows of 10 s.
"bpftrace" is the naive way: entry and return probes at the symbol of each ggml_compute_forward_* that the model runs; its hits
are counted in a run of its own, and cost at least what an empty program's do. It takes seconds to come and go, so few of its
rounds fit between two moods of the machine: "naive" puts a program of BCC's at the same places, which comes and goes in a moment.
"""

import argparse
import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analyzer.tables.store import load
from benchmarks.bootstrap import interval
from tracer.commands.options import add_options, session_options
from tracer.kernel.loaders import import_bcc
from tracer.probes.elf import read_binary
from tracer.probes.perf_events import connect
from tracer.probes.uprobes import detach, perf_event
from tracer.recording.paths import BUILD
from tracer.session import Session
from tracer.target.process import Followed
from workloads.gguf_model import SHAPES, write
from workloads.host_time import MOST_STOLEN, HostTime

THREADS = {"runtime": 1}  # of the engine; llama.cpp has two
WARM_UP_S, LEARN_S = 3.0, 20.0
BLOCKS = 3  # each variant's rounds come in so many blocks
OPERATOR = "--levels token,graph,operator,expert"
VARIANTS = {
    "nothing": "",
    "token, graph": "--levels token,graph",
    "operator": OPERATOR,
    "operator, sched": f"{OPERATOR},sched",
    "operator, pmc": f"{OPERATOR} --pmc minor-faults,context-switches",
    "operator, bcc": f"{OPERATOR} --loader bcc",
    "operator, perf buffer": f"{OPERATOR} --buffer perf",
    "operator, limited": f"{OPERATOR} --max-overhead 10",
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
COUNT_S = 3  # how long the naive way's hits are counted
BPFTRACE_ENDS_S = 4.0  # it takes 2.5 s; now and then it goes to sleep just after it was told, and must be told again
LIMITED_S = 10.0  # a window with or without a limited recording, which switches its probes itself


@dataclass
class Window:
    """A stretch of time, ns, with or without probes, the tracer's CPU time within, and the host's share of the CPUs."""

    begin: int
    end: int
    cpu_ns: int = 0
    stolen: float = 0.0


@dataclass
class Block:
    """Windows without probes at even places and with probes at odd ones, and the slowdown that the tracer accounts.

    middle: what stands for a window's tokens; where probes come and go within it, the mean alone tells what was lost.
    """

    windows: list[Window]
    middle: Callable[[np.ndarray], np.floating[Any]] = np.median
    warm: float = float("nan")
    cold: float = float("nan")
    bytes_per_token: float = float("nan")
    lost: int = 0


class Engine:
    """A decoding process and its log of tokens."""

    def __init__(self, command: list[str], log: Path, threads: int):
        self.log, self.threads = log, threads
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


def start(args: argparse.Namespace, folder: Path) -> Engine:
    """The decoding process."""
    log, python = folder / "tokens.bin", sys.executable
    threads = THREADS.get(args.engine, 2)
    if args.engine == "runtime":
        return Engine([python, "-m", "benchmarks.programs.decode_runtime", str(BUILD / "demo-model"), str(log)], log, threads)
    path = BUILD / "models" / f"{args.engine}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, SHAPES[args.engine], quantized=True)
    library = args.library or default_library()
    return Engine([python, "-m", "benchmarks.programs.decode", library, str(path), str(log), str(threads)], log, threads)


def window(seconds: float) -> Window:
    """Let some time pass."""
    begin, cpu, host = time.monotonic_ns(), time.process_time_ns(), HostTime()
    time.sleep(seconds)
    return Window(begin, time.monotonic_ns(), time.process_time_ns() - cpu, host.share())


@contextlib.contextmanager
def recording(engine: Engine, words: str, folder: Path) -> Iterator[Session]:
    """A session that follows the engine in a thread of its own, once it has learnt where to stand."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = session_options(parser.parse_args([*words.split(), "--no-views", "-o", str(folder)]))
    with Session(options) as session:
        session.load()
        session.follow(Followed(engine.process.pid))
        running = threading.Thread(target=session.run, args=(lambda _: None,))
        running.start()
        try:
            until = time.monotonic() + LEARN_S
            while "operator" in options.levels and session.watcher.is_learning() and time.monotonic() < until:
                time.sleep(0.1)
            yield session
        finally:
            session.stop_requested = True
            running.join()
            session.finish()


def traced(engine: Engine, words: str, rounds: int, seconds: float, folder: Path) -> Block:
    """Rounds of one variant: probes off, on, off, on ... off."""
    with recording(engine, words, folder) as session:
        levels, found, with_probes = sorted(session.options.levels), [], time.monotonic_ns() - session.began_ns
        for number in range(2 * rounds + 1):
            began = time.monotonic_ns()
            (session.probes.restore if number % 2 else session.probes.shed)(levels)
            found.append(window(seconds))
            with_probes += time.monotonic_ns() - began if number % 2 else 0
    manifest = json.loads((folder / "manifest.json").read_text())
    written = sum(path.stat().st_size for path in folder.glob("*.bin"))
    shutil.rmtree(folder)
    costs = [accounted(manifest["probes"], cost) for cost in ("ns_per_hit", "ns_per_hit_cold")]
    slowdowns = [cost / (engine.threads * with_probes - cost) for cost in costs]
    steps = max(1, manifest["records"].get("token_end", 0))
    return Block(found, np.median, *slowdowns, written / steps, sum(manifest["lost"].values()))


def limited(engine: Engine, words: str, rounds: int, folder: Path) -> Block:
    """Rounds of a recording that switches its probes itself."""
    found, steps, written, lost = [window(LIMITED_S)], 1, 0, 0
    for _ in range(rounds):
        with recording(engine, words, folder) as session:
            while len(session.switch.changes) < 2 * len(session.sampling.costly):
                time.sleep(0.1)
            found.append(window(LIMITED_S))
        manifest = json.loads((folder / "manifest.json").read_text())
        steps, lost = steps + manifest["records"].get("token_end", 0), lost + sum(manifest["lost"].values())
        written += sum(path.stat().st_size for path in folder.glob("*.bin"))
        shutil.rmtree(folder)
        found.append(window(LIMITED_S))
    return Block(found, np.mean, bytes_per_token=written / steps, lost=lost)


def accounted(probes: list[dict[str, Any]], cost: str) -> float:
    """What the probes that stood to the end cost the engine's threads, ns; each program's hits once."""
    standing = {row["program"]: row for row in probes if not row["retired_ns"]}
    return sum(row["hits"] * (row[cost] + row["bpf_ns_per_hit"]) for row in standing.values())


@dataclass
class Naive:
    """Entry and return probes at the symbol, and by how much they slow the engine's threads down by accounting."""

    command: list[str]
    library: str
    offsets: list[int]
    warm: float
    cold: float


def naive_way(engine: Engine, folder: Path) -> Naive:
    """Probes on every function that computes one of the model's operators: entry, and return."""
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


def naive(engine: Engine, way: Naive, rounds: int, seconds: float) -> Block:
    """Rounds of the naive way, with a program by BCC."""
    bcc = import_bcc()
    module, places = bcc.BPF(text=NAIVE_PROGRAM), [(offset, at_return) for offset in way.offsets for at_return in (False, True)]
    program, found = module.load_func(b"seen", bcc.BPF.KPROBE).fd, [window(seconds)]
    for _ in range(rounds):
        probes = [connect(perf_event(way.library, *place), program, way.library) for place in places]
        found.append(window(seconds))
        detach(probes)
        found.append(window(seconds))
    module.cleanup()
    return Block(found, warm=way.warm, cold=way.cold)


def bpftrace(engine: Engine, way: Naive, rounds: int, seconds: float) -> Block:
    """Rounds of the naive way, by bpftrace."""
    found = [window(seconds)]
    for _ in range(rounds):
        with subprocess.Popen(way.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as peer:
            assert peer.stdout is not None
            while "ready" not in peer.stdout.readline():
                pass
            found.append(window(seconds))
            ended = False
            while not ended:
                peer.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.communicate(timeout=BPFTRACE_ENDS_S)
                    ended = True
        found.append(window(seconds))
    return Block(found, warm=way.warm, cold=way.cold)


NAIVE_WAYS = {"naive": naive, "bpftrace": bpftrace}


def forward_functions(engine: Engine, folder: Path) -> tuple[str, list[str], dict[str, float]]:
    """(library, the ggml_compute_forward_* that the model runs, ns per hit by class), from a short recording and symbols."""
    with recording(engine, OPERATOR, folder):
        time.sleep(1)
    types = set("+".join(load(folder)["operators"]["type"].unique()).split("+"))
    manifest = json.loads((folder / "manifest.json").read_text())
    library = next(row["library"] for row in manifest["probes"] if row["program"] == "ggml_op_begin")
    shutil.rmtree(folder)
    names = {f"ggml_compute_forward_{name.lower()}" for name in types} | {"ggml_compute_forward_rms_norm_mul_fused"}
    binary = read_binary(library)
    return library, sorted(name for name in names if binary.symbol(name) is not None), manifest["cost"]["calibration_ns"]


def measure(engine: Engine, variants: dict[str, str], args: argparse.Namespace, folder: Path) -> dict[str, list[Block]]:
    """The blocks of every variant."""
    found: dict[str, list[Block]] = {name: [] for name in variants}
    peer = naive_way(engine, folder / "run") if NAIVE_WAYS.keys() & variants.keys() else None
    rounds = -(-args.rounds // BLOCKS)
    for number in range(BLOCKS):
        names = list(variants)
        for name in names if number % 2 == 0 else reversed(names):
            if name == "nothing":
                block = Block([window(args.seconds) for _ in range(2 * rounds + 1)])
            elif peer and name in NAIVE_WAYS:
                block = NAIVE_WAYS[name](engine, peer, rounds, args.seconds)
            elif "--max-overhead" in variants[name]:
                block = limited(engine, variants[name], rounds, folder / "run")
            else:
                block = traced(engine, variants[name], rounds, args.seconds, folder / "run")
            found[name].append(block)
            print(f"block {number + 1} of {BLOCKS}: {name}", file=sys.stderr, flush=True)
    return found


def times(tokens: np.ndarray, *windows: Window) -> np.ndarray:
    """Durations, ns, of the tokens that lie within one of the windows, without each window's first: it tells structure anew."""
    inside = [np.flatnonzero((tokens[:, 0] >= window.begin) & (tokens[:, 1] <= window.end))[1:] for window in windows]
    return (tokens[:, 1] - tokens[:, 0])[np.concatenate(inside)]


def summarize(name: str, blocks: list[Block], tokens: np.ndarray) -> dict[str, Any]:
    """One row of the table."""
    found, cpu = [], []
    for block in blocks:
        for around in zip(block.windows[:-2:2], block.windows[1::2], block.windows[2::2], strict=True):
            inside = [times(tokens, window) for window in around]
            if all(map(len, inside)):
                before, during, behind = (float(block.middle(each)) for each in inside)
                found.append(((during / before, during / behind), max(window.stolen for window in around)))
            cpu.append(around[1].cpu_ns / (around[1].end - around[1].begin))
    ratios = [pair for pair, stolen in found if stolen <= MOST_STOLEN] or [pair for pair, _ in found]
    median, low, high = interval(np.array(ratios) - 1)
    middle = {
        field: float(np.median([getattr(block, field) for block in blocks])) for field in ("warm", "cold", "bytes_per_token")
    }
    lost = sum(block.lost for block in blocks)
    row = {
        "variant": name,
        "slowdown": median,
        "low": low,
        "high": high,
        "rounds": len(ratios),
        "left_out": len(found) - len(ratios),
        "tracer_cpu": float(np.mean(cpu)),
        "ratios": ratios,  # [rounds that count, 2]: series can be pooled
    }
    return {**row, **middle, "lost": lost}


def show(engine: str, plain_ms: float, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{engine}: {plain_ms:.3f} ms per token without probes")
    head = (
        f"{'variant':22} {'rounds':>6} {'left out':>8} {'slowdown %':>10} {'95 % interval':>16} {'accounted %, warm..cold':>24}"
    )
    print(f"{head} {'own CPU %':>9} {'B/token':>9} {'lost':>5}")
    for row in rows:
        bounds = f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        probes = f"{100 * row['warm']:.2f} .. {100 * row['cold']:.2f}"
        line = (
            f"{row['variant']:22} {row['rounds']:6} {row['left_out']:8} {100 * row['slowdown']:10.2f} {bounds:>16} {probes:>21}"
        )
        print(f"{line} {100 * row['tracer_cpu']:9.2f} {row['bytes_per_token']:9.0f} {row['lost']:5}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "engine", choices=[*SHAPES, "runtime"], help="a shape for llama.cpp, or our own runtime on its demo model"
    )
    parser.add_argument("--rounds", type=int, default=60, help="pairs per variant")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="length of each window: short ones compare before the machine drifts"
    )
    parser.add_argument("--library", help="file that exports llama.h's functions (default: the package xllamacpp)")
    parser.add_argument("--variants", default="", help=f"a choice of: {'; '.join(VARIANTS)} (separated by semicolons)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name.strip() for name in args.variants.split(";") if name.strip()] or list(VARIANTS)
    variants = {name: VARIANTS[name] for name in names if not (args.engine == "runtime" and name in NAIVE_WAYS)}
    with tempfile.TemporaryDirectory() as text, contextlib.closing(start(args, Path(text))) as engine:
        engine.wait_for_tokens(2)
        time.sleep(WARM_UP_S)
        found = measure(engine, variants, args, Path(text))
        engine.close()
        tokens = engine.tokens()
    rows = [summarize(name, blocks, tokens) for name, blocks in found.items()]
    quiet = [window for blocks in found.values() for block in blocks for window in block.windows[::2]]
    plain = float(np.median(times(tokens, *quiet))) / 1e6
    show(args.engine, plain, rows)
    if args.json:
        args.json.write_text(json.dumps({"engine": args.engine, "ms_per_token": plain, "variants": rows}, indent=1))


if __name__ == "__main__":
    main()
