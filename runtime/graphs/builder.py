"""Builds small ONNX graphs: a thin layer over onnx.helper that names values and collects weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from runtime.graphs.quantize import Precision

OPSET = 23
IR_VERSION = 11
MICROSOFT = "com.microsoft"
# Activations are quantized to 8 bits for quantized weights: MatMulNBits' accuracy level 4.
INT8_ACTIVATIONS = 4
Dim = int | str


@dataclass(frozen=True)
class ExternalData:
    """Where a weight is stored: a file next to the graph, offset in bytes, size in bytes."""

    file: str
    offset: int
    size: int


Store = Callable[[str, np.ndarray], ExternalData]


class GraphBuilder:
    """Collects the nodes, weights, inputs and outputs of one graph; values are named by strings.

    With a `store`, weights are written to it as soon as they are added, and the graph refers to them; constants stay inside.
    """

    def __init__(self, name: str, store: Store | None = None):
        self.name, self.store = name, store
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
        value = np.ascontiguousarray(value)
        if self.store is None:
            self.weights.append(numpy_helper.from_array(value, name))
        else:
            self.weights.append(external_tensor(name, value, self.store(name, value)))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a small constant that stays in the graph, once for equal names."""
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(value, name))
        return name

    def ints(self, *values: int) -> str:
        """Add a constant list of integers, once for equal lists."""
        return self.constant("ints_" + "_".join(str(v) for v in values), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Add a constant scalar, once for equal ones."""
        return self.constant(f"number_{value!r}", np.array(value, np.float32))

    def node(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        """Add an operator with one result; returns the result's name."""
        return self.nodes_of(op, inputs, [output or f"{op.lower()}_{len(self.nodes)}"], **attributes)[0]

    def nodes_of(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> list[str]:
        """Add an operator with several results; returns their names."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def split(self, value: str, *sizes: int) -> list[str]:
        """Split the last axis into parts of these sizes; returns their names."""
        names = [f"part_{len(self.nodes)}_{i}" for i in range(len(sizes))]
        return self.nodes_of("Split", [value, self.ints(*sizes)], names, axis=-1)

    def linear(
        self, value: str, name: str, weight: np.ndarray, precision: Precision, bias: np.ndarray | None = None, output: str = ""
    ) -> str:
        """Multiply [.., K] with a matrix [N, K], stored in the given precision, and add a bias [N]."""
        # Profilers show nodes by their names.
        output = output or f"{name}_out"
        if precision.quantized:
            return self._quantized(value, name, weight, precision, bias, output)
        matrix = self.weight(name, precision.narrow(weight.T))
        if precision.bits == 16:
            matrix = self.node("Cast", [matrix], to=TensorProto.FLOAT)
        product = self.node("MatMul", [value, matrix], output if bias is None else f"{name}_product")
        return product if bias is None else self.node("Add", [product, self.weight(name + "_bias", bias)], output)

    def graph(self) -> onnx.GraphProto:
        """The finished graph, as a subgraph of another one."""
        return helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.weights)

    def model(self) -> onnx.ModelProto:
        """The finished, checked model."""
        graph = self.graph()
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == MICROSOFT for node in self.nodes):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="moescope")
        if self.store is None:
            onnx.checker.check_model(model)
        return model

    def _quantized(
        self, value: str, name: str, weight: np.ndarray, precision: Precision, bias: np.ndarray | None, output: str
    ) -> str:
        packed = precision.pack(weight)
        scales = self.node("Cast", [self.weight(name + "_scales", packed.scales)], name + "_scales_wide", to=TensorProto.FLOAT)
        inputs = [value, self.weight(name + "_q", packed.values), scales]
        if packed.zero_points is not None:
            inputs.append(self.weight(name + "_zeros", packed.zero_points))
        if bias is not None:
            inputs += [""] * (5 - len(inputs)) + [self.weight(name + "_bias", bias)]
        sizes = {"N": weight.shape[0], "K": weight.shape[1], "bits": precision.bits, "block_size": precision.block}
        return self.node("MatMulNBits", inputs, output, domain=MICROSOFT, accuracy_level=INT8_ACTIVATIONS, **sizes)


def external_tensor(name: str, value: np.ndarray, data: ExternalData) -> onnx.TensorProto:
    """A weight stored outside the graph."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", data.file), ("offset", data.offset), ("length", data.size)):
        tensor.external_data.add(key=key, value=str(entry))
    return tensor
