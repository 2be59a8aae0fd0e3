"""Decodes with a llama.cpp until standard input closes: decode.py LIBRARY MODEL LOG [THREADS [mapped]].

LIBRARY exports llama.h's functions. LOG gets the begin and end of every decoded token, CLOCK_MONOTONIC ns, as
pairs of 64-bit numbers. Parameter structs are opaque, as in workloads/programs/llama_steps.py.

`mapped`: weights remain in the mapped file. By default llama.cpp copies them into its own layout, which does not fit into a limit
below their size.
"""

import ctypes
import select
import struct
import sys
import time

from workloads.programs.llama_steps import Batch, Opaque

CONTEXT = 256  # steps after which the key-value cache is emptied, to keep the cost of decoding nearly constant
FLUSH_NS = 500_000_000
FLAGS = slice(72, 80)  # of llama_model_params: all false but use_extra_bufts, which allows the copy
COPIES_ALLOWED = [0, 0, 1, 0, 0, 0, 0, 0]


def model_params(lib: ctypes.CDLL, mapped: bool) -> Opaque:
    """The default parameters, without the copy if `mapped`."""
    params: Opaque = lib.llama_model_default_params()
    if mapped:
        assert params.bytes[FLAGS] == COPIES_ALLOWED, f"llama_model_params has changed: {params.bytes[FLAGS]}"
        params.bytes[FLAGS] = [0] * len(COPIES_ALLOWED)
    return params


def main() -> None:
    library, model_path, log = sys.argv[1:4]
    threads = int((*sys.argv[4:], "2")[0])
    lib = ctypes.CDLL(library)
    lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = Opaque
    lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = lib.llama_get_memory.restype = ctypes.c_void_p
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Opaque]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Opaque]
    lib.llama_get_memory.argtypes = [ctypes.c_void_p]
    lib.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_batch_get_one.restype, lib.llama_decode.argtypes = Batch, [ctypes.c_void_p, Batch]
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(model_path.encode(), model_params(lib, "mapped" in sys.argv[5:]))
    context = lib.llama_init_from_model(model, lib.llama_context_default_params())
    lib.llama_set_n_threads(ctypes.c_void_p(context), threads, threads)
    memory = lib.llama_get_memory(context)
    token, waiting = (ctypes.c_int32 * 1)(), select.poll()
    waiting.register(sys.stdin, select.POLLHUP | select.POLLIN)
    with open(log, "wb") as file:
        step, flushed = 0, 0
        while step % 8 or not waiting.poll(0):
            if step % CONTEXT == 0:
                lib.llama_memory_clear(memory, True)
            token[0] = step % 101
            begin = time.monotonic_ns()
            if lib.llama_decode(context, lib.llama_batch_get_one(token, 1)):
                sys.exit("llama_decode failed")
            end = time.monotonic_ns()
            file.write(struct.pack("<QQ", begin, end))
            if end - flushed > FLUSH_NS:
                file.flush()
                flushed = end
            step += 1


if __name__ == "__main__":
    main()
