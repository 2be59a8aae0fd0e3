"""Keys and values in 16 or 8 bits: their storage, and rewritten fused attention graphs whose operator reads them.

8 bits: one scale per channel of each key head, from a run over the shipped text (`calibrated`), kept in the package. Where the
CPU's fused operator does not run (latent attention, NPU), rows are widened for each run.
"""

import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from runtime.package.layout import Package

FLOAT_INPUTS = ("past_k", "past_v", "cos", "sin")
OPERATOR = "GroupQueryAttention"
SCALES = "kv_scales.npz"
# Factor over the largest value in the calibration, which longer texts exceed.
HEADROOM = 1.3
SMALLEST = 1e-6
K_SCALE, V_SCALE = 12, 13


@dataclass(frozen=True)
class Scales:
    """The value of one int8 step, by layer: keys [KV, 1, D], values [KV, 1, D'] (D' is 0 if values are part of the keys)."""

    keys: list[np.ndarray]
    values: list[np.ndarray]

    @classmethod
    def of_rows(cls, keys: list[np.ndarray], values: list[np.ndarray]) -> "Scales":
        """Scales from float rows [KV, n, D] of every layer."""
        return cls(_step_sizes(keys), _step_sizes(values))

    @classmethod
    def stored(cls, package: Package) -> "Scales | None":
        """The package's scales; None if it has none from this conversion."""
        with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(package.folder / SCALES) as arrays:
            if str(arrays["package"]) == package.manifest["fingerprint"]:
                layers = range(len(arrays.files) // 2)
                return cls(*([arrays[f"{part}_{layer}"] for layer in layers] for part in ("keys", "values")))
        return None

    def save(self, package: Package) -> None:
        """Write the scales into the package, if it is writable."""
        partial = package.folder / f".{SCALES}.partial.npz"
        with suppress(OSError):
            named = {"keys": self.keys, "values": self.values}.items()
            arrays: dict[str, Any] = {f"{part}_{layer}": steps for part, layers in named for layer, steps in enumerate(layers)}
            np.savez(partial, package=package.manifest["fingerprint"], **arrays)
            partial.replace(package.folder / SCALES)


def _step_sizes(layers: list[np.ndarray]) -> list[np.ndarray]:
    largest = [np.abs(rows).max(axis=1, keepdims=True, initial=0) for rows in layers]
    return [np.maximum(most * HEADROOM, SMALLEST).astype(np.float32) / np.float32(127) for most in largest]


def narrow(rows: np.ndarray, dtype: type, step: np.ndarray | None) -> np.ndarray:
    """Convert float rows to the stored type; `step` [KV, 1, D] for 8 bits."""
    if step is None:
        return rows.astype(dtype)
    return np.clip(np.rint(rows / step), -128, 127).astype(dtype)


def widen(rows: np.ndarray, step: np.ndarray | None) -> np.ndarray:
    """Kept rows as float32; the same memory if they are float32 already."""
    if rows.dtype == np.float32:
        return rows
    wide: np.ndarray = rows.astype(np.float32)
    if step is not None:
        wide *= step
    return wide


def with_float16_cache(graph: bytes) -> bytes:
    """The attention graph with float16 cache and rotary tables; casts queries and the result, leaves weights unchanged."""
    model = onnx.load_model_from_string(graph)
    nodes = list(model.graph.node)
    attention = next(node for node in nodes if node.op_type == OPERATOR)
    place = nodes.index(attention)
    before = []
    for i, name in enumerate(attention.input):
        if name and name not in (*FLOAT_INPUTS, "seqlens", "total"):
            before.append(helper.make_node("Cast", [name], [f"half_{i}"], name=f"half_{i}", to=TensorProto.FLOAT16))
            attention.input[i] = f"half_{i}"
    result = attention.output[0]
    attention.output[0] = result + "_half"
    after = helper.make_node("Cast", [attention.output[0]], [result], name=result + "_float", to=TensorProto.FLOAT)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *before, attention, after, *nodes[place + 1 :]])
    for value in [*model.graph.input, *model.graph.output]:
        if value.name in (*FLOAT_INPUTS, "present_k", "present_v"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return bytes(model.SerializeToString())


def with_int8_cache(graph: bytes) -> bytes:
    """The attention graph with an int8 cache: adds inputs k_scale and v_scale [1, KV, 1, D], the operator does the rest."""
    model = onnx.load_model_from_string(graph)
    attention = next(node for node in model.graph.node if node.op_type == OPERATOR)
    attention.input.extend([""] * (V_SCALE + 1 - len(attention.input)))
    attention.input[K_SCALE], attention.input[V_SCALE] = "k_scale", "v_scale"
    for name, value in {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}.items():
        attention.attribute.append(helper.make_attribute(name, value))
    for value in [*model.graph.input, *model.graph.output]:
        if value.name in ("past_k", "past_v", "present_k", "present_v"):
            value.type.tensor_type.elem_type = TensorProto.INT8
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    for scale, past in (("k_scale", "past_k"), ("v_scale", "past_v")):
        shape = (1, sizes[past][1], 1, sizes[past][3])
        model.graph.input.append(helper.make_tensor_value_info(scale, TensorProto.FLOAT, shape))
    return bytes(model.SerializeToString())


def with_rounding(graph: bytes, bits: int) -> bytes:
    """The latent attention graph that rounds its own new rows as if stored, so that results do not depend on the chunk.

    8 bits: adds input k_scale [D].
    """
    if bits == 32:
        return graph
    model = onnx.load_model_from_string(graph)
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if node.op_type == "ScatterND")
    rows = nodes[place].input[2]
    steps: list[tuple[str, list[str], dict[str, Any]]]
    if bits == 16:
        steps = [("Cast", [rows], {"to": TensorProto.FLOAT16}), ("Cast", ["kept_0"], {"to": TensorProto.FLOAT})]
    else:
        steps = [("Div", [rows, "k_scale"], {}), ("Round", ["kept_0"], {})]
        steps += [("Clip", ["kept_1", "kept_least", "kept_most"], {}), ("Mul", ["kept_2", "k_scale"], {})]
        for name, value in (("kept_least", -128), ("kept_most", 127)):
            model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
        dims = next(value for value in model.graph.input if value.name == "past_k").type.tensor_type.shape.dim
        model.graph.input.append(helper.make_tensor_value_info("k_scale", TensorProto.FLOAT, (dims[-1].dim_value,)))
    rounding = [
        helper.make_node(op, inputs, [f"kept_{i}"], name=f"kept_{i}", **attributes)
        for i, (op, inputs, attributes) in enumerate(steps)
    ]
    nodes[place].input[2] = rounding[-1].output[0]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *rounding, *nodes[place:]])
    return bytes(model.SerializeToString())


TYPES: dict[int, type] = {32: np.float32, 16: np.float16, 8: np.int8}
"""NumPy type of a stored key, by bits."""
REWRITTEN: dict[int, Callable[[bytes], bytes]] = {32: lambda graph: graph, 16: with_float16_cache, 8: with_int8_cache}
"""Rewriter of the fused attention graph, by bits of the cache."""
