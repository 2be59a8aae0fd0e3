"""The CPU backend: ONNX Runtime's CPU execution provider."""

import ctypes
import platform

import onnxruntime as ort

from runtime.errors import BackendError
from runtime.graph import CPU
from runtime.package import Package

MMAP_THRESHOLD = (-3, 128 * 1024)
_pool: list[int] = []


def share_threads(threads: int) -> None:
    """Make one thread pool for all sessions, where more than the calling thread is asked for.

    Its size stays what the first such engine of the process chose; ONNX Runtime then refuses sessions with threads of their own.
    """
    if threads > 1 and not _pool:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool.append(threads)


def session_options() -> ort.SessionOptions:
    """Options of a session that brings no threads of its own."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.use_per_session_threads = not _pool
    if not _pool:
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
    return options


def return_freed_memory() -> None:
    """Let glibc map large blocks one by one: a dropped session's weights then go back to the system at once."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(*MMAP_THRESHOLD)


class CpuBackend:
    """Dynamic shapes; a graph runs on `threads` threads."""

    id = CPU
    label = "CPU"
    tiers: tuple[int, ...] = ()

    def __init__(self, package: Package, threads: int):
        self.package = package
        share_threads(threads)

    def session(self, name: str, dims: dict[str, int]) -> ort.InferenceSession:
        """The subgraph's session; its weights are read from the package now."""
        options = session_options()
        options.enable_cpu_mem_arena = False
        try:
            session = ort.InferenceSession(
                self.package.read(name), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:
            raise BackendError(f"ONNX Runtime refuses {name} on CPU ({str(error).splitlines()[0]}): convert again") from None
        forget_model_bytes(session)
        return session


def forget_model_bytes(session: ort.InferenceSession) -> None:
    """ONNX Runtime's Python session keeps the model's bytes for a retry that never comes here: twice the weights."""
    session._model_bytes = None
