"""Executes one QNN graph through ONNX Runtime until standard input closes: execute_qnn.py FOLDER LEVEL ROWS.

It writes begin and end of every run (CLOCK_MONOTONIC, ns) to FOLDER/runs.bin and the CPU time of its thread in each to
FOLDER/cpu.bin.
"""

import select
import struct
import sys
import time

import numpy as np
import onnxruntime as ort
import onnxruntime_qnn

from workloads.programs.plain_qnn import model_bytes

RUNS_AT_ONCE = 4


def main() -> None:
    folder, level, rows = *sys.argv[1:3], int(sys.argv[3])
    ort.set_default_logger_severity(3)
    ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"][:1]
    options, rng = ort.SessionOptions(), np.random.default_rng(0)
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    profile = {"profiling_level": level, "profiling_file_path": f"{folder}/profile.csv"}
    options.add_provider_for_devices(devices, {"backend_type": "htp", "soc_model": "57", **profile})
    session = ort.InferenceSession(model_bytes(3, rng, rows), options)
    session.disable_fallback()
    given = {"x": rng.standard_normal((rows, 64)).astype(np.float32)}
    waiting = select.poll()
    waiting.register(sys.stdin, select.POLLHUP | select.POLLIN)
    with open(f"{folder}/runs.bin", "wb") as runs, open(f"{folder}/cpu.bin", "wb") as used:
        while not waiting.poll(0):
            for _ in range(RUNS_AT_ONCE):
                cpu, begin = time.thread_time_ns(), time.monotonic_ns()
                session.run(None, given)
                runs.write(struct.pack("<QQ", begin, time.monotonic_ns()))
                used.write(struct.pack("<Q", time.thread_time_ns() - cpu))
            used.flush()
            runs.flush()


if __name__ == "__main__":
    main()
