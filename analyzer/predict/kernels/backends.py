"""Where kernels are measured: ONNX Runtime's CPU provider by CPU time, QNN's HTP (x86-64: an emulator) by its node events."""

import csv
import platform
import tempfile
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort

from analyzer.predict.errors import PredictError
from analyzer.predict.kernels import graphs

RUNS, WARM = 15, 3
LOW = 0.1
"""Quantile of a model's bursts that counts."""
BURST_S, LONGEST_BURST = 3e-4, 32
REFERENCES = (
    ("Gemm", graphs.Shape(32, 512, 512)),
    ("MatMul", graphs.Shape(1, 1024, 1024)),
    ("Sigmoid", graphs.Shape(64, 512, 512)),
)
"""Measured with every batch of models: arithmetic, weights that come from afar, and elements. They tell a batch's pace."""


class Backend(Protocol):
    """Measures models."""

    name: str
    unit: str

    def times(self, models: list[bytes]) -> list[float]:
        """Time of each model, measured in turns."""

    def nodes(self, model: bytes) -> set[str]:
        """Operators of the chain that are nodes of their own, by the backend's own account."""


def feeds(session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Random inputs of a chain."""
    taken = session.get_inputs()[0]
    return {taken.name: np.random.default_rng(1).standard_normal(taken.shape).astype(np.float32)}


class Cpu:
    """CPU time of the one thread that runs, less what a run costs whatever it computes.

    CPU time, not wall time: other programs take the core, but not from this clock. They do take caches, and of a core with two
    threads a part of its units: hence many short bursts in turns, and of each model a low quantile, not the mean. The clock
    drifts from minute to minute: all batches are brought to the pace of the first one, by reference kernels that are in each.
    """

    name, unit = "onnxruntime cpu", "s"

    def __init__(self, runs: int = RUNS):
        self.runs = runs
        self._usual: np.ndarray | None = None

    def times(self, models: list[bytes]) -> list[float]:
        """Seconds of each model at the first batch's pace; bursts are interleaved, so that a slow moment hits all."""
        known = [graphs.model([link]) for link in REFERENCES]
        sessions = [self._session(one) for one in [*models, *known, *map(_tiny, (1, 2))]]
        inputs = [feeds(session) for session in sessions]
        bursts = [_burst(session, given) for session, given in zip(sessions, inputs, strict=True)]
        seen = np.empty((self.runs, len(sessions)))
        for run in range(self.runs):
            for i, session in enumerate(sessions):
                session.run(None, inputs[i])
                begin = thread_time()
                for _ in range(bursts[i]):
                    session.run(None, inputs[i])
                seen[run, i] = (thread_time() - begin) / bursts[i]
        typical = np.quantile(seen, LOW, axis=0)
        # Two operators on a single number less one are an operator's fixed cost; the rest is the run's.
        empty = 2 * typical[-2] - typical[-1]
        return [max(float(value - empty), 1e-9) / self._pace(typical[-2 - len(known) : -2]) for value in typical[: len(models)]]

    def _pace(self, references: np.ndarray) -> float:
        """How many times as long as in the first batch the references took: the median, for one of them may be disturbed."""
        if self._usual is None:
            self._usual = references
        return float(np.median(references / self._usual))

    def nodes(self, model: bytes) -> set[str]:
        """Nodes that are left, with their type, after ONNX Runtime has optimized the graph."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimized.onnx"
            self._session(model, str(file))
            left = {node.op_type for node in onnx.load(file).graph.node}
        return {node.name for node in onnx.load_from_string(model).graph.node if node.op_type in left}

    def _session(self, model: bytes, keep: str = "") -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        if keep:
            options.optimized_model_filepath = keep
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _tiny(operators: int) -> bytes:
    """A chain on a single number that nothing fuses."""
    return graphs.model(graphs.chain(["Sigmoid", "Tanh"][:operators], graphs.Shape(1, 1, 1)))


def _burst(session: ort.InferenceSession, given: dict[str, np.ndarray]) -> int:
    """Runs without a pause that one reading of the clock is worth."""
    for _ in range(WARM):
        session.run(None, given)
    begin = thread_time()
    session.run(None, given)
    return int(np.clip(BURST_S / max(thread_time() - begin, 1e-7), 1, LONGEST_BURST))


class Htp:
    """Cycles of QNN's own node events. On x86-64 this is Qualcomm's emulator: its cycles are the host's, no NPU's."""

    unit = "cycles"

    def __init__(self, runs: int = 5):
        self.runs = runs
        self.name = "QNN HTP" + (" (emulator)" if platform.machine() == "x86_64" else "")

    def times(self, models: list[bytes]) -> list[float]:
        """Median cycles of each model's nodes, without moving its input and output."""
        return [max(float(np.median([sum(run.values()) for run in self._profile(one)])), 1.0) for one in models]

    def nodes(self, model: bytes) -> set[str]:
        """Nodes that the profile names with any cycles."""
        runs = self._profile(model)
        return {name for run in runs for name, cycles in run.items() if cycles}

    def _profile(self, model: bytes) -> list[dict[str, int]]:
        """Node → cycles, one dict a run but the first."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.csv"
            session = self._session(model, file)
            given = feeds(session)
            for _ in range(self.runs + 1):
                session.run(None, given)
            del session
            return _node_cycles(file)[1:]

    def _session(self, model: bytes, profile: Path) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
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
        raise PredictError("no QNN here: pip install 'moescope[npu]'") from None
    except Exception as error:
        if "already" not in str(error):
            raise PredictError(f"QNN does not load here ({str(error).splitlines()[0]}): use the cpu backend") from None
    return [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"]


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
