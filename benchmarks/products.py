"""Products with 4- and 8-bit weights: every instruction set of this processor against ONNX Runtime's MatMulNBits.

python -m benchmarks.products [--rounds 60] [--shape 2048x1408] [--bits 4] [--block 32] [--rows 1,4,32,128] [--threads 2]
                              [--copies 64]

--copies: number of different matrices in a round; many do not fit into the caches, like the experts of a model. Times are
milliseconds per product; a ratio is MatMulNBits' time / ours in the same round (above 1: ours is faster). MatMulNBits (accuracy
level 4) uses the processor's best set regardless of the set forced on ours. For one row, bytes of weights per second are
compared with reading memory; for many, multiplications per second with the set's rate in registers on as many threads at once.
"""

import argparse
import contextlib
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks.lib.report import Report, make_parser
from benchmarks.lib.spread import bootstrap, extremes
from benchmarks.lib.turns import by_turns
from moescope.terminal import counted
from runtime.backends.block_products import DOMAIN
from runtime.backends.cpu import session_options, share_threads
from runtime.backends.instruction_sets import LIBRARY, instruction_sets, use_instruction_set

THEIRS = "MatMulNBits"
READ_BYTES = 256 << 20
BEYOND_CACHE = 4  # the area read to measure memory, as a multiple of the largest cache
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PEAK = Path(__file__).parent / "programs" / "product_peak.c"
Weights = dict[str, np.ndarray]


def main() -> None:
    """Measure and print."""
    args = parser().parse_args()
    share_threads(args.threads)
    report, (k, n) = Report("products", args), map(int, args.shape.split("x"))
    matrices = [random_weights(args, k, n, np.random.default_rng(seed)) for seed in range(args.copies)]
    own, theirs = own_session(args), their_sessions(report, args, matrices, k)
    size, peaks = sum(array.nbytes for array in matrices[0].values()), peak_rates(args.threads)
    for rows in map(int, args.rows.split(",")):
        x = ort.OrtValue.ortvalue_from_numpy(np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32))
        bindings = [
            bind_inputs(own, {"rows": x} | {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in m.items()}) for m in matrices
        ]
        sides: dict[str, Callable[[], None]] = {THEIRS: run_all([(s, bind_inputs(s, {"rows": x})) for s in theirs])}
        for name in instruction_sets():
            if name != "plain" or rows == 1:
                sides[name] = with_instruction_set(name, run_all([(own, binding) for binding in bindings]))
        report_times(report, rows, measure_sides(sides, args), (size, rows * k * n), peaks)
    report.finish()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser(__doc__, rounds=60)
    parser.add_argument("--shape", default="2048x1408", metavar="KxN")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--block", type=int, choices=(16, 32, 64, 128, 256), default=32)
    parser.add_argument("--rows", default="1,4,32,128", metavar="M,M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--copies", type=int, default=64)
    return parser


