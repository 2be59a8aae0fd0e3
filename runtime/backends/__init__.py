"""What runs a subgraph: ONNX Runtime on CPU, QNN on HTP, kernels in C."""
