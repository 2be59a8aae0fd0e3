"""Tensors of a checkpoint, quantized, as ONNX graphs."""