def random_weights(args: argparse.Namespace, k: int, n: int, rng: np.random.Generator) -> Weights:
    """A matrix of random codes."""
    blocks = -(-k // args.block)
    values = rng.integers(0, 256, (n, blocks, args.block * args.bits // 8), np.uint8)
    return {"values": values, "scales": rng.standard_normal((n, blocks)).astype(np.float16)}


def make_session(args: argparse.Namespace, node: onnx.NodeProto, inputs: list[str], constants: Weights) -> ort.InferenceSession:
    """A session of one product."""
    options = session_options()
    options.register_custom_ops_library(str(LIBRARY))
    types = {"values": TensorProto.UINT8, "scales": TensorProto.FLOAT16}
    infos = [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in inputs]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "product", infos, [out], initializers)
    versions = [helper.make_opsetid(domain, version) for domain, version in (("", 17), (DOMAIN, 1), ("com.microsoft", 1))]
    model = helper.make_model(graph, opset_imports=versions, ir_version=onnx.IR_VERSION_2023_5_5)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def own_session(args: argparse.Namespace) -> ort.InferenceSession:
    """One session for all matrices, which are inputs."""
    inputs = ["rows", "values", "scales"]
    return make_session(
        args, helper.make_node("BlockMatMul", inputs, ["out"], domain=DOMAIN, bits=args.bits, gated=0, unsqueezed=0), inputs, {}
    )


def their_sessions(report: Report, args: argparse.Namespace, matrices: list[Weights], k: int) -> list[ort.InferenceSession]:
    """One session for each matrix, which packs it; the time for that is reported."""
    sizes = {"bits": args.bits, "block_size": args.block, "K": k, "N": len(matrices[0]["scales"]), "accuracy_level": 4}
    node = helper.make_node(THEIRS, ["rows", "values", "scales"], ["out"], domain="com.microsoft", **sizes)
    sessions, times = [], []
    for matrix in matrices:
        begin = time.perf_counter()
        sessions.append(make_session(args, node, ["rows"], matrix | {"scales": matrix["scales"].astype(np.float32)}))
        times.append((time.perf_counter() - begin) * 1e3)
    report.add(f"{THEIRS}: a session of a matrix", "ms", extremes(times))
    return sessions


def bind_inputs(own: ort.InferenceSession, feeds: dict[str, ort.OrtValue]) -> ort.IOBinding:
    """A binding of inputs without copies."""
    binding = own.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    return binding


def run_all(pairs: list[tuple[ort.InferenceSession, ort.IOBinding]]) -> Callable[[], None]:
    """A function that runs all pairs."""

    def run() -> None:
        for own, binding in pairs:
            own.run_with_iobinding(binding)

    return run


def with_instruction_set(name: str, run: Callable[[], None]) -> Callable[[], None]:
    """`run` with an instruction set forced."""

    def forced_run() -> None:
        use_instruction_set(name)
        run()

    return forced_run


def measure_sides(sides: dict[str, Callable[[], None]], args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Milliseconds per product [rounds] of each side, and milliseconds of reading READ_BYTES of memory."""
    times: dict[str, list[float]] = {name: [] for name in [*sides, "reading"]}
    area = memory_area()
    with ThreadPoolExecutor(args.threads) as threads:
        reading = (lambda: read_memory(area, threads, args.threads), len(area) / READ_BYTES)
        for _, name in by_turns(list(times), args.rounds + 1):
            run, copies = (sides[name], args.copies) if name in sides else reading
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e3 / copies)
    return {name: np.array(values[1:]) for name, values in times.items()}  # the first round warms up


def memory_area() -> np.ndarray:
    """Bytes of which the caches hold at most a quarter."""
    caches = [int(path.read_text().strip().removesuffix("K")) << 10 for path in CACHES.glob("index*/size")]
    return np.ones(max(READ_BYTES, BEYOND_CACHE * max(caches, default=0)), np.uint8)


def read_memory(area: np.ndarray, threads: ThreadPoolExecutor, count: int) -> None:
    """Search for an absent byte, each thread in its part of the area."""
    part, search = len(area) // count, ctypes.CDLL(None).memchr
    search.argtypes, search.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    assert not any(threads.map(lambda i: search(area.ctypes.data + i * part, 0, part), range(count)))


def peak_rates(threads: int) -> dict[str, float]:
    """Products per second in registers on all threads at once, for each known set of this processor."""
    with peak_program() as program:
        rates = {name: peak_rate(program, name, threads) for name in instruction_sets()}
    return {name: rate for name, rate in rates.items() if rate}


@contextlib.contextmanager
def peak_program() -> Iterator[Path]:
    """The built programs/product_peak.c."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "product_peak"
        subprocess.run(["cc", "-O2", str(PEAK), "-o", str(program)], check=True)
        yield program


def peak_rate(program: Path, name: str, threads: int) -> float:
    """Products per second of an instruction set in registers, on all threads at once; 0 for a set without a loop there."""
    running = [subprocess.Popen([str(program), name], stdout=subprocess.PIPE) for _ in range(threads)]
    rates = [process.communicate()[0] for process in running]
    return sum(map(float, rates)) if all(rates) else 0.0


def report_times(report: Report, rows: int, times: dict[str, np.ndarray], work: tuple[int, int], peaks: dict[str, float]) -> None:
    """Times, ratios, and shares of a ceiling. work: bytes of weights, products of numbers."""
    (size, products), shape = work, counted(rows, "row")
    for name, values in times.items():
        if name == "reading":
            continue
        report.add(f"{name}, {shape}", "ms", extremes(values))
        if name != THEIRS:
            report.add(f"{name}, {shape}, speed", "x", bootstrap(times[THEIRS] / values), THEIRS)
        if rows == 1:
            share = (size / values) / (READ_BYTES / times["reading"])
            report.add(f"{name}, 1 row, share of read bandwidth", "", bootstrap(share))
        elif name in peaks:
            rate = products / (values.min() / 1e3)
            report.note(f"{name}, {shape}: at best {rate / 1e9:.0f} G products/s, {rate / peaks[name]:.0%} of its peak")


if __name__ == "__main__":
    main()
