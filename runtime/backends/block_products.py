"""Products with quantized weights on the CPU: a graph's MatMulNBits become BlockMatMul (kernels/).

BlockMatMul computes the same bits with every instruction set, needs no repacked copy of the weights, and is faster. It also
computes the activation of a gated MLP on its way: for one token, three nodes more take longer than computing it.
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
    made_by = {output: node for node in graph.node for output in node.output}
    nodes = [new for node in graph.node for new in (_block_product(node, made_by) if node.op_type == QUANTIZED else [node])]
    nodes = _used(nodes, {output.name for output in graph.output})
    del graph.node[:]
    graph.node.extend(nodes)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    instruction_set()
    options.register_custom_ops_library(str(LIBRARY))
    return model


def _block_product(node: onnx.NodeProto, made_by: dict[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
    out, bias = node.output[0], node.input[BIAS] if len(node.input) > BIAS else ""
    product, halves = f"{out}_product" if bias else out, _gate_and_up(node.input[0], made_by)
    inputs = [halves or node.input[0], *node.input[1:4]]
    settings = {"domain": DOMAIN, "bits": bits, "gated": int(bool(halves))}
    nodes = [onnx.helper.make_node("BlockMatMul", inputs, [product], name=product, **settings)]
    return [*nodes, onnx.helper.make_node("Add", [product, bias], [out], name=out)] if bias else nodes


def _gate_and_up(value: str, made_by: dict[str, onnx.NodeProto]) -> str:
    """The value whose halves are gate and up if `value` is (gate * sigmoid(gate)) * up; else empty."""

    def inputs(name: str, kind: str) -> list[str]:
        node = made_by.get(name)
        return list(node.input) if node and node.op_type == kind else ["", ""]

    activated, up = inputs(value, "Mul")
    gate, opened = inputs(activated, "Mul")
    split = made_by.get(gate)
    if inputs(opened, "Sigmoid")[0] != gate or not split or split.op_type != "Split" or list(split.output) != [gate, up]:
        return ""
    return str(split.input[0])


def _used(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes, in order, of which these outputs are made."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed |= _read_by(node)
    return kept[::-1]


def _read_by(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads; a loop's body reads those of the graph around it, too."""
    bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    inner = [name for body in bodies for part in body.node for name in _read_by(part)]
    return {*node.input, *inner, *(output.name for body in bodies for output in body.output)}
