"""Drives ONNX Runtime through its C API, like a C program: ort_c.py LIBRARY MODEL RUNS [--child] [--late SECONDS].

Prints session handles and run counts as JSON, in order. The slots are those of the public onnxruntime_c_api.h.
"""

import ctypes
import json
import os
import sys
import threading
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

VERSION, FLOAT, CPU_ARENA, DEFAULT_MEMORY = 16, 1, 1, 0
SLOTS = {
    "CreateEnv": 3,
    "CreateSession": 7,
    "CreateSessionFromArray": 8,
    "Run": 9,
    "CreateSessionOptions": 10,
    "CreateTensorWithDataAsOrtValue": 49,
    "CreateCpuMemoryInfo": 69,
    "ReleaseStatus": 93,
    "ReleaseSession": 95,
    "ReleaseValue": 96,
    "SetIntraOpNumThreads": 24,
    "RunAsync": 260,
}


class Api:
    """The table of functions."""

    def __init__(self, path: str):
        library = ctypes.CDLL(path)
        library.OrtGetApiBase.restype = POINTER(c_void_p)
        get = ctypes.CFUNCTYPE(c_void_p, c_uint32)(library.OrtGetApiBase()[0])
        self.table = ctypes.cast(get(VERSION), POINTER(c_void_p))

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function by name; returns the error code, 0 for success."""
        status = ctypes.CFUNCTYPE(c_void_p)(self.table[SLOTS[name]])(*arguments)
        if name.startswith("Release") or not status:
            return 0
        code = ctypes.cast(status, POINTER(c_int))[0]
        self.call("ReleaseStatus", c_void_p(status))
        return code

    def make(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function that stores a new object through its last argument; returns the object."""
        made = c_void_p()
        code = self.call(name, *arguments, byref(made))
        assert code == 0, (name, code)
        return made


def run_session(api: Api, session: c_void_p, value: c_void_p, input_name: bytes = b"x") -> int:
    """One run; returns the error code."""
    out = c_void_p()
    names, outs = (c_char_p * 1)(input_name), (c_char_p * 1)(b"y")
    code = api.call("Run", session, None, names, byref(value), c_size_t(1), outs, c_size_t(1), byref(out))
    if out:
        api.call("ReleaseValue", out)
    return code


CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_void_p)


def run_async(api: Api, session: c_void_p, value: c_void_p) -> int:
    """One run on another thread, with a wait for it; returns the error code of its submission."""
    out, finished = c_void_p(), threading.Event()
    names, outs = (c_char_p * 1)(b"x"), (c_char_p * 1)(b"y")
    told = CALLBACK(lambda *_: finished.set())
    given = (session, None, names, byref(value), c_size_t(1), outs, c_size_t(1), byref(out), told, None)
    code = api.call("RunAsync", *given)
    assert code or finished.wait(20)
    return code


def run_sessions(library: str, model: str, runs: int) -> list[list[Any]]:
    """Two sessions, one from a file and one from memory; runs alternate, 1 to 2."""
    api = Api(library)
    done: list[list[Any]] = []
    env = api.make("CreateEnv", c_int(4), c_char_p(b"test"))
    options = api.make("CreateSessionOptions")
    assert api.call("SetIntraOpNumThreads", options, c_int(2)) == 0  # asynchronous runs need a pool
    data = Path(model).read_bytes()
    first = api.make("CreateSession", env, c_char_p(model.encode()), options)
    second = api.make("CreateSessionFromArray", env, c_char_p(data), c_size_t(len(data)), options)
    done += [["create_session", first.value, 0], ["create_session", second.value, 0]]
    memory = api.make("CreateCpuMemoryInfo", c_int(CPU_ARENA), c_int(DEFAULT_MEMORY))
    numbers, shape = (ctypes.c_float * 4)(1, 2, 3, 4), (c_int64 * 2)(1, 4)
    place = (memory, byref(numbers), c_size_t(16), byref(shape), c_size_t(2), c_int(FLOAT))
    value = api.make("CreateTensorWithDataAsOrtValue", *place)
    for i in range(runs):
        session = second if i % 3 else first
        done.append(["run", session.value, run_session(api, session, value)])
    done.append(["run", first.value, run_session(api, first, value, b"nothing")])
    if VERSION >= 16:
        done.append(["run_async", first.value, run_async(api, first, value)])
    api.call("ReleaseSession", first)
    done.append(["release_session", first.value, 0])
    return done


def main() -> None:
    library, model, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if "--late" in sys.argv:
        time.sleep(0.5)
    child = os.fork() if "--child" in sys.argv else -1
    done = run_sessions(library, model, runs)
    if child > 0:
        os.waitpid(child, 0)
    print(json.dumps({"pid": os.getpid(), "bytes": os.path.getsize(model), "done": done}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
