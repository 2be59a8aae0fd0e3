"""The CPU backend: ONNX Runtime's CPU execution provider."""

import ctypes
import platform
from functools import cached_property

import numpy as np
import onnx
import onnxruntime as ort

from runtime.backends.block_products import product_weights, with_block_products
from runtime.backends.graph import to_ort
from runtime.backends.kv_cache import REWRITTEN, with_rounding
from runtime.cache_rules.forms import CPU
from runtime.errors import BackendError
from runtime.package.layout import Package

MMAP_THRESHOLD = (-3, 128 * 1024)
_pool: list[int] = []


def share_threads(threads: int) -> None:
    """Create one thread pool for all sessions if more than the calling thread is requested.

    The first such engine of the process determines its size; ONNX Runtime then refuses sessions with their own threads.
    """
    if threads > 1 and not _pool:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool.append(threads)


def session_options() -> ort.SessionOptions:
    """Options of a session without threads of its own."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = not _pool
    if not _pool:
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
    return options


def return_freed_memory() -> None:
    """Have glibc map large blocks one by one, so that a dropped session's weights are returned to the system at once."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(*MMAP_THRESHOLD)


class CpuBackend:
    """Dynamic shapes; a graph runs on `threads` threads."""

    id = CPU
    label = "CPU"
    tiers: tuple[int, ...] = ()

    def __init__(self, package: Package, threads: int, kv_bits: int = 32):
        self.package, self.kv_bits = package, kv_bits
        share_threads(threads)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert in memory: as stored, but with matrices of floats in 32 bits."""
        tensors, half = self.package.manifest["experts"]["tensors"], self.package.half_experts
        return sum(int(tensor["bytes"]) * (2 if half and tensor["dtype"] == "<f2" else 1) for tensor in tensors)

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """A session of a subgraph other than an expert; reads its weights from the package."""
        graph = self.package.graph(name)
        if name.startswith("attention") and self.package.family.attends(int(name.rpartition("_")[2])):
            fused = self.package.family.FUSED_ATTENTION
            graph = REWRITTEN[self.kv_bits](graph) if fused else with_rounding(graph, self.kv_bits)
        return self.create(name, onnx.load_model_from_string(graph))

    def create(self, name: str, model: onnx.ModelProto) -> ort.InferenceSession:
        """A session of this model, which is modified; weights that it names are in the package's folder."""
        options = session_options()
        weights = self._resident_weights(with_block_products(model, options).graph)
        for weight, value in weights.items():
            options.add_initializer(weight, value)
        graph = model.SerializeToString()
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.package.folder))
        try:
            session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            raise BackendError(f"ONNX Runtime rejects {name} on CPU ({str(error).splitlines()[0]}): convert again") from None
        forget_model_bytes(session)
        session._weights = weights  # keeps their memory
        return session

    def _resident_weights(self, graph: onnx.GraphProto) -> dict[str, ort.OrtValue]:
        """Weights of products in memory that is mapped here: where ONNX Runtime maps it, it has no huge pages."""
        weights = {}
        for tensor in product_weights(graph):
            place = {entry.key: entry.value for entry in tensor.external_data}
            whole = self.package.resident(self.package.folder / place["location"])
            memory = np.frombuffer(whole, np.uint8, int(place["length"]), int(place["offset"]))
            memory = memory.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            weights[tensor.name] = to_ort(memory.reshape(tensor.dims))
        return weights


def forget_model_bytes(session: ort.InferenceSession) -> None:
    """Drop the copy of the model's bytes that ONNX Runtime's session keeps for a retry, and that doubles the weights."""
    session._model_bytes = None
