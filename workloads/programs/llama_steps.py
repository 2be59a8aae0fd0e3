"""Drives a llama.cpp through its C API, since 2024: llama_steps.py MODEL BATCHES NEW_TOKENS [PAUSE].

The library is the file LLAMA_LIBRARY, by default that inside the package xllamacpp.

BATCHES are the sizes of the first steps (20,1,7; a single number: the prompt's), NEW_TOKENS steps of one token follow.
Several lists (20,1/7,12) are for several contexts of the model, which alternate steps.
Environment variables: LLAMA_THREADS, default 2; LLAMA_PART, maximum number of tokens per graph, default 512;
LLAMA_CALL, the names in CALLS for the first steps, the last one for all others, default decode;
LLAMA_THREADS_OF: contexts, each on a separate thread, which begin their steps together (equal numbers of steps); or steps, each
on a separate thread;
LLAMA_LIBRARY, a libllama.so with its backends beside it; LLAMA_GPU_LAYERS, number of layers on another device, default 0;
LLAMA_CLOCK, a file for the times of the first context's steps as JSON: [before the call, after it, when its results are there];
LLAMA_LEARNT, a folder: halfway it waits until a file is in it, where a tracer keeps what it has learnt from the first half.

Pauses for PAUSE seconds after every step: otherwise a tiny model ends before a tracer has learnt from its first graphs.
Prints the generated token ids as JSON. Parameter structs are passed by value and, except for the first field, not interpreted,
so that they are opaque blocks larger than in any version; the ABI passes such structs in memory and the callee reads the
part it knows.
"""

import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Barrier, Thread

THREADS = int(os.environ.get("LLAMA_THREADS", "2"))
CONTEXT, BATCH, PART = 512, 2048, 512  # llama.cpp's defaults, which identify the head of its parameters
LARGER_CONTEXT = 2048
RENAMED = {
    "llama_model_load_from_file": "llama_load_model_from_file",
    "llama_init_from_model": "llama_new_context_with_model",
}
CALLS = {"decode": None, "encode": None, "process": 1, "process_encode": 0}
"""Ways to run a step → the operation number that llama_process takes."""


class Opaque(ctypes.Structure):
    """A parameter struct of unknown size."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class Batch(ctypes.Structure):
    """struct llama_batch. Until 2024 it had the first position instead of `pos`, and more fields."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n", "ids", "logits")),
        ("position", ctypes.c_int32),
        ("rest", ctypes.c_int32 * 15),
    ]


def load_library() -> ctypes.CDLL:
    if path := os.environ.get("LLAMA_LIBRARY"):
        lib = with_new_names(ctypes.CDLL(path))
        if hasattr(lib, "ggml_backend_load_all_from_path"):
            lib.ggml_backend_load_all_from_path(os.path.dirname(path).encode())
        return declare_functions(lib)
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.submodule_search_locations
    return declare_functions(ctypes.CDLL(str(next(Path(package.submodule_search_locations[0]).glob("*.so")))))


