"""A plain onnxruntime-qnn program without knowledge of a tracer: two sessions, five runs each.

Arguments: folder for the CSVs; number of runs instead of five; a level instead of `detailed`; rows of the input.
"""

import sys
import time

import numpy as np
import onnxruntime as ort
import onnxruntime_qnn
from onnx import TensorProto, helper, numpy_helper


def model_bytes(layers: int, rng: np.random.Generator, rows: int = 8) -> bytes:
    weights = [numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32), f"w{i}") for i in range(layers)]
    nodes, at = [], "x"
    for i in range(layers):
        nodes.append(helper.make_node("MatMul", [at, f"w{i}"], [f"m{i}"], name=f"matmul{i}"))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"], name=f"relu{i}"))
        at = f"r{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 64]) for name in ("x", at)]
    graph = helper.make_graph(nodes, "plain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def main() -> None:
    runs, level, rows = (
        given or usual for given, usual in zip([*sys.argv[2:], "", "", ""], ("5", "detailed", "8"), strict=False)
    )
    ort.set_default_logger_severity(3)
    ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"][:1]
    rng = np.random.default_rng(0)
    for index in range(2):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        profile = {"profiling_level": level, "profiling_file_path": f"{sys.argv[1]}/profile{index}.csv"}
        options.add_provider_for_devices(devices, {"backend_type": "htp", "soc_model": "57", **profile})
        session = ort.InferenceSession(model_bytes(2 + index, rng, int(rows)), options)
        session.disable_fallback()
        began = time.monotonic_ns()
        for _ in range(int(runs)):
            session.run(None, {"x": rng.standard_normal((int(rows), 64)).astype(np.float32)})
        print(f"us per run: {(time.monotonic_ns() - began) / 1e3 / int(runs):.1f}")


if __name__ == "__main__":
    main()
