"""Backends that measure kernels: ONNX Runtime's CPU provider by CPU time, QNN's HTP (x86-64: an emulator) by its node events."""

import csv
import platform
import tempfile
from functools import cache
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort

from analyzer.errors import PredictError
from analyzer.predict.kernels import graphs
from moescope.answers import note_emulator

RUNS, WARM = 9, 3
LOW = 0.1
"""Quantile of a model's burst times that is used as its time."""
BURST_S, SHORTEST_BURST, LONGEST_BURST = 1e-3, 2, 64
REFERENCES = (
    ("Gemm", graphs.Shape(32, 512, 512)),
    ("MatMul", graphs.Shape(1, 1024, 1024)),
    ("MatMul", graphs.Shape(1, 1024, 1024, copies=6)),
    ("Sigmoid", graphs.Shape(64, 512, 512)),
)
"""Measured with every batch of models: arithmetic, weights that stay in a cache (4 MiB) and that do not (24 MiB), and
element-wise work. They give the batch's speed, since other programs slow each of them by a different factor."""
FAR = 10 << 20
"""Bytes of weights from which a model is scaled by the reference whose weights exceed the cache."""
SETTLE_S, ATTEMPTS, SLOWER, FASTER = 5.0, 3, 0.05, 0.1
"""How long references run to tell the usual pace; how often a batch is measured until no reference is slower by more; by how
much they have to be faster for another usual pace."""
BYTES_OF_A_ROW = 2.0
"""Bytes of weights per operation on a single row, as in the references limited by bandwidth."""
REFERENCE_DEMANDS = [(shape.flops(name) * shape.copies, shape.weights(name) * shape.copies) for name, shape in REFERENCES]


class Backend(Protocol):
    """Measures models."""

    name: str
    unit: str
    epoch: int
    """How often the machine turned out faster than thought: times of another epoch cannot be compared."""

    def times(self, models: list[bytes]) -> list[float]:
        """Time of each model, measured alternately."""

    def nodes(self, model: bytes) -> set[str]:
        """Operators of the chain that the backend reports as separate nodes."""


def bind_buffers(session: ort.InferenceSession) -> ort.IOBinding:
    """A chain's random input and its outputs in fixed buffers, so that a run copies nothing. Copies share their buffer."""
    binding = session.io_binding()
    for name, array in random_inputs(session).items():
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, np.float32)
        value.update_inplace(array)
        binding.bind_ortvalue_input(name, value)
    buffers: dict[int, ort.OrtValue] = {}
    for output in session.get_outputs():
        link = graphs.link_of(output.name)
        if link not in buffers:
            buffers[link] = ort.OrtValue.ortvalue_from_shape_and_type(output.shape, np.float32)
        binding.bind_ortvalue_output(output.name, buffers[link])
    return binding


