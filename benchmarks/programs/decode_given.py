"""Feeds given tokens to a llama.cpp, its weights mapped: decode_given.py LIBRARY MODEL TOKENS LOG PROMPT THREADS.

LIBRARY is a file, or an instruction set of benchmarks/lib/llama_sets.py. TOKENS is a file of 32-bit numbers. The first PROMPT of
them are one step and the others a step each, which is written to LOG (benchmarks.lib.steps_log).
"""

import ctypes
import sys
import time
from array import array
from pathlib import Path

from benchmarks.lib import llama_sets
from benchmarks.lib.steps_log import StepLog
from benchmarks.programs.decode import model_params
from workloads.programs.llama_steps import CONTEXT, declare_functions

ROOM = 256  # llama.cpp rounds contexts up to multiples of this


def make_context(lib: ctypes.CDLL, path: str, threads: int, tokens: int) -> ctypes.c_void_p:
    """A context with room for `tokens` tokens."""
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), model_params(lib, mapped=True))
    params = lib.llama_context_default_params()
    head = ctypes.cast(params.bytes, ctypes.POINTER(ctypes.c_uint32))
    assert head[0] == CONTEXT, f"llama_context_params has changed: {head[0]}"
    head[0] = -(-tokens // ROOM) * ROOM
    context = ctypes.c_void_p(lib.llama_init_from_model(model, params))
    lib.llama_set_n_threads(context, threads, threads)
    return context


def main() -> None:
    library, model, tokens, log, prompt, threads = sys.argv[1:7]
    ids, first = array("i", Path(tokens).read_bytes()), int(prompt)
    lib = llama_sets.load_library(library) if library in llama_sets.PEERS else declare_functions(ctypes.CDLL(library))
    context, steps = make_context(lib, model, int(threads), len(ids)), StepLog(Path(log))
    for part in (ids[:first], *(ids[i : i + 1] for i in range(first, len(ids)))):
        begin = time.monotonic_ns()
        given = (ctypes.c_int32 * len(part))(*part)
        if lib.llama_decode(context, lib.llama_batch_get_one(given, len(part))):
            sys.exit("llama_decode failed")
        if len(part) == 1:
            steps.add(begin)


if __name__ == "__main__":
    main()
