"""A program that drives QNN's C API itself: no ONNX Runtime, no knowledge of a tracer.

It makes graphs of Relu nodes, executes them with a profile, reads every event, and prints as JSON: calls, names,
sizes, executes and events. Definitions are our own, from the documentation of the public API.
Arguments: library, and options as key=value: threads, rounds (sessions of a thread, one after another), executes (of a session),
level (of the profile; 0: none), plain (1: not the extended event data), nodes, binary (1: load the context from its own binary),
every (1: calls that only the fake backend supports: asynchronous, memory, signal, list).
"""

import ctypes as c
import json
import sys
import threading
import time
from typing import Any

SLOTS = {
    "backendCreate": 1, "backendFree": 8, "contextCreate": 9, "contextGetBinarySize": 11, "contextGetBinary": 12,
    "contextCreateFromBinary": 13, "contextFree": 14, "graphCreate": 15, "graphAddNode": 18, "graphFinalize": 19,
    "graphRetrieve": 20, "graphExecute": 21, "graphExecuteAsync": 22, "tensorCreateGraphTensor": 24,
    "profileCreate": 28, "profileSetConfig": 29, "profileGetEvents": 30, "profileGetSubEvents": 31,
    "profileGetEventData": 32, "profileGetExtendedEventData": 33,
    "profileFree": 34, "memRegister": 35, "memDeRegister": 36, "deviceCreate": 40, "deviceFree": 43,
    "contextCreateFromBinaryWithSignal": 55, "contextCreateFromBinaryListAsync": 56,
    "contextApplyBinarySection": 61, "contextCreateFromBinaryWithCallback": 68,
}  # fmt: skip
TABLE, APP_WRITE, APP_READ, UFIXED_8, UNDEFINED, SCALE_OFFSET, DEFINED = 40, 0, 1, 0x0408, 0x7FFFFFFF, 0, 1
WIDTH, MOST_ARGS = 256, 9


class Quantization(c.Structure):
    _fields_ = [
        ("defined", c.c_uint32),
        ("encoding", c.c_uint32),
        ("scale", c.c_float),
        ("offset", c.c_int32),
        ("rest", c.c_uint64 * 3),
    ]


class Buffer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_uint32)]


class Tensor(c.Structure):
    """Version 1 of the struct, with the size of the widest version."""

    _fields_ = [
        ("version", c.c_uint64), ("id", c.c_uint32), ("name", c.c_char_p), ("type", c.c_uint32), ("format", c.c_uint32),
        ("dtype", c.c_uint32), ("quantization", Quantization), ("rank", c.c_uint32), ("dims", c.POINTER(c.c_uint32)),
        ("memory", c.c_uint32), ("buffer", Buffer), ("rest", c.c_uint8 * 24),
    ]  # fmt: skip


class Op(c.Structure):
    _fields_ = [
        ("version", c.c_uint64), ("name", c.c_char_p), ("package", c.c_char_p), ("type", c.c_char_p), ("n_params", c.c_uint32),
        ("params", c.c_void_p), ("n_inputs", c.c_uint32), ("inputs", c.POINTER(Tensor)), ("n_outputs", c.c_uint32),
        ("outputs", c.POINTER(Tensor)),
    ]  # fmt: skip


class EventData(c.Structure):
    _fields_ = [("type", c.c_uint32), ("unit", c.c_uint32), ("value", c.c_uint64), ("name", c.c_char_p)]


class ExtendedEventData(c.Structure):
    _fields_ = [
        ("version", c.c_uint32), ("pad", c.c_uint32), ("type", c.c_uint32), ("unit", c.c_uint32), ("dtype", c.c_uint32),
        ("pad2", c.c_uint32), ("value", c.c_uint64), ("rest", c.c_uint64), ("timestamp", c.c_uint64), ("name", c.c_char_p),
    ]  # fmt: skip


