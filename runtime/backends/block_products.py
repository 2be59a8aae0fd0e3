"""Products with quantized weights on the CPU: a graph's MatMulNBits become BlockMatMul (kernels/).

BlockMatMul computes the same bits with every instruction set, needs no repacked copy of the weights, and is faster.
"""

import onnx
import onnxruntime as ort

from runtime.backends.instruction_sets import LIBRARY, instruction_set

QUANTIZED = "MatMulNBits"
BIAS = 5
DOMAIN = "moescope"


def with_block_products(model: onnx.ModelProto, options: ort.SessionOptions) -> onnx.ModelProto:
    """Change the model in place and return it; its session's options get the operator if needed. A bias becomes a node."""
    graph = model.graph
    if not any(node.op_type == QUANTIZED for node in graph.node):
        return model
    nodes = [new for node in graph.node for new in (_block_product(node) if node.op_type == QUANTIZED else [node])]
    del graph.node[:]
    graph.node.extend(nodes)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    instruction_set()
    options.register_custom_ops_library(str(LIBRARY))
    return model


def _block_product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
    out, bias = node.output[0], node.input[BIAS] if len(node.input) > BIAS else ""
    product = f"{out}_product" if bias else out
    nodes = [onnx.helper.make_node("BlockMatMul", node.input[:4], [product], name=product, domain=DOMAIN, bits=bits)]
    return [*nodes, onnx.helper.make_node("Add", [product, bias], [out], name=out)] if bias else nodes