def with_new_names(lib: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with its functions also under their names since 2025."""
    for new, old in RENAMED.items():
        if not hasattr(lib, new):
            setattr(lib, new, getattr(lib, old))
    return lib


def declare_functions(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = Opaque
    lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Opaque]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Opaque]
    lib.llama_batch_get_one.restype = Batch
    # builds of 2024 have two more arguments: position and sequence
    lib.llama_batch_get_one.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    lib.llama_encode.argtypes = [ctypes.c_void_p, Batch]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    return lib


def model_params(lib: ctypes.CDLL) -> Opaque:
    """llama.cpp's default parameters, with the number of layers on another device, the field after two pointers (-1: all)."""
    params = lib.llama_model_default_params()
    layers = ctypes.c_int32.from_buffer(params, 2 * ctypes.sizeof(ctypes.c_void_p))
    if "LLAMA_GPU_LAYERS" in os.environ:
        assert layers.value in (-1, 999), f"llama_model_params has changed: {layers.value}"
        layers.value = int(os.environ["LLAMA_GPU_LAYERS"])
    return params


def fed_by_parts(lib: ctypes.CDLL, context: ctypes.c_void_p, tokens: list[int], kind: int, position: int) -> int:
    """One llama_process call for tokens after `position` others."""
    lib.llama_batch_ext_init.restype = ctypes.c_void_p
    batch = ctypes.c_void_p(lib.llama_batch_ext_init(context))
    for place, token in enumerate(tokens, position):
        row = lib.llama_batch_ext_add_token(batch, 0, token)
        lib.llama_batch_ext_set_pos(batch, row, ctypes.byref(ctypes.c_int32(place)))
    lib.llama_batch_ext_set_output_logits(batch, len(tokens) - 1, True)
    status = lib.llama_process(context, kind, batch)
    lib.llama_batch_ext_free(batch)
    return status


class Context:
    """A context and its generated tokens, one greedy token after each batch."""

    def __init__(self, lib: ctypes.CDLL, model: int, params: Opaque):
        self.lib, self.context = lib, ctypes.c_void_p(lib.llama_init_from_model(model, params))
        lib.llama_set_n_threads(self.context, THREADS, THREADS)
        self.made: list[int] = []
        self.clock: list[tuple[int, int, int]] = []
        self.fed = 0

    def step(self, size: int) -> None:
        """Process `size` tokens: the last generated one and a fixed text."""
        lib, calls = self.lib, os.environ.get("LLAMA_CALL", "decode").split(",")
        call = calls[min(len(self.made), len(calls) - 1)]
        tokens = [*self.made[-1:], *((7 * i) % 500 for i in range(size - len(self.made[-1:])))]
        array = (ctypes.c_int32 * size)(*tokens)
        begin = time.monotonic_ns()
        if (parts := CALLS[call]) is not None:
            status = fed_by_parts(lib, self.context, tokens, parts, self.fed)
        else:
            status = getattr(lib, f"llama_{call}")(self.context, lib.llama_batch_get_one(array, size, self.fed, 0))
        assert status == 0, f"{call}: {status}"
        returned = time.monotonic_ns()
        encodes = "encode" in call
        self.fed += 0 if encodes else size
        results = None if encodes else lib.llama_get_logits_ith(self.context, -1)
        self.clock.append((begin, returned, time.monotonic_ns()))
        logits = results[:512] if results else []
        self.made.append(logits.index(max(logits)) if logits else 1)

    def take(self, batches: list[int], pause: float, begin: Barrier) -> None:
        """Run all steps in order."""
        for size in batches:
            begin.wait()
            self.step(size)
            time.sleep(pause)


def wait_for_file(folder: Path, pause: float) -> None:
    """Wait until a file is in the folder, at most a minute, and ten pauses more."""
    end = time.monotonic() + 60
    while not any(folder.glob("*")) and time.monotonic() < end:
        time.sleep(pause)
    time.sleep(10 * pause)


def run_together(calls: list[Callable[[], None]]) -> None:
    """Run each call on a separate thread."""
    threads = [Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def decode_batches(lib: ctypes.CDLL, params: Opaque, path: str, batches: list[list[int]], pause: float) -> list[int]:
    """Generated tokens, context by context; `batches` has a list for each context."""
    head = ctypes.cast(params.bytes, ctypes.POINTER(ctypes.c_uint32))
    at = next((at for at in range(2) if head[at : at + 3] == [CONTEXT, BATCH, PART]), None)  # until 2024 after a seed
    assert at is not None, f"llama_context_params has changed: {head[:4]}"
    head[at], head[at + 2] = LARGER_CONTEXT, int(os.environ.get("LLAMA_PART", PART))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), model_params(lib))
    contexts = [Context(lib, model, params) for _ in batches]
    threads_of = os.environ.get("LLAMA_THREADS_OF")
    if threads_of == "contexts":
        begin = Barrier(len(batches))
        run_together([partial(context.take, mine, pause, begin) for context, mine in zip(contexts, batches, strict=True)])
    else:
        rounds = list(zip_longest(*batches))
        for number, sizes in enumerate(rounds):
            if number == len(rounds) // 2 and (learnt := os.environ.get("LLAMA_LEARNT")):
                wait_for_file(Path(learnt), pause)
            for context, size in zip(contexts, sizes, strict=True):
                step = partial(context.take, [size] if size else [], pause, Barrier(1))
                run_together([step]) if threads_of == "steps" else step()
    if clock := os.environ.get("LLAMA_CLOCK"):
        Path(clock).write_text(json.dumps(contexts[0].clock))
    return [token for context in contexts for token in context.made]


def parse_arguments() -> tuple[str, list[list[int]], float]:
    """(model, tokens of each context's steps, pause) of the command line."""
    batches = [[int(size) for size in mine.split(",")] + [1] * int(sys.argv[3]) for mine in sys.argv[2].split("/")]
    return sys.argv[1], batches, float((*sys.argv[4:], "0")[0])


def main() -> None:
    lib = load_library()
    print(json.dumps(decode_batches(lib, lib.llama_context_default_params(), *parse_arguments())))


if __name__ == "__main__":
    main()