class Qnn:
    """The function table, and a count of the calls made through it."""

    def __init__(self, path: str):
        library = c.CDLL(path)
        providers, count = c.POINTER(c.c_void_p)(), c.c_uint32()
        status = library.QnnInterface_getProviders(c.byref(providers), c.byref(count))
        if status or not count.value or not providers[0]:
            print(json.dumps({"no table": True}))
            raise SystemExit(0)
        provider = providers[0]
        self.backend_id = c.c_uint32.from_address(provider).value
        self.api = list((c.c_uint32 * 3).from_address(provider + 16))
        self.calls: dict[str, int] = {}
        self.lock = threading.Lock()
        make = c.CFUNCTYPE(c.c_uint64, *[c.c_void_p] * MOST_ARGS)
        self.library = library
        lacks = [2, 16, 29, 33] if self.api[:2] == [2, 7] else []
        slots = {name: slot - sum(each < slot for each in lacks) for name, slot in SLOTS.items() if slot not in lacks}
        self.functions = {name: make(c.c_void_p.from_address(provider + TABLE + 8 * at).value or 0) for name, at in slots.items()}

    def __call__(self, name: str, *args: Any) -> int:
        """Call a function by name; arguments are numbers or pointers. Returns QNN's error number."""
        with self.lock:
            self.calls[name] = self.calls.get(name, 0) + 1
        given = [c.cast(a, c.c_void_p) if not isinstance(a, int | type(None) | c.c_void_p) else a for a in args]
        return int(self.functions[name](*given, *[None] * (MOST_ARGS - len(given))) & 0xFFFFFFFF)

    def add_node(self, graph: int, op: Op) -> None:
        """Add a node: the only call with a structure by value."""
        add = c.CFUNCTYPE(c.c_uint64, c.c_void_p, Op)(c.cast(self.functions["graphAddNode"], c.c_void_p).value or 0)
        with self.lock:
            self.calls["graphAddNode"] = self.calls.get("graphAddNode", 0) + 1
        status = add(graph, op)
        if status:
            raise SystemExit(f"graphAddNode returned {status}")

    def good(self, name: str, *args: Any) -> None:
        """Call a function that must succeed."""
        status = self(name, *args)
        if status:
            raise SystemExit(f"{name} returned {status}")

    def made(self, name: str, *args: Any) -> int:
        """The handle that a call writes through its last argument."""
        out = c.c_void_p()
        self.good(name, *args, c.byref(out))
        return out.value or 0


def make_tensor(name: str, kind: int, dims: Any) -> Tensor:
    quantization = Quantization(DEFINED, SCALE_OFFSET, 1 / 64, 0)
    return Tensor(1, 0, name.encode(), kind, 0, UFIXED_8, quantization, 2, dims, 0)


