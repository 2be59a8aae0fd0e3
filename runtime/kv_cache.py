"""Keys and values in half precision: the fused attention graph rewritten so that the operator works on float16."""

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT_INPUTS = ("past_k", "past_v", "cos", "sin")
OPERATOR = "GroupQueryAttention"


def halved(graph: bytes) -> bytes:
    """The attention graph with a float16 cache and rotary tables; queries and the result are cast, weights stay as they are."""
    model = onnx.load_model_from_string(graph)
    nodes = list(model.graph.node)
    attention = next(node for node in nodes if node.op_type == OPERATOR)
    at = nodes.index(attention)
    before = []
    for i, name in enumerate(attention.input):
        if name and name not in (*FLOAT_INPUTS, "seqlens", "total"):
            before.append(helper.make_node("Cast", [name], [f"half_{i}"], name=f"half_{i}", to=TensorProto.FLOAT16))
            attention.input[i] = f"half_{i}"
    result = attention.output[0]
    attention.output[0] = result + "_half"
    after = helper.make_node("Cast", [attention.output[0]], [result], name=result + "_float", to=TensorProto.FLOAT)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *before, attention, after, *nodes[at + 1 :]])
    for value in [*model.graph.input, *model.graph.output]:
        if value.name in (*FLOAT_INPUTS, "present_k", "present_v"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return bytes(model.SerializeToString())


def cache_type(bits: int) -> type:
    """NumPy's type of a kept key."""
    return np.float16 if bits == 16 else np.float32
