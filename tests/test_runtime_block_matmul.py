"""BlockMatMul: the product that its formula gives, on every way this processor has, whatever the number of rows."""

import ctypes

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from runtime.backends.serving import DOMAIN, LIBRARY
from runtime.graphs.quantize import BLOCKS, Precision, Quantized, _unpack, quantize

TYPES = {"rows": TensorProto.FLOAT, "values": TensorProto.UINT8, "scales": TensorProto.FLOAT, "zeros": TensorProto.UINT8}
precisions = st.builds(Precision, st.sampled_from([4, 8]), st.sampled_from(BLOCKS), st.booleans())


def session(bits: int, inputs: list[str], threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(LIBRARY))
    node = helper.make_node("BlockMatMul", inputs, ["out"], domain=DOMAIN, bits=bits)
    infos = [helper.make_tensor_value_info(name, TYPES[name], None) for name in inputs]
    graph = helper.make_graph([node], "product", infos, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)])
    model.ir_version = onnx.IR_VERSION_2023_5_5
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(packed: Quantized, rows: np.ndarray) -> dict[str, np.ndarray]:
    given = {"rows": rows, "values": packed.values, "scales": packed.scales}
    return given if packed.zero_points is None else given | {"zeros": packed.zero_points}


def product(packed: Quantized, precision: Precision, rows: np.ndarray) -> np.ndarray:
    """In double precision: rows rounded to 8 bits in blocks, times the codes around their zero points."""
    blocks, block = packed.values.shape[1], precision.block
    padded = np.zeros((len(rows), blocks * block), np.float32)
    padded[:, : rows.shape[1]] = rows
    parts = padded.reshape(len(rows), blocks, block)
    scales = np.abs(parts).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(parts * inverse[..., None]).astype(np.int64)
    zeros: np.ndarray | int = 1 << (precision.bits - 1)
    if packed.zero_points is not None:
        zeros = _unpack(packed.zero_points, precision.bits)[:, :blocks, None].astype(np.int64)
    weights = _unpack(packed.values, precision.bits).astype(np.int64) - zeros
    dots = np.einsum("mbi,nbi->mnb", codes, weights)
    return (dots * scales[:, None].astype(np.float64) * packed.scales[None].astype(np.float64)).sum(axis=2)


@pytest.mark.parametrize("plain", [False, True])
@given(
    precision=precisions,
    rows=st.integers(1, 9),
    n=st.integers(1, 70),
    k=st.integers(1, 600),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_product_of_what_was_rounded(
    plain: bool, precision: Precision, rows: int, n: int, k: int, seed: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    packed = quantize(rng.standard_normal((n, k)).astype(np.float32), precision)
    values = (rng.standard_normal((rows, k)) * size).astype(np.float32)
    given = feeds(packed, values)
    runs = session(precision.bits, list(given))
    ctypes.CDLL(str(LIBRARY)).moescope_choose(int(plain))
    (found,) = runs.run(None, given)
    (alone,) = runs.run(None, given | {"rows": values[-1:]})
    ctypes.CDLL(str(LIBRARY)).moescope_choose(0)
    expected = product(packed, precision, values)
    assert np.abs(found - expected).max() <= 2e-5 * (np.abs(expected).max() + np.linalg.norm(values) + 1e-30)
    assert np.array_equal(alone[0], found[-1])


def test_threads_change_no_bit_and_leading_dimensions_stay() -> None:
    rng, precision = np.random.default_rng(3), Precision(4, 32)
    packed = quantize(rng.standard_normal((300, 256)).astype(np.float32), precision)
    given = feeds(packed, rng.standard_normal((2, 3, 256)).astype(np.float32))
    one, two = (session(4, list(given), threads).run(None, given)[0] for threads in (1, 2))
    assert one.shape == (2, 3, 300) and np.array_equal(one, two)


def test_no_rows_are_no_results() -> None:
    given = feeds(quantize(np.ones((4, 32), np.float32), Precision(8, 32)), np.zeros((0, 32), np.float32))
    assert session(8, list(given)).run(None, given)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("values", np.zeros((4, 2, 24), np.uint8), "blocks of 16, 32"),
        ("values", np.zeros((4, 3, 16), np.uint8), r"scales \[N, blocks\]"),
        ("scales", np.zeros((3, 2), np.float32), r"scales \[N, blocks\]"),
        ("rows", np.zeros((1, 65), np.float32), "cover K"),
        ("zeros", np.zeros((4, 2), np.uint8), "zero points"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, wrong: np.ndarray, told: str) -> None:
    packed = quantize(np.ones((4, 64), np.float32), Precision(4, 32, False))
    given = feeds(packed, np.ones((1, 64), np.float32))
    with pytest.raises(Exception, match=told):
        session(4, list(given)).run(None, given | {name: wrong})


def test_other_bits_are_refused() -> None:
    with pytest.raises(Exception, match="4 and 8 bits"):
        session(5, ["rows", "values", "scales"])
