"""Chains of operators as ONNX models: the test cases of fusion detection and the kernels that are measured."""

from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET, IR = 17, 9
IN_A_ROW = 8
"""Number of operators without a matrix that are chained in one measurement: a single one takes less than a run's overhead."""


@dataclass(frozen=True)
class Operator:
    """An operator type. weight: matrix [k, n], row [n], or none."""

    name: str
    weight: str = "none"


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("MatMul", "matrix"),
        Operator("Gemm", "matrix"),
        Operator("Add", "row"),
        Operator("Mul", "row"),
        Operator("Relu"),
        Operator("Sigmoid"),
        Operator("Tanh"),
        Operator("Softmax"),
    )
}


@dataclass(frozen=True)
class Shape:
    """rows x k in, rows x n out; k = n if the operator keeps its width. `copies`: number of kernels of it in the model."""

    rows: int
    k: int
    n: int
    copies: int = 1

    def of(self, operator: str) -> "Shape":
        """The shape for this operator: n = k if it keeps its width."""
        return self if OPERATORS[operator].weight == "matrix" else replace(self, n=self.k)

    def flops(self, operator: str) -> float:
        """Floating-point operations: two per multiply-add, one per element."""
        matrix = OPERATORS[operator].weight == "matrix"
        return (2.0 * self.k if matrix else 1.0) * self.rows * self.n

    def weights(self, operator: str) -> float:
        """fp32 bytes of one kernel's weight."""
        return 4.0 * {"matrix": self.k * self.n, "row": self.n, "none": 0}[OPERATORS[operator].weight]

    def bytes(self, operator: str) -> float:
        """fp32 bytes of input, weight and output."""
        return 4.0 * self.rows * (self.k + self.n) + self.weights(operator)


Link = tuple[str, Shape]
"""An operator of a chain, with its shape."""


def chain(operators: list[str], shape: Shape, widths: tuple[int, ...] = ()) -> list[Link]:
    """Links of a chain that begins with `shape`; matrices after the first have the output `widths`, else keep the width."""
    links, width, following = [], shape.k, iter((shape.n, *widths))
    for name in operators:
        n = next(following, width) if OPERATORS[name].weight == "matrix" else width
        links.append((name, Shape(shape.rows, width, n)))
        width = n
    return links


def chain_model(links: list[Link], all_outputs: bool = False, copies: int = 1) -> bytes:
    """A chain as a serialized model with input `x`; with `all_outputs`, intermediate results are outputs too.

    Copies have separate weights. They are parallel, all from `x`; kernels without a matrix are chained.
    """
    in_a_row = not any(_random_matrix(name) for name, _ in links)
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    outputs: list[ValueInfoProto] = []
    begin = "x"
    for copy in range(copies):
        _add_node(links, begin, copy, nodes, weights)
        results = [nodes[i - len(links)].output[0] for i in range(len(links))]
        if in_a_row:
            begin = results[-1]
        output_links = range(0 if all_outputs else len(links) - 1, 0 if in_a_row and copy < copies - 1 else len(links))
        outputs += [_add_tensor(results[i], links[i][1].rows, links[i][1].n) for i in output_links]
    first = links[0][1]
    graph = helper.make_graph(nodes, "chain", [_add_tensor("x", first.rows, first.k)], outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(proto.SerializeToString())


def flops_and_bytes(model: bytes) -> tuple[float, float]:
    """(floating-point operations of a model's matrices, bytes of their weights)."""
    graph = onnx.load_from_string(model).graph
    rows = graph.input[0].type.tensor_type.shape.dim[0].dim_value
    elements = sum(weight.dims[0] * weight.dims[1] for weight in graph.initializer if len(weight.dims) > 1)
    return 2.0 * rows * elements, 4.0 * elements


def kernel_repetitions(operators: list[str], shape: Shape) -> int:
    """The number of kernels in `repeated_model`: `shape.copies`, or IN_A_ROW for a kernel without a matrix."""
    return shape.copies if any(map(_random_matrix, operators)) else IN_A_ROW


def repeated_model(operators: list[str], shape: Shape) -> bytes:
    """A model with several copies of a kernel."""
    return chain_model(chain(operators, shape), copies=kernel_repetitions(operators, shape))


def node_name(index: int, operator: str, copy: int = 0) -> str:
    """The name of a chain's node in profiles."""
    return f"n{index}_{operator}" + (f"_{copy}" if copy else "")


def link_of(result: str) -> int:
    """Index in the chain of a result's operator, the same in every copy."""
    return int(result.split("_")[1])


def _add_node(links: list[Link], begin: str, copy: int, nodes: list[NodeProto], weights: list[TensorProto]) -> None:
    random = np.random.default_rng(0)
    current = begin
    for i, (name, shape) in enumerate(links):
        inputs, result = [current], f"t{copy}_{i}"
        dims = {"matrix": (shape.k, shape.n), "row": (shape.n,), "none": None}[OPERATORS[name].weight]
        if dims:
            # Copies are scaled, since equal weights could be merged.
            values = random.standard_normal(dims, np.float32) * np.float32((1 + copy / 64) / np.sqrt(dims[0]))
            weights.append(numpy_helper.from_array(values, f"w{copy}_{i}"))
            inputs.append(f"w{copy}_{i}")
        nodes.append(helper.make_node(name, inputs, [result], name=node_name(i, name, copy)))
        current = result


def _add_tensor(name: str, rows: int, columns: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, columns])


def _random_matrix(operator: str) -> bool:
    return OPERATORS[operator].weight == "matrix"
