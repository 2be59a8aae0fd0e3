"""What llama.cpp itself says it computes: llama_oracle.py MODEL BATCHES NEW_TOKENS.

Takes the steps of llama_steps.py with llama.cpp's own evaluation callback, which is told every node of every graph in order,
and writes a JSON object with the tokens that were made and, for each node, context and step, operator, name, dims, whether it is
to be computed, the buffer that it lies in, what made each of its sources, and the routing tensor's contents where it is a
MUL_MAT_ID and the host can read them. Asking for a node's
result ends the graph there for a moment, so such a run is not the one to time.
"""

import ctypes
import json
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from llama_steps import Opaque, arguments, decode, library

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
TYPE_F16 = 1
FLAG_COMPUTE = 16


class Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


def set_callback(params: Opaque, callback: Any) -> None:
    """Put `cb_eval` into context parameters of unknown layout: two null pointers before the cache's two element types."""
    raw = bytes(params.bytes)
    mark = struct.pack("<QQii", 0, 0, TYPE_F16, TYPE_F16)
    places = [at for at in range(0, len(raw) - len(mark), 8) if raw[at : at + len(mark)] == mark]
    assert len(places) == 1, f"llama_context_params has changed: {places}"
    ctypes.memmove(ctypes.addressof(params) + places[0], ctypes.cast(callback, ctypes.c_void_p).value.to_bytes(8, "little"), 8)


def experts(ids: Tensor) -> list[list[int]]:
    """The contents of an I32 tensor [k, tokens]."""
    return [
        [ctypes.c_int32.from_address(ids.data + row * ids.nb[1] + k * ids.nb[0]).value for k in range(ids.ne[0])]
        for row in range(ids.ne[1])
    ]


class Oracle:
    """Collects what the callback is told."""

    def __init__(self, lib: ctypes.CDLL):
        self.lib, self.nodes = lib, []
        self.at, self.steps = (0, 0), Counter()
        for name in ("ggml_op_name", "ggml_get_name"):
            getattr(lib, name).restype = ctypes.c_char_p
        lib.ggml_get_name.argtypes = [ctypes.c_void_p]
        lib.ggml_backend_buffer_name.restype, lib.ggml_backend_buffer_is_host.restype = ctypes.c_char_p, ctypes.c_bool
        lib.ggml_backend_buffer_name.argtypes = lib.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
        lib.ggml_nelements.restype = ctypes.c_int64
        lib.ggml_nelements.argtypes = [ctypes.c_void_p]

    def told(self, address: int, ask: bool, _: Any) -> bool:
        """cb_eval: asked before a node is computed whether its result is wanted, then called with the result."""
        t = Tensor.from_address(address)
        operator = self.lib.ggml_op_name(t.op).decode()
        if not ask:
            self.nodes[-1]["experts"] = experts(Tensor.from_address(t.src[2]))
            return True
        routed = operator == "MUL_MAT_ID" and self.lib.ggml_backend_buffer_is_host(Tensor.from_address(t.src[2]).buffer)
        name = self.lib.ggml_get_name(address).decode()
        ne = list(t.ne)
        assert name == t.name.decode() and self.lib.ggml_nelements(address) == ne[0] * ne[1] * ne[2] * ne[3]
        computed = bool(t.flags & FLAG_COMPUTE)
        reads = [self.behind_views(source) for source in t.src if source]
        where = self.lib.ggml_backend_buffer_name(t.buffer).decode() if t.buffer else ""
        node = {"at": self.at, "id": address, "op": operator, "name": name, "ne": ne, "computed": computed, "where": where}
        self.nodes.append({**node, "reads": reads})
        return bool(routed)

    def counted(self, call: Callable[..., int]) -> Callable[..., int]:
        """The call, with a note of which context it is for, in order of their first steps, and which of its steps it is."""

        def step(context: ctypes.c_void_p, *given: Any) -> int:
            number = self.steps[context.value]
            self.steps[context.value] += 1
            self.at = list(self.steps).index(context.value), number
            return call(context, *given)

        return step

    def behind_views(self, address: int) -> tuple[int, str, str]:
        """(address, operator, name) of what made the memory that a source shows."""
        t = Tensor.from_address(address)
        operator = self.lib.ggml_op_name(t.op).decode()
        if operator in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE") and t.src[0]:
            return self.behind_views(t.src[0])
        return address, operator, self.lib.ggml_get_name(address).decode()


def main() -> None:
    lib = library()
    oracle = Oracle(lib)
    callback = CALLBACK(oracle.told)
    params = lib.llama_context_default_params()
    set_callback(params, callback)
    for name in ("llama_decode", "llama_encode", "llama_process"):
        if hasattr(lib, name):
            setattr(lib, name, oracle.counted(getattr(lib, name)))
    path, batches, _ = arguments()
    made = decode(lib, params, path, batches, 0)
    print(json.dumps({"made": made, "nodes": oracle.nodes}))


if __name__ == "__main__":
    main()
