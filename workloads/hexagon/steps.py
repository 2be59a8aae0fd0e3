"""llama.cpp with its Hexagon backend: steps.py LIBRARIES BACKEND MODEL BATCHES NEW_TOKENS.

The last three are those of programs/llama_steps.py. LIBRARIES: a folder of llama.cpp's libraries that load
their backends, BACKEND: libggml-hexagon.so. LD_LIBRARY_PATH selects the libcdsprpc.so.
"""

import ctypes
import json
import sys
from pathlib import Path

from workloads.programs import llama_steps


def load_library(folder: Path, backend: str) -> ctypes.CDLL:
    """llama.h's functions, with the plain CPU backend and `backend`."""
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    for path in (backend, str(folder / "libggml-cpu-x64.so")):
        if not ggml.ggml_backend_load(path.encode()):
            sys.exit(f"{path} does not load")
    return llama_steps.declare_functions(ctypes.CDLL(str(next(folder.glob("libllama.v*.so")))))


def main() -> None:
    lib = load_library(Path(sys.argv.pop(1)), sys.argv.pop(1))
    print(json.dumps(llama_steps.decode_batches(lib, lib.llama_context_default_params(), *llama_steps.parse_arguments())))


if __name__ == "__main__":
    main()
