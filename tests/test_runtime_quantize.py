"""Quantized weights: what is packed is what was meant, and ONNX Runtime reads it the same way."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.backends.block_products import QUANTIZED, with_block_products
from runtime.errors import RequestError
from runtime.graphs.builder import GraphBuilder
from runtime.graphs.quantize import Precision, quantize
from tests.conftest import drawn
from tests.quantized_weights import dequantize


def results(model: onnx.ModelProto, options: ort.SessionOptions, rows: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": rows})


precisions = st.builds(Precision, st.sampled_from([4, 8]), st.sampled_from([16, 32, 64]), st.booleans())


@given(precisions, st.integers(1, 5), st.integers(1, 150), st.integers(0, 1 << 30), st.sampled_from([0.0, 1e-6, 1.0, 300.0]))
@settings(max_examples=drawn(60))
def test_no_weight_is_off_by_more_than_its_blocks_step(precision: Precision, n: int, k: int, seed: int, size: float) -> None:
    weight = (np.random.default_rng(seed).standard_normal((n, k)) * size).astype(np.float32)
    packed = quantize(weight, precision)
    steps = np.repeat(np.abs(packed.scales), precision.block, axis=1)[:, :k]
    # A symmetric block has no code for the mirror image of its extreme weight, and 4 bits may give up the extreme for the others.
    slack = 2.1 if precision.bits == 4 else 1.01
    smallest = 2.0**-25 * 2**precision.bits  # what rounding a scale near zero to float16 is worth at the largest code
    assert (np.abs(dequantize(packed, precision, k) - weight) <= slack * steps + smallest).all()


def test_weights_beyond_the_range_of_scales_are_refused() -> None:
    with pytest.raises(RequestError, match="--bits 32"):
        quantize(np.full((2, 32), 1e6, np.float32), Precision(4))


@pytest.mark.parametrize(
    "precision", [Precision(4), Precision(4, 64, False), Precision(8), Precision(8, 32, False), Precision(16)]
)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("own", [False, True])
def test_onnxruntime_multiplies_with_the_weights_that_were_packed(precision: Precision, rows: int, own: bool) -> None:
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((48, 96)).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    values = rng.standard_normal((rows, 96)).astype(np.float32)
    g = GraphBuilder("linear")
    g.input("x", ("T", 96))
    g.linear("x", "w", weight, precision, bias, "y")
    g.output("y", ("T", 48))
    model, options = g.model(), ort.SessionOptions()
    if own:
        with_block_products(model, options)
        assert QUANTIZED not in {node.op_type for node in model.graph.node}
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": values})
    meant = dequantize(quantize(weight, precision), precision, 96) if precision.quantized else weight
    expected = values @ meant.T + bias
    # Activations are rounded to 8 bits too.
    assert np.abs(found - expected).max() < (0.01 if precision.bits == 16 else 0.02) * np.abs(expected).max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("around", ["Add", "Squeeze, Add", "Unsqueeze"])
def test_a_product_does_the_work_of_the_small_nodes_around_it(bias: bool, shown: bool, around: str) -> None:
    rng, precision = np.random.default_rng(2), Precision(4, 32)
    g = GraphBuilder("around")
    g.input("x", ("T", 64))
    rows = "x" if around != "Squeeze, Add" else g.node("Squeeze", [g.node("Unsqueeze", ["x", g.ints(0)]), g.ints(0)])
    terms = rng.standard_normal(64).astype(np.float32) if bias else None
    product = g.linear(rows, "w", rng.standard_normal((64, 64)).astype(np.float32), precision, terms, "product")
    if around == "Unsqueeze":
        g.node("Unsqueeze", [product, g.ints(0)], "y")
    else:
        g.node("Add", ["x", product], "y")
    g.output("y", (1, "T", 64) if around == "Unsqueeze" else ("T", 64))
    if shown:
        g.output("product", ("T", 64))
    values, model, options = rng.standard_normal((3, 64)).astype(np.float32), g.model(), ort.SessionOptions()
    expected = results(model, ort.SessionOptions(), values)
    with_block_products(model, options)
    kinds = [node.op_type for node in model.graph.node]
    assert ("Add" in kinds or kinds.count("Unsqueeze") > ("Squeeze" in around)) == shown
    for result, meant in zip(results(model, options, values), expected, strict=True):
        assert result.shape == meant.shape and np.abs(result - meant).max() < 0.02 * np.abs(meant).max()


@pytest.mark.parametrize("shown", [False, True])
def test_the_activation_of_a_gated_mlp_becomes_part_of_its_product(shown: bool) -> None:
    rng, precision = np.random.default_rng(1), Precision(8, 32)
    g = GraphBuilder("mlp")
    g.input("x", ("T", 64))
    gate, up = g.split(g.linear("x", "gate_up", rng.standard_normal((192, 64)).astype(np.float32), precision), 96, 96)
    activated = g.node("Mul", [g.node("Mul", [gate, g.node("Sigmoid", [gate])]), up], "activated")
    g.linear(activated, "down", rng.standard_normal((64, 96)).astype(np.float32), precision, output="y")
    g.output("y", ("T", 64))
    if shown:
        g.output("activated", ("T", 96))
    model, options = g.model(), ort.SessionOptions()
    rows = rng.standard_normal((3, 64)).astype(np.float32)
    expected = results(model, ort.SessionOptions(), rows)
    with_block_products(model, options)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("BlockMatMul") == 2 and ("Split" in kinds) == shown
    for result, meant in zip(results(model, options, rows), expected, strict=True):
        assert np.abs(result - meant).max() < 0.02 * np.abs(meant).max()


def test_impossible_precisions_are_refused() -> None:
    for bits, block in ((3, 32), (4, 33)):
        with pytest.raises(RequestError, match="bits"):
            Precision(bits, block)
