"""Prints llama.cpp's own report of its computation: llama_oracle.py MODEL BATCHES NEW_TOKENS.

Runs the steps of llama_steps.py with llama.cpp's own evaluation callback, which gets every node of every graph in order,
and writes a JSON object with the generated tokens and, for each node, context and step, operator, name, dims, whether it is
computed, its buffer, the producer of each of its sources, and the routing tensor's contents if it is a
MUL_MAT_ID and the host can read them. Requesting a node's
result interrupts the graph there, so such a run is not suited to timing.
"""

import ctypes
import json
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from llama_steps import Opaque, decode_batches, load_library, parse_arguments

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
TYPE_F16 = 1
FLAG_COMPUTE = 16


class Head(ctypes.Structure):
    """The beginning of struct ggml_tensor (ggml.h), which has not changed since 2023."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
    ]


class Tensors:
    """Reads tensors of a library; the offsets of name, data and sources are determined with the library's functions."""

    def __init__(self, lib: ctypes.CDLL):
        self.lib = lib
        for name in ("ggml_get_name", "ggml_get_data"):
            getattr(lib, name).restype, getattr(lib, name).argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def name(self, address: int) -> str:
        return ctypes.string_at(self.lib.ggml_get_name(address)).decode()

    def sources(self, address: int) -> list[int]:
        """src[10], then view_src, view_offs, data and the name."""
        first = self.lib.ggml_get_name(address) - 13 * 8
        return list((ctypes.c_uint64 * 10).from_address(first))


def set_callback(params: Opaque, callback: Any) -> None:
    """Set `cb_eval` in context parameters of unknown layout: it is the two null pointers before the cache's two element types."""
    raw = bytes(params.bytes)
    mark = struct.pack("<QQii", 0, 0, TYPE_F16, TYPE_F16)
    places = [at for at in range(0, len(raw) - len(mark), 8) if raw[at : at + len(mark)] == mark]
    assert len(places) == 1, f"llama_context_params has changed: {places}"
    ctypes.memmove(
        ctypes.addressof(params) + places[0], (ctypes.cast(callback, ctypes.c_void_p).value or 0).to_bytes(8, "little"), 8
    )


def tensor_contents(ids: Head, data: int) -> list[list[int]]:
    """The contents of an I32 tensor [k, tokens]."""
    return [
        [ctypes.c_int32.from_address(data + row * ids.nb[1] + k * ids.nb[0]).value for k in range(ids.ne[0])]
        for row in range(ids.ne[1])
    ]


class Oracle:
    """Collects the nodes that the callback gets."""

    def __init__(self, lib: ctypes.CDLL):
        self.lib, self.tensors, self.at = lib, Tensors(lib), (0, 0)
        self.nodes: list[Any] = []
        self.steps: Counter[Any] = Counter()
        lib.ggml_op_name.restype = ctypes.c_char_p
        lib.ggml_backend_buffer_name.restype, lib.ggml_backend_buffer_is_host.restype = ctypes.c_char_p, ctypes.c_bool
        lib.ggml_backend_buffer_name.argtypes = lib.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
        lib.ggml_nelements.restype = ctypes.c_int64
        lib.ggml_nelements.argtypes = [ctypes.c_void_p]

    def told(self, address: int, ask: bool, _: Any) -> bool:
        """cb_eval: called before a node is computed (`ask`: is its result wanted?), then with the result."""
        t, sources = Head.from_address(address), self.tensors.sources(address)
        operator = self.lib.ggml_op_name(t.op).decode()
        if not ask:
            ids = sources[2]
            self.nodes[-1]["experts"] = tensor_contents(Head.from_address(ids), self.lib.ggml_get_data(ids))
            return True
        routed = operator == "MUL_MAT_ID" and self.lib.ggml_backend_buffer_is_host(Head.from_address(sources[2]).buffer)
        ne, name = list(t.ne), self.tensors.name(address)
        assert self.lib.ggml_nelements(address) == ne[0] * ne[1] * ne[2] * ne[3]
        computed = bool(t.flags & FLAG_COMPUTE)
        reads = [self.behind_views(source) for source in sources if source]
        where = self.lib.ggml_backend_buffer_name(t.buffer).decode() if t.buffer else ""
        node = {"at": self.at, "id": address, "op": operator, "name": name, "ne": ne, "computed": computed, "where": where}
        self.nodes.append({**node, "reads": reads})
        return bool(routed)

    def counted(self, call: Callable[..., int]) -> Callable[..., int]:
        """The call, wrapped to record the number of its context, in order of first steps, and of the context's step."""

        def step(context: ctypes.c_void_p, *given: Any) -> int:
            number = self.steps[context.value]
            self.steps[context.value] += 1
            self.at = list(self.steps).index(context.value), number
            return call(context, *given)

        return step

    def behind_views(self, address: int) -> tuple[int, str, str]:
        """(address, operator, name) of the producer of a source's memory, through views."""
        operator, first = self.lib.ggml_op_name(Head.from_address(address).op).decode(), self.tensors.sources(address)[0]
        if operator in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE") and first:
            return self.behind_views(first)
        return address, operator, self.tensors.name(address)


def main() -> None:
    lib = load_library()
    oracle = Oracle(lib)
    callback = CALLBACK(oracle.told)
    params = lib.llama_context_default_params()
    set_callback(params, callback)
    for name in ("llama_decode", "llama_encode", "llama_process"):
        if hasattr(lib, name):
            setattr(lib, name, oracle.counted(getattr(lib, name)))
    path, batches, _ = parse_arguments()
    made = decode_batches(lib, params, path, batches, 0)
    if not any(node["computed"] for node in oracle.nodes):  # a library without the flag computes all nodes
        oracle.nodes = [{**node, "computed": True} for node in oracle.nodes]
    print(json.dumps({"made": made, "nodes": oracle.nodes}))


if __name__ == "__main__":
    main()
