"""llama.cpp built for individual instruction sets, from the npm package @node-llama-cpp/linux-x64."""

import ctypes
import sys

from workloads.llama_libraries import library_folder
from workloads.programs.llama_steps import declare_functions

PEERS = {"plain": "x64", "avx2": "haswell", "avxvnni": "alderlake", "avx512vnni": "icelake"}
"""Our instruction set → the name of llama.cpp's library for the same one."""


def load_library(instruction_set: str) -> ctypes.CDLL:
    """llama.h's functions, with only the CPU backend of this instruction set (one of ours)."""
    folder = library_folder()
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    path = folder / f"libggml-cpu-{PEERS[instruction_set]}.so"
    if not ggml.ggml_backend_load(str(path).encode()):
        sys.exit(f"{path} does not run on this processor: leave {instruction_set} out")
    return declare_functions(ctypes.CDLL(str(next(folder.glob("libllama.v*.so")))))
