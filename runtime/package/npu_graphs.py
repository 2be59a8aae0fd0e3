"""Subgraphs adapted to the NPU: with 4- and 8-bit weights QNN multiplies only inputs [1, T, K], without a bias and with
constant float32 scales.
"""

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPERATOR = "MatMulNBits"
BIAS = 5
AXIS = "npu_axis"


def for_npu(graph: bytes) -> bytes:
    """The graph, which has its weights inside, with a leading axis for products with quantized weights, separate nodes for their
    biases, and widened scales.
    """
    model = onnx.load_model_from_string(graph)
    if not any(node.op_type == OPERATOR for node in model.graph.node):
        return graph
    scales = {node.input[2] for node in model.graph.node if node.op_type == OPERATOR}
    stored = {node.input[0]: node.output[0] for node in model.graph.node if scales.intersection(node.output)}
    for tensor in model.graph.initializer:
        if tensor.name in stored:
            wide = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(wide, stored[tensor.name]))
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if not scales.intersection(node.output):
            nodes += _widened_product(node) if node.op_type == OPERATOR else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), AXIS))
    return bytes(model.SerializeToString())


def _widened_product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    rows, out, bias = node.input[0], node.output[0], node.input[BIAS] if len(node.input) > BIAS else ""
    product = onnx.NodeProto()
    product.CopyFrom(node)
    del product.input[:], product.output[:], product.attribute[:]
    product.input.extend([f"{out}_rows", *filter(None, node.input[1:4])])
    product.name = f"{out}_wide"
    product.output.append(product.name)
    product.attribute.extend(attribute for attribute in node.attribute if attribute.name != "accuracy_level")
    flat = f"{out}_flat" if bias else out
    nodes = [
        helper.make_node("Unsqueeze", [rows, AXIS], [f"{out}_rows"], name=f"{out}_rows"),
        product,
        helper.make_node("Squeeze", [f"{out}_wide", AXIS], [flat], name=flat),
    ]
    return [*nodes, helper.make_node("Add", [flat, bias], [out], name=out)] if bias else nodes
