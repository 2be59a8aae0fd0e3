"""Chains of operators as ONNX models: the test cases of fusion detection and the kernels that are measured."""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper, numpy_helper

OPSET, IR = 17, 9


@dataclass(frozen=True)
class Operator:
    """An operator type. weight: matrix [k, n], row [n], or none."""

    name: str
    weight: str = "none"


OPERATORS = {
    one.name: one
    for one in (
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
    """rows x k in, rows x n out; k = n where the operator keeps its width."""

    rows: int
    k: int
    n: int

    def flops(self, operator: str) -> float:
        """Multiply-adds count two, elements one."""
        matrix = OPERATORS[operator].weight == "matrix"
        return (2.0 * self.k if matrix else 1.0) * self.rows * self.n

    def bytes(self, operator: str) -> float:
        """fp32 bytes of input, weight and output."""
        weight = {"matrix": self.k * self.n, "row": self.n, "none": 0}[OPERATORS[operator].weight]
        return 4.0 * (self.rows * self.k + weight + self.rows * self.n)


Link = tuple[str, Shape]
"""An operator of a chain, with its shape."""


def chain(operators: list[str], shape: Shape, widths: tuple[int, ...] = ()) -> list[Link]:
    """Links of a chain that begins with `shape`; the matrices after the first lead to `widths`, else keep the width."""
    links, width, following = [], shape.k, iter((shape.n, *widths))
    for name in operators:
        n = next(following, width) if OPERATORS[name].weight == "matrix" else width
        links.append((name, Shape(shape.rows, width, n)))
        width = n
    return links


def model(links: list[Link], all_outputs: bool = False) -> bytes:
    """A chain as a serialized model, input `x`, output `y`; with `all_outputs` the results between are outputs as well."""
    random = np.random.default_rng(0)
    nodes, weights, outputs, current = [], [], [], "x"
    for i, (name, shape) in enumerate(links):
        result = "y" if i == len(links) - 1 else f"t{i}"
        inputs = [current]
        dims = {"matrix": (shape.k, shape.n), "row": (shape.n,), "none": None}[OPERATORS[name].weight]
        if dims:
            values = (random.standard_normal(dims) / np.sqrt(dims[0])).astype(np.float32)
            weights.append(numpy_helper.from_array(values, f"w{i}"))
            inputs.append(f"w{i}")
        nodes.append(helper.make_node(name, inputs, [result], name=node_name(i, name)))
        if all_outputs or result == "y":
            outputs.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, [shape.rows, shape.n]))
        current = result
    first = links[0][1]
    begin = helper.make_tensor_value_info("x", TensorProto.FLOAT, [first.rows, first.k])
    graph = helper.make_graph(nodes, "chain", [begin], outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(made.SerializeToString())


def node_name(index: int, operator: str) -> str:
    """The name of a chain's node, as profiles show it."""
    return f"n{index}_{operator}"
