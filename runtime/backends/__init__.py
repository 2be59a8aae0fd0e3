"""Backends that run subgraphs: ONNX Runtime on the CPU, QNN on HTP, kernels in C."""
