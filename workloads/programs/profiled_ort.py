"""A model of LAYERS MatMuls and Relus run by onnxruntime with profiling; prints the profile's path and the ns of each run.

Arguments: cpu or qnn (the HTP or its emulator); prefix of the profile's path; number of runs.
"""

import json
import sys
import time

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

LAYERS, ROWS, WIDTH = 3, 4, 64


def model_bytes() -> bytes:
    nodes, weights, at = [], [], "x"
    for i in range(LAYERS):
        values = np.random.default_rng(i).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [at, f"w{i}"], [f"m{i}"], name=f"/model/layers.{i}/mlp/MatMul"))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"], name=f"/model/layers.{i}/mlp/Relu"))
        at = f"r{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, WIDTH]) for name in ("x", at)]
    graph = helper.make_graph(nodes, "profiled", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def main() -> None:
    provider, prefix, runs = sys.argv[1:]
    ort.set_default_logger_severity(3)
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix, options.intra_op_num_threads = True, prefix, 2
    if provider == "qnn":
        import onnxruntime_qnn

        ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == "QNNExecutionProvider"][:1]
        options.add_provider_for_devices(devices, {"backend_type": "htp", "soc_model": "57"})
    session = ort.InferenceSession(model_bytes(), options)
    took = []
    for _ in range(int(runs)):
        began = time.monotonic_ns()
        session.run(None, {"x": np.ones((ROWS, WIDTH), np.float32)})
        took.append(time.monotonic_ns() - began)
    print(json.dumps({"profile": session.end_profiling(), "took": took}))


if __name__ == "__main__":
    main()