def random_inputs(session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Random inputs of a chain."""
    model_input = session.get_inputs()[0]
    return {model_input.name: np.random.default_rng(1).standard_normal(model_input.shape).astype(np.float32)}


class Cpu:
    """CPU time of the single running thread, less the fixed cost of a run.

    CPU time excludes the time in which other programs run. They still use caches and, on a core with two threads, some of
    its units: hence alternating bursts, and a low quantile of each model instead of the mean. Such a neighbour lasts
    longer than a batch: a batch with a reference slower than usual is measured again, and the remaining
    difference is divided out. If the references become faster than ever, that is the new usual pace: a new epoch.
    Before a burst, a model runs until the caches are warm.
    """

    name, unit = "onnxruntime cpu", "s"

    def __init__(self, runs: int = RUNS, settle: float = SETTLE_S):
        self.runs, self.settle, self.epoch = runs, settle, 0
        self._references = [_Loop(self._session(m)) for m in [*_reference_models(), _tiny_model(1), _tiny_model(2)]]
        self._usual = np.empty(0)

    def times(self, models: list[bytes]) -> list[float]:
        """Seconds of each model at the usual pace; bursts are interleaved, so that a slow moment affects all."""
        if not len(self._usual):
            self._usual = self._settled()
        loops = [*(_Loop(self._session(model)) for model in models), *self._references]
        best, least_slowdown = np.empty(0), np.inf
        for _ in range(ATTEMPTS):
            typical = self._typical(loops)
            slowest = float(self._paces(typical).max())
            if slowest < least_slowdown:
                best, least_slowdown = typical, slowest
            if least_slowdown <= 1 + SLOWER:
                break
        if np.median(self._paces(best)) < 1 - FASTER:
            self._usual, self.epoch = self._paces(best) * self._usual, self.epoch + 1
        # The time of two operators on a single number less that of one is an operator's fixed cost; the rest is the run's.
        empty = 2 * best[-2] - best[-1]
        paces = self._paces(best)
        return [max(float(value - empty), 1e-9) / self._pace(model, paces) for value, model in zip(best, models, strict=False)]

    def _typical(self, loops: list["_Loop"]) -> np.ndarray:
        """A low quantile of each loop's bursts, in seconds per run."""
        return np.quantile([[loop.burst() for loop in loops] for _ in range(self.runs)], LOW, axis=0)

    def _settled(self) -> np.ndarray:
        """Undisturbed times of the references, measured for `settle` seconds."""
        bursts: list[np.ndarray] = []
        until = monotonic() + self.settle
        while not bursts or monotonic() < until:
            bursts.append(self._typical(self._references)[: len(REFERENCES)])
        return np.asarray(np.quantile(bursts, LOW, axis=0))

    def _paces(self, typical: np.ndarray) -> np.ndarray:
        """The slowdown of each reference relative to its usual time."""
        return np.asarray(typical[-2 - len(REFERENCES) : -2] / self._usual)

    def _pace(self, model: bytes, paces: np.ndarray) -> float:
        """The slowdown of a model: that of its references, weighted by their parts in it."""
        flops, weights = graphs.flops_and_bytes(model)
        if not weights:
            return float(paces[-1])
        fetching = 2 if weights > FAR else 1
        times_of_flops = (flops - weights / BYTES_OF_A_ROW) / REFERENCE_DEMANDS[0][0]
        kinds = [0, fetching]
        shares = np.array([max(times_of_flops, 0.0), weights / REFERENCE_DEMANDS[fetching][1]]) * self._usual[kinds]
        return float(shares @ paces[kinds] / shares.sum())

    def nodes(self, model: bytes) -> set[str]:
        """Nodes that remain, with their type, after ONNX Runtime has optimized the graph."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimized.onnx"
            self._session(model, str(file))
            remaining_types = {node.op_type for node in onnx.load(file).graph.node}
        return {node.name for node in onnx.load_from_string(model).graph.node if node.op_type in remaining_types}

    def _session(self, model: bytes, keep: str = "") -> ort.InferenceSession:
        options = _session_options()
        if keep:
            options.optimized_model_filepath = keep
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _session_options() -> ort.SessionOptions:
    """One thread, and only fatal errors in the log."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _reference_models() -> list[bytes]:
    return [graphs.chain_model([link], copies=link[1].copies) for link in REFERENCES]


def _tiny_model(operators: int) -> bytes:
    """A chain on a single number that is never fused."""
    return graphs.chain_model(graphs.chain(["Sigmoid", "Tanh"][:operators], graphs.Shape(1, 1, 1)))


class _Loop:
    """A session that runs without copying anything."""

    def __init__(self, session: ort.InferenceSession):
        self.session, self.binding = session, bind_buffers(session)
        self._run(WARM)
        self.count = int(np.clip(BURST_S / max(self._run(1), 1e-7), SHORTEST_BURST, LONGEST_BURST))

    def burst(self) -> float:
        """CPU seconds per run, with warm caches."""
        self._run(WARM)
        return self._run(self.count) / self.count

    def _run(self, count: int) -> float:
        begin = thread_time()
        for _ in range(count):
            self.session.run_with_iobinding(self.binding)
        return thread_time() - begin


class Htp:
    """QNN's own figures: cycles of its node events, or the time of whole executions.

    On x86-64 this is Qualcomm's emulator. Its cycles and times are the host's, not an NPU's, and cycles include a node's waits:
    hence the fastest of whole executions.
    """

    def __init__(self, runs: int = 5):
        self.runs, self.epoch = runs, 0
        self._emulated = platform.machine() == "x86_64"
        self.name, self.unit = ("QNN HTP (emulator)", "us") if self._emulated else ("QNN HTP", "cycles")
        note_emulator(self._emulated)

    def times(self, models: list[bytes]) -> list[float]:
        """Median cycles of each model's nodes, without transfers of input and output; on the emulator microseconds, with them."""
        return [max(self._time(*self._profile(model, self.runs)), 1.0) for model in models]

    def nodes(self, model: bytes) -> set[str]:
        """Nodes with cycles in the profile."""
        runs, _ = self._profile(model, 2)
        return {name for run in runs for name, cycles in run.items() if cycles}

    def _time(self, runs: list[dict[str, int]], executions: list[int]) -> float:
        return float(min(executions) if self._emulated else np.median([sum(run.values()) for run in runs]))

    def _profile(self, model: bytes, count: int) -> tuple[list[dict[str, int]], list[int]]:
        """(node → cycles, microseconds of the execution), one of each for every run except the first."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.csv"
            session = self._session(model, file)
            inputs = random_inputs(session)
            for _ in range(count + 1):
                session.run(None, inputs)
            del session
            return _node_cycles(file)[1:], _execution_us(file)[1:]

    def _session(self, model: bytes, profile: Path) -> ort.InferenceSession:
        options = _session_options()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        qnn = {"backend_type": "htp", "profiling_level": "detailed", "profiling_file_path": str(profile)}
        if platform.machine() == "x86_64":
            qnn["soc_model"] = "57"
        options.add_provider_for_devices(_htp_devices()[:1], qnn)
        session = ort.InferenceSession(model, options)
        session.disable_fallback()
        return session


@cache
def _htp_devices() -> list[Any]:
    try:
        import onnxruntime_qnn

        ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
    except ImportError:
        raise PredictError("QNN is not installed: pip install 'moescope[npu]'") from None
    except Exception as error:
        if "already" not in str(error):
            raise PredictError(f"QNN cannot be loaded ({str(error).splitlines()[0]}): use the cpu backend") from None
    return [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"]


def _execution_us(file: Path) -> list[int]:
    """Microseconds of each execution in a profile CSV."""
    with file.open(newline="") as lines:
        return [int(row[2]) for row in csv.reader(lines) if len(row) > 6 and row[6] == "QNN (execute) time"]


def _node_cycles(file: Path) -> list[dict[str, int]]:
    """Runs of a profile CSV: node → cycles. A run ends with the node that moves its output."""
    runs: list[dict[str, int]] = [{}]
    with file.open(newline="") as lines:
        for row in csv.reader(lines):
            if len(row) < 7 or row[1] != "NODE" or row[3] != "CYCLES":
                continue
            name = row[6].split(":OpId")[0].split(" OpId")[0]
            if name == "Output":
                runs.append({})
            elif name != "Input":
                runs[-1][name] = runs[-1].get(name, 0) + int(row[2])
    return [run for run in runs if run]
