"""Writes small ONNX graphs: a thin layer over onnx.helper that names values and collects weights."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 23
IR_VERSION = 11
Dim = int | str


class GraphBuilder:
    """Collects the nodes, weights, inputs and outputs of one graph; values are named by strings."""

    def __init__(self, name: str):
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: tuple[Dim, ...], dtype: int = TensorProto.FLOAT) -> str:
        """Declare an input; string dimensions are dynamic."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: tuple[Dim, ...], dtype: int = TensorProto.FLOAT) -> None:
        """Declare an output."""
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def weight(self, name: str, value: np.ndarray) -> str:
        """Add a constant."""
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        """Add a constant list of integers, once for equal lists."""
        name = "ints_" + "_".join(str(v) for v in values)
        if all(w.name != name for w in self.weights):
            self.weight(name, np.array(values, np.int64))
        return name

    def node(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        """Add an operator with one result; returns the result's name."""
        output = output or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def nodes_of(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> list[str]:
        """Add an operator with several results; returns their names."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def model(self) -> onnx.ModelProto:
        """The finished, checked model."""
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="moescope")
        onnx.checker.check_model(model)
        return model
