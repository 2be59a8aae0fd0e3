"""A step of llama.cpp's kernels through ggml's own API: ggml_copies.py EXTRA. Runs one round for each line that it reads.

The graph `base` runs each kernel of KERNELS once, on separate weights; for each kernel another graph has EXTRA more runs
of it directly after its own, on further weights: they find the caches like the single run of a step. A small product is first
in every graph: threads start within it. A round computes `base` to warm up and then every graph, or if EXTRA is 0 only `base`,
ALONE times; it prints ms of each graph by the host's clock as JSON.
"""

import ctypes
import json
import sys
import time

from workloads.programs.llama_steps import load_library

Q4_0, F32 = 2, 0
FILL = 0x3C
"""Every byte of the matrices: memory that was never written is one page of zeros."""
THREADS, ALONE = 2, 3
START = (256, 256, 1)
KERNELS = {
    "up": (2048, 8192, 1),
    "down": (8192, 2048, 1),
    "square": (4096, 4096, 1),
    "head": (2048, 32000, 1),
    "batch": (2048, 2048, 16),
}
"""Name → (inner dimension, rows of the matrix, columns): products as one decoded token has them, and one of a prompt."""


class Parameters(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def declare_ggml() -> ctypes.CDLL:
    """ggml inside the package xllamacpp."""
    lib, pointer, number = load_library(), ctypes.c_void_p, ctypes.c_int64
    lib.ggml_init.restype, lib.ggml_init.argtypes = pointer, [Parameters]
    lib.ggml_new_tensor_2d.restype, lib.ggml_new_tensor_2d.argtypes = pointer, [pointer, ctypes.c_int, number, number]
    lib.ggml_mul_mat.restype, lib.ggml_mul_mat.argtypes = pointer, [pointer, pointer, pointer]
    lib.ggml_set_name.restype, lib.ggml_set_name.argtypes = pointer, [pointer, ctypes.c_char_p]
    lib.ggml_new_graph_custom.restype = pointer
    lib.ggml_new_graph_custom.argtypes = [pointer, ctypes.c_size_t, ctypes.c_bool]
    lib.ggml_build_forward_expand.restype, lib.ggml_build_forward_expand.argtypes = None, [pointer, pointer]
    lib.ggml_backend_cpu_init.restype = pointer
    lib.ggml_backend_cpu_set_n_threads.argtypes = [pointer, ctypes.c_int]
    lib.ggml_backend_alloc_ctx_tensors.restype, lib.ggml_backend_alloc_ctx_tensors.argtypes = pointer, [pointer, pointer]
    lib.ggml_backend_buffer_clear.argtypes = [pointer, ctypes.c_uint8]
    lib.ggml_backend_graph_compute.argtypes = [pointer, pointer]
    return lib


class Step:
    """The kernels, and graphs of them."""

    def __init__(self, extra: int):
        self.lib, self.extra = declare_ggml(), extra
        self.context = self.lib.ggml_init(Parameters(1 << 24, None, True))
        self.first = self.operands(*START, 1)
        self.kernels = {name: self.operands(*shape, 1 + extra) for name, shape in KERNELS.items()}
        self.graphs = {name: self.graph(name) for name in ("base", *KERNELS)}
        self.backend = self.lib.ggml_backend_cpu_init()
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, THREADS)
        memory = self.lib.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        assert memory, "no memory for the tensors"
        self.lib.ggml_backend_buffer_clear(memory, FILL)

    def operands(self, inner: int, rows: int, columns: int, copies: int) -> list[tuple[int, int]]:
        """Matrices of a kernel, each with its second factor."""
        make = self.lib.ggml_new_tensor_2d
        return [(make(self.context, Q4_0, inner, rows), make(self.context, F32, inner, columns)) for _ in range(copies)]

    def graph(self, duplicated: str) -> int:
        """A graph of all kernels, with `extra` more runs of one of them."""
        graph = self.lib.ggml_new_graph_custom(self.context, 256, False)
        for name, operands in {"start": self.first, **self.kernels}.items():
            for number, pair in enumerate(operands if name == duplicated else operands[:1]):
                result = self.lib.ggml_mul_mat(self.context, *pair)
                self.lib.ggml_set_name(result, f"{name}.{number}".encode())
                self.lib.ggml_build_forward_expand(graph, result)
        return int(graph)

    def compute(self, name: str) -> float:
        """ms of one run of a graph."""
        start = time.perf_counter_ns()
        status = self.lib.ggml_backend_graph_compute(self.backend, self.graphs[name])
        spent = time.perf_counter_ns() - start
        assert status == 0, f"ggml_backend_graph_compute answered {status}"
        return spent / 1e6


def main() -> None:
    step = Step(int(sys.argv[1]))
    names = list(step.graphs) if step.extra else ["base"] * ALONE
    for turn, _ in enumerate(sys.stdin):
        step.compute("base")
        answer = [(name, step.compute(name)) for name in (names if turn % 2 else reversed(names))]
        print(json.dumps(dict(answer)), flush=True)


if __name__ == "__main__":
    main()
