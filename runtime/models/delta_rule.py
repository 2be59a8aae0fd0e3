"""The gated delta rule (arXiv 2412.06464): a matrix per head that maps keys to values, fades, and learns from each token.

It runs token by token, so that results do not depend on how many rows run at once.
"""

import onnx

from runtime.graphs.builder import GraphBuilder

L2_EPSILON = 1e-6


def unit_heads(g: GraphBuilder, rows: str, heads: int, dim: int) -> str:
    """Rows [T, heads * dim] as heads of length 1 [T, heads, 1, dim]."""
    x = g.node("Reshape", [rows, g.ints(-1, heads, 1, dim)])
    square = g.node("ReduceSum", [g.node("Mul", [x, x]), g.ints(-1)], keepdims=1)
    return g.node("Div", [x, g.node("Sqrt", [g.node("Add", [square, g.number(L2_EPSILON)])])])


def run_delta_rule(g: GraphBuilder, inputs: list[str], heads: int, keys: int, values: int, fading: int = 1) -> str:
    """The heads' reads from their matrices [T, heads, 1, values]; matrices enter as state_1 and leave as next_1.

    inputs: queries and keys [T, heads, 1, keys], values [T, heads, 1, values], steps [T, heads, 1, 1], decays
    [T, heads, fading, 1]: one for a whole matrix, or one for each of its rows.
    """
    step = _one_token(heads, keys, values, fading)
    return g.nodes_of("Scan", ["state_1", *inputs], ["next_1", "read"], body=step, num_scan_inputs=5)[1]


def _one_token(heads: int, keys: int, values: int, fading: int) -> onnx.GraphProto:
    """Decay the matrices, add the part of the value that they did not predict, and read them."""
    g = GraphBuilder("delta_rule")
    shapes = {"before": (heads, keys, values), "q": (heads, 1, keys), "k": (heads, 1, keys), "v": (heads, 1, values)}
    for name, shape in (shapes | {"beta": (heads, 1, 1), "decay": (heads, fading, 1)}).items():
        g.input(name, shape)
    # A name must not occur in the graph around it.
    g.node("Mul", ["before", "decay"], "faded")
    g.node("Sub", ["v", g.node("MatMul", ["k", "faded"], "predicted")], "missed")
    g.node("Mul", ["missed", "beta"], "news")
    g.node("Mul", [g.node("Transpose", ["k"], "k_column", perm=[0, 2, 1]), "news"], "learnt")
    g.node("Add", ["faded", "learnt"], "after")
    g.node("MatMul", ["q", "after"], "out")
    g.output("after", (heads, keys, values))
    g.output("out", (heads, 1, values))
    return g.graph()