class Session:
    """One context with one graph of `nodes` Relus, its profile, and the data to print."""

    def __init__(self, qnn: Qnn, backend: int, device: int, name: str, options: dict[str, int]):
        self.qnn, self.name, self.options, self.binary_bytes = qnn, name, options, 0
        self.profile = qnn.made("profileCreate", backend, options["level"]) if options["level"] else 0
        self.dims = (c.c_uint32 * 2)(8, WIDTH)
        self.context = qnn.made("contextCreate", backend, device, None)
        self.graph = self._compose()
        qnn.good("graphFinalize", self.graph, self.profile, None)
        self.finalize_events = self.harvest()
        self.runs: list[dict[str, Any]] = []
        if options["binary"]:
            self._reload(backend, device)

    def _compose(self) -> int:
        qnn, nodes = self.qnn, self.options["nodes"]
        graph = qnn.made("graphCreate", self.context, self.name.encode(), None)
        self.tensors = [make_tensor(f"{self.name}_t{i}", 3, self.dims) for i in range(nodes + 1)]
        self.tensors[0].type, self.tensors[-1].type = APP_WRITE, APP_READ
        for each in self.tensors:
            qnn.good("tensorCreateGraphTensor", graph, c.byref(each))
        for i in range(nodes):
            ends = [c.pointer(self.tensors[i + end]) for end in (0, 1)]
            name = f"{self.name}_n{i}".encode()
            qnn.add_node(graph, Op(1, name, b"qti.aisw", b"Relu", 0, None, 1, ends[0], 1, ends[1]))
        return graph

    def _reload(self, backend: int, device: int) -> None:
        """Free the context and create it again from its own binary."""
        qnn, size, written = self.qnn, c.c_uint64(), c.c_uint64()
        qnn.good("contextGetBinarySize", self.context, c.byref(size))
        data = c.create_string_buffer(size.value)
        qnn.good("contextGetBinary", self.context, c.byref(data), c.c_void_p(size.value), c.byref(written))
        self.binary_bytes = written.value
        qnn.good("contextFree", self.context, None)
        out = c.c_void_p()
        qnn.good(
            "contextCreateFromBinary", backend, device, None, c.byref(data), c.c_void_p(written.value), c.byref(out), self.profile
        )
        self.context = out.value or 0
        self.load_events = self.harvest()
        self.graph = qnn.made("graphRetrieve", self.context, self.name.encode())

    def execute(self) -> None:
        data = (c.c_uint8 * (8 * WIDTH))(*[7] * 8), (c.c_uint8 * (8 * WIDTH))()
        ends = (Tensor * 1)(self.tensors[0]), (Tensor * 1)(self.tensors[-1])
        for end, part in zip(ends, data, strict=True):
            end[0].buffer = Buffer(c.cast(part, c.c_void_p), c.sizeof(part))
        status = self.qnn("graphExecute", self.graph, c.byref(ends[0]), 1, c.byref(ends[1]), 1, self.profile, None)
        self.runs.append({"graph": self.name, "handle": self.graph, "status": status, "events": self.harvest()})

    def call_the_rest(self, backend: int, device: int) -> dict[str, Any]:
        """Make the calls that the emulator rejects, for a backend that supports everything."""
        qnn, done = self.qnn, self.qnn.library.fake_done()
        notify = c.cast(self.qnn.library.fake_notify, c.c_void_p)
        for number in range(2):
            status = qnn("graphExecuteAsync", self.graph, None, 2, None, 3, self.profile, None, notify, 700 + number)
            while not status and self.qnn.library.fake_done() <= done + number:
                time.sleep(0.001)
        self.runs += [{"graph": self.name, "handle": self.graph, "status": status, "events": []}] * 2
        dims, shape = (c.c_uint32 * 2)(8, WIDTH), (c.c_uint64 * 12)()
        for i in range(2):
            shape[6 * i : 6 * i + 4] = [2, c.addressof(dims), 0, 0x0232 | 2 << 32]
        handles = (c.c_void_p * 2)()
        qnn.good("memRegister", self.context, c.byref(shape), 2, c.byref(handles))
        qnn.good("memDeRegister", c.byref(handles), 2)
        out, params = c.c_void_p(), (c.c_uint64 * 4)(1, 0, 0, 777)
        qnn.good("contextCreateFromBinaryWithSignal", backend, device, None, None, 555, c.byref(out), self.profile, None)
        entries = (c.c_void_p * 3)(c.addressof(params), c.addressof(params), None)
        qnn.good("contextCreateFromBinaryListAsync", backend, device, c.byref(entries), None, None)
        again = c.c_void_p()
        qnn.good("contextCreateFromBinaryWithCallback", backend, device, None, None, None, 666, c.byref(again), self.profile)
        qnn.good("contextApplyBinarySection", again.value, self.graph, 1, None, self.profile)
        qnn.good("contextFree", again.value, None)
        config = (c.c_uint64 * 2)(1, 4321)
        qnn.good("profileSetConfig", self.profile, c.byref((c.c_void_p * 2)(c.addressof(config), None)))
        qnn.good("contextFree", out.value, None)
        return {"memories": list(handles), "memory_bytes": 8 * WIDTH * 4}

    def harvest(self) -> list[list[Any]]:
        """[type, unit, value, name, depth] of every event of the profile, depth first."""
        found: list[list[Any]] = []
        if self.profile:
            self._read("profileGetEvents", self.profile, 0, found)
        return found

    def _read(self, name: str, parent: int, depth: int, found: list[list[Any]]) -> None:
        ids, count = c.POINTER(c.c_uint64)(), c.c_uint32()
        self.qnn.good(name, parent, c.byref(ids), c.byref(count))
        for i in range(count.value):
            if self.options["plain"]:
                data: Any = EventData()
                self.qnn.good("profileGetEventData", ids[i], c.byref(data))
            else:
                data = ExtendedEventData(version=1)
                self.qnn.good("profileGetExtendedEventData", ids[i], c.byref(data))
            found.append([data.type, data.unit, data.value, (data.name or b"").decode(), depth])
            self._read("profileGetSubEvents", ids[i], depth + 1, found)

    def close(self) -> None:
        self.qnn.good("contextFree", self.context, None)
        if self.profile:
            self.qnn.good("profileFree", self.profile)


def work(qnn: Qnn, backend: int, device: int, index: int, options: dict[str, int], said: list[dict[str, Any]]) -> None:
    for round_ in range(options["rounds"]):
        session = Session(qnn, backend, device, f"graph_{index}_{round_}", options)
        for _ in range(options["executes"]):
            session.execute()
        more = session.call_the_rest(backend, device) if options["every"] else {}
        session.close()
        told = more | {
            "graph": session.name,
            "tid": threading.get_native_id(),
            "bytes": session.binary_bytes,
            "runs": session.runs,
        }
        said.append(told | {"finalize_events": session.finalize_events})


def main() -> None:
    options = {"threads": 1, "rounds": 1, "executes": 3, "level": 2, "plain": 0, "nodes": 3, "binary": 1, "every": 0}
    options |= {key: int(value) for key, value in (word.split("=") for word in sys.argv[2:])}
    qnn = Qnn(sys.argv[1])
    backend = qnn.made("backendCreate", None, None)
    device = qnn.made("deviceCreate", None, None)
    said: list[dict[str, Any]] = []
    threads = [threading.Thread(target=work, args=(qnn, backend, device, i, options, said)) for i in range(options["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    qnn.good("deviceFree", device)
    qnn.good("backendFree", backend)
    print(json.dumps({"backend": qnn.backend_id, "api": qnn.api, "calls": qnn.calls, "sessions": said}))


if __name__ == "__main__":
    main()
