"""Runs a model through ONNX Runtime's QNN provider, then drives QNN's C API itself, then runs a model again: two readers.

Arguments: folder for the provider's CSVs; libQnnHtp.so. Prints the data of its own calls, like qnn_c.py.
"""

import json
import sys
from typing import Any

import numpy as np
import onnxruntime as ort
import onnxruntime_qnn
import plain_qnn
import qnn_c

OPTIONS = {"level": 2, "plain": 0, "nodes": 3, "binary": 0, "executes": 3, "rounds": 1, "every": 0}


def main() -> None:
    ort.set_default_logger_severity(3)
    ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"][:1]
    rng = np.random.default_rng(0)

    def through_onnx_runtime(name: str) -> None:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        profile = {"profiling_level": "detailed", "profiling_file_path": f"{sys.argv[1]}/{name}.csv"}
        options.add_provider_for_devices(devices, {"backend_type": "htp", "soc_model": "57", **profile})
        session = ort.InferenceSession(plain_qnn.model_bytes(2, rng), options)
        session.disable_fallback()
        for _ in range(3):
            session.run(None, {"x": rng.standard_normal((8, 64)).astype(np.float32)})

    through_onnx_runtime("profile0")
    qnn = qnn_c.Qnn(sys.argv[2])
    backend = qnn.made("backendCreate", None, None)
    said: list[Any] = []
    qnn_c.work(qnn, backend, qnn.made("deviceCreate", None, None), 0, OPTIONS, said)
    through_onnx_runtime("profile1")
    print(json.dumps({"sessions": said}))


if __name__ == "__main__":
    main()
