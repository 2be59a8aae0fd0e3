"""Runs a model through ONNX Runtime's Python package in each way it offers: ort_python.py MODEL RUNS.

Prints a line of JSON: for each run its way, thread, begin and end (ns) as the caller saw them, and the error code.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort

CODES = {"Fail": 1, "InvalidArgument": 2}
"""Error code of each exception that the package makes of one."""
X = np.arange(4, dtype=np.float32).reshape(1, 4)
ran: list[dict[str, Any]] = []


def logged(way: str, call: Callable[[], Any]) -> None:
    """Make a run and keep what the caller saw of it."""
    begin, status = time.monotonic_ns(), 0
    try:
        call()
    except Exception as error:
        status = CODES[type(error).__name__]
    row = {"way": way, "tid": threading.get_native_id(), "begin": begin, "end": time.monotonic_ns(), "status": status}
    ran.append(row)


def wait_for_async(session: ort.InferenceSession) -> None:
    """A run on a thread of the runtime's pool, until it has called back."""
    done = threading.Event()
    session.run_async(["y"], {"x": X}, lambda outputs, waiter, error: waiter.set(), done)
    done.wait()


def run_bound(session: ort.InferenceSession) -> None:
    """A run with bound inputs and outputs."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    session.run_with_iobinding(binding)


def main(model: str, runs: int) -> None:
    """All ways in turn, then two threads at once, each with a session of its own."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 2
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for _ in range(runs):
        logged("run", lambda: session.run(None, {"x": X}))
        logged("run", lambda: session.run(None, {"x": X[:, :3]}))  # a wrong shape
        logged("binding", lambda: run_bound(session))
        logged("async", lambda: wait_for_async(session))

    def another() -> None:
        own = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(runs):
            logged("thread", lambda: own.run(None, {"x": X}))

    threads = [threading.Thread(target=another) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"version": ort.__version__, "ran": ran}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
