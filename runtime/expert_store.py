"""Where a package keeps its experts, and how their weights are found in what one read brings.

`ExpertStore` is all that the engine asks of a package's expert format. `OnnxFiles` answers for format 1.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from runtime.errors import PackageError
from runtime.package import Package, expert_name
from runtime.reader import REMEDY, Place

ALIGNED = 64  # of every weight in its block: what vector instructions like
GRAPH, INITIALIZER, NAME, RAW_DATA = 7, 5, 8, 9  # fields of ModelProto, GraphProto and TensorProto (onnx.proto)
CONSTANTS = {TensorProto.INT64}  # shapes and axes: the same for every expert, and part of the graph


class ExpertStore(Protocol):
    """Experts on disk."""

    def where(self, layer: int, expert: int) -> Place:
        """What one read must bring."""

    def digest(self, layer: int, expert: int) -> str:
        """sha256 of those bytes."""

    def weights(self, content: np.ndarray) -> dict[str, np.ndarray]:
        """An expert's weights by name: views of what was read, aligned to ALIGNED bytes (they may be moved within it)."""

    def skeleton(self) -> onnx.ModelProto:
        """The graph that all experts share; its weights are inputs, in the order of `weights`."""


class OnnxFiles:
    """Package format 1: expert_<layer>_<expert>.onnx, weights inside."""

    def __init__(self, package: Package):
        self.package = package

    def where(self, layer: int, expert: int) -> Place:
        """The whole file."""
        name = f"{expert_name(layer, expert)}.onnx"
        return Place(self.package.folder / name, 0, int(self.package.manifest["files"][name]["bytes"]))

    def digest(self, layer: int, expert: int) -> str:
        """The file's sha256 from the manifest."""
        return self.package.digest(expert_name(layer, expert))

    def weights(self, content: np.ndarray) -> dict[str, np.ndarray]:
        """Weights found by walking the protobuf; each is moved by a few bytes, to where it is aligned."""
        types, found, taken, base = self._types(), {}, 0, content.ctypes.data
        for name, first, count in list(raw_tensors(content.data)):
            if name not in types:
                continue
            start = first - (base + first) % ALIGNED
            if start >= taken:
                ctypes.memmove(base + start, base + first, count)
                taken, raw = start + count, content[start : start + count]
            else:
                taken, raw = first + count, content[first : first + count].copy()
            found[name] = raw.view(types[name][0]).reshape(types[name][1])
        if found.keys() != types.keys():
            missing = ", ".join(types.keys() - found.keys())
            raise PackageError(f"an expert of {self.package.folder} lacks {missing}: {REMEDY}")
        return found

    def skeleton(self) -> onnx.ModelProto:
        """The first expert's graph with weights as inputs."""
        return weights_as_inputs(onnx.load_from_string(self.package.read(expert_name(0, 0))))

    @cache  # noqa: B019 -- one store lives as long as its engine
    def _types(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        return {
            value.name: (
                helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                tuple(d.dim_value for d in value.type.tensor_type.shape.dim),
            )
            for value in self.skeleton().graph.input
            if value.name != "rows"
        }


def open_store(package: Package) -> ExpertStore:
    """The store of the package's format."""
    return OnnxFiles(package)


def weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights turned into inputs; integer constants stay."""
    constants = []
    for tensor in model.graph.initializer:
        if tensor.data_type in CONSTANTS:
            constants.append(tensor)
        else:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    return model


def raw_tensors(content: memoryview) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and length of every initializer's raw data in a serialized model."""
    for number, graph, graph_end in _fields(content, 0, len(content)):
        if number != GRAPH:
            continue
        for kind, tensor, tensor_end in _fields(content, graph, graph_end):
            if kind == INITIALIZER:
                parts = {number: (first, end) for number, first, end in _fields(content, tensor, tensor_end)}
                if NAME in parts and RAW_DATA in parts:
                    (name, name_end), (first, end) = parts[NAME], parts[RAW_DATA]
                    yield bytes(content[name:name_end]).decode(), first, end - first


def _fields(content: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Field number, first byte and end of each length-delimited field of a protobuf message; others are passed over."""
    while position < end:
        key, position = _varint(content, position)
        kind = key & 7
        if kind == 2:
            length, position = _varint(content, position)
            yield key >> 3, position, position + length
            position += length
        elif kind == 0:
            _, position = _varint(content, position)
        else:
            position += 8 if kind == 1 else 4


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
