"""Drives the llama.cpp inside the package xllamacpp through its C API: llama_steps.py MODEL BATCHES NEW_TOKENS [PAUSE].

BATCHES are the sizes of the first steps (20,1,7; the prompt's alone where it is one number), NEW_TOKENS steps of one follow.
Environment variables: LLAMA_THREADS, otherwise 2; LLAMA_PART, how many tokens a graph takes at most, otherwise 512.

Rests for PAUSE seconds behind every step: a tiny model is otherwise done before a tracer has learnt from its first graphs.
Prints the generated token ids as JSON. Parameter structs are passed by value and, but for their first field, never looked into,
so they are opaque blocks that are larger than any version's; the ABI passes such structs in memory and the callee reads the
part it knows.
"""

import ctypes
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

THREADS = int(os.environ.get("LLAMA_THREADS", "2"))
CONTEXT, BATCH, PART = 512, 2048, 512  # llama.cpp's defaults, by which the head of its parameters is recognised
LARGER_CONTEXT = 2048


class Opaque(ctypes.Structure):
    """A parameter struct of unknown size."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class Batch(ctypes.Structure):
    """struct llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n", "ids", "logits")),
    ]


def library() -> ctypes.CDLL:
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.submodule_search_locations
    return declared(ctypes.CDLL(str(next(Path(package.submodule_search_locations[0]).glob("*.so")))))


def declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = Opaque
    lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Opaque]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Opaque]
    lib.llama_batch_get_one.restype = Batch
    lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    return lib


def decode(lib: ctypes.CDLL, params: Opaque, path: str, batches: list[int], pause: float) -> list[int]:
    """Tokens that the model makes greedily, one behind each batch: a fixed text fills up what the last one made leaves free."""
    head = ctypes.cast(params.bytes, ctypes.POINTER(ctypes.c_uint32))
    assert head[:3] == [CONTEXT, BATCH, PART], f"llama_context_params has changed: {head[:3]}"
    head[0], head[2] = LARGER_CONTEXT, int(os.environ.get("LLAMA_PART", PART))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    context = ctypes.c_void_p(lib.llama_init_from_model(model, params))
    lib.llama_set_n_threads(context, THREADS, THREADS)
    made: list[int] = []
    for size in batches:
        tokens = [*made[-1:], *((7 * i) % 500 for i in range(size - len(made[-1:])))]
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) == 0
        logits = lib.llama_get_logits_ith(context, -1)[:512]
        made.append(logits.index(max(logits)))
        time.sleep(pause)
    return made


def arguments() -> tuple[str, list[int], float]:
    """(model, tokens of each step, pause) of the command line."""
    batches = [int(size) for size in sys.argv[2].split(",")] + [1] * int(sys.argv[3])
    return sys.argv[1], batches, float((*sys.argv[4:], "0")[0])


def main() -> None:
    lib = library()
    print(json.dumps(decode(lib, lib.llama_context_default_params(), *arguments())))


if __name__ == "__main__":
    main()
