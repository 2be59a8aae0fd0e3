"""Products with quantized weights on the CPU: a graph's MatMulNBits become BlockMatMul (kernels/).

BlockMatMul computes the same bits with every instruction set, needs no repacked copy of the weights, and is faster. It also
does the work of small nodes around it, which for one token cost more than their arithmetic: the activation of a gated MLP
before it, bias, residual and a change of rank after it.
"""

from collections import Counter

import onnx
import onnxruntime as ort

from runtime.backends.instruction_sets import LIBRARY, instruction_set

QUANTIZED, PRODUCT = "MatMulNBits", "BlockMatMul"
BIAS = 5
RESIDUAL = 5
"""Inputs: the bias of MatMulNBits, the residual of BlockMatMul."""
DOMAIN = "moescope"


def with_block_products(model: onnx.ModelProto, options: ort.SessionOptions) -> onnx.ModelProto:
    """Change the model in place and return it; its session's options get the operator if needed."""
    graph = model.graph
    if not any(node.op_type == QUANTIZED for node in graph.node):
        return model
    made_by = {output: node for node in graph.node for output in node.output}
    nodes = [_block_product(node, made_by) if node.op_type == QUANTIZED else node for node in graph.node]
    nodes = _without_absorbed(nodes, graph)
    nodes = _needed_nodes(nodes, {output.name for output in graph.output})
    del graph.node[:]
    graph.node.extend(nodes)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    instruction_set()
    options.register_custom_ops_library(str(LIBRARY))
    return model


def product_weights(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """The stored weights that products read in place."""
    read = {name for node in graph.node if node.op_type == PRODUCT for name in node.input}
    return [tensor for tensor in graph.initializer if tensor.name in read and tensor.data_location == tensor.EXTERNAL]


def _block_product(node: onnx.NodeProto, made_by: dict[str, onnx.NodeProto]) -> onnx.NodeProto:
    bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
    halves = _gate_and_up(node.input[0], made_by)
    bias = node.input[BIAS] if len(node.input) > BIAS else ""
    scales, zeros = made_by[node.input[2]].input[0], node.input[3] if len(node.input) > 3 else ""
    inputs = [halves or node.input[0], node.input[1], scales, zeros, bias, ""]
    settings = {"domain": DOMAIN, "bits": bits, "gated": int(bool(halves)), "unsqueezed": 0}
    return onnx.helper.make_node(PRODUCT, inputs, [node.output[0]], name=node.output[0], **settings)


def _without_absorbed(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes without those whose work a product does: it takes the place of the node after it, where all inputs are known."""
    read = [name for node in nodes for name in [*node.input, *(_read_by(node) - {*node.input})]]
    uses = Counter([*read, *(output.name for output in graph.output)])
    constants = {tensor.name: tensor for tensor in graph.initializer}
    alone = {node.output[0]: node for node in nodes if node.op_type == PRODUCT and uses[node.output[0]] == 1}
    kept: list[onnx.NodeProto] = []
    for node in nodes:
        product = next((alone[name] for name in node.input if name in alone), None)
        if product and node.op_type == "Add" and not constants.keys() & set(node.input):
            product.input[RESIDUAL] = next(name for name in node.input if name != product.output[0])
        elif product and node.op_type == "Unsqueeze" and _is_first_axis(node, constants):
            next(attribute for attribute in product.attribute if attribute.name == "unsqueezed").i = 1
        else:
            kept.append(node)
            continue
        del alone[product.output[0]]
        kept.remove(product)
        kept.append(product)
        product.output[0] = node.output[0]
    made_by = {output: node for node in kept for output in node.output}
    for product in kept:
        before = made_by.get(product.input[0]) if product.op_type == PRODUCT and product.input[RESIDUAL] else None
        if before and before.op_type == "Squeeze" and _is_first_axis(before, constants):
            product.input[0] = before.input[0]  # the result has the residual's rank
    return kept


def _is_first_axis(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> bool:
    """Whether the node adds or removes the first axis."""
    axes = constants.get(node.input[1])
    return axes is not None and onnx.numpy_helper.to_array(axes).tolist() == [0]


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


def _needed_nodes(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
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
