"""Synthetic recordings: well-formed folders written from rows, with the layouts from the compiled BPF object's BTF."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tracer.kernel.btf import ENUM, STRUCT, Btf
from tracer.recording.checksums import METHOD
from tracer.recording.format import FIRST_DETAIL, RING_HEADER_BYTES, STREAMS, dtype_from_json, dtype_to_json, write_manifest
from tracer.recording.paths import BPF_OBJECT
from workloads.slot_files import SlotFile

PID, MAIN, WORKER = 400, 400, 401
LLAMA_OPERATORS = ["NONE", "MUL_MAT", "ADD", "SOFT_MAX", "MUL_MAT_ID"]
MOESCOPE_OPERATORS = ["attention", "router", "experts", "combine", "head"]
MOESCOPE_GRAPHS = ["attention", "expert", "head"]


@cache
def record_layouts() -> dict[str, tuple[int, np.dtype]]:
    """Kind → (number, dtype), from the object's BTF."""
    btf = Btf.of_file(BPF_OBJECT)
    numbers = {name.removeprefix("KIND_").lower(): number for name, number in btf.enum("record_kind").items()}
    answer = {}
    for name, number in numbers.items():
        if (STRUCT, f"rec_{name}") in btf.by_name:
            dtype = btf.dtype(btf.find(STRUCT, f"rec_{name}"))
            answer[name] = (number, dtype_from_json(dtype_to_json(dtype), dtype.itemsize))
    assert (ENUM, "record_kind") in btf.by_name
    return answer


def make_manifest(**changes: Any) -> dict[str, Any]:
    """A manifest like the tracer's, with changes."""
    base = {
        "schema_version": 1,
        "program": "moescope test",
        "state": "complete",
        "started_utc": "2026-01-01T00:00:00Z",
        "duration_ns": 1_000_000,
        "machine": {"arch": "x86_64", "kernel": "6.18", "os": "test", "cpu_model": "test", "cpus": 2, "memory_bytes": 1 << 30},
        "command": ["engine"],
        "target": {"pid": PID, "uid": 0, "exit_code": 0},
        "loader": "libbpf",
        "levels": ["token"],
        "engines": {
            "moescope": {"id": 1, "operators": MOESCOPE_OPERATORS, "graphs": MOESCOPE_GRAPHS, "libraries": []},
            "llama.cpp": {"id": 2, "operators": LLAMA_OPERATORS, "graphs": ["ggml"], "libraries": []},
            "qnn": {"id": 3, "operators": [], "graphs": [], "libraries": []},
        },
        "qnn": None,
        "probes": [],
        "clocks": [],
        "threads": [{"tid": MAIN, "pid": PID, "name": "main"}, {"tid": WORKER, "pid": PID, "name": "worker"}],
        "records": {},
        "lost": {},
        "cost": {"trap_ns": 0, "bpf_ns": 0, "tracer_cpu_ns": 0, "target_cpu_ns": 0},
    }
    rows = {name: {"kind": k, "bytes": d.itemsize, "fields": dtype_to_json(d)} for name, (k, d) in record_layouts().items()}
    return {**base, "layouts": rows, **changes}


def records(kind: str, n: int = 1, **fields: Any) -> np.ndarray:
    """`n` records of a kind as ring slots (uint8 [n, slot bytes]); header fields default to the main thread."""
    number, dtype = record_layouts()[kind]
    rows = np.zeros(n, dtype)
    for name, value in {"pid": PID, "tid": MAIN, "engine": 1, "kind": number, **fields}.items():
        rows[name] = value
    width = STREAMS["details" if number >= FIRST_DETAIL else "events"]
    slots = np.zeros((n, width), np.uint8)
    slots[:, :4] = np.full((n, 1), dtype.itemsize, "<u4").view(np.uint8)
    body = np.frombuffer(rows.tobytes(), np.uint8).reshape(n, dtype.itemsize)
    slots[:, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize] = body
    return slots


class Writer:
    """Collects records in file order and writes the folder."""

    def __init__(self) -> None:
        self.slots: dict[str, list[np.ndarray]] = {name: [] for name in STREAMS}

    def add(self, kind: str, n: int = 1, **fields: Any) -> "Writer":
        """Append records of one kind."""
        slots = records(kind, n, **fields)
        self.slots["details" if slots.shape[1] == STREAMS["details"] else "events"].append(slots)
        return self

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write manifest and streams; `changes` replace keys of the manifest."""
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, json.loads(json.dumps(make_manifest(**changes))))
        for name, parts in self.slots.items():
            (folder / f"{name}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
        return folder

    def write_sealed(self, folder: Path, slots: int = 4, **changes: Any) -> Path:
        """Write the folder with checksums like the drain's, one per `slots` slots; 0: none, as after a killed tracer."""
        self.write(folder, checksums=METHOD, **changes)
        for name, parts in self.slots.items():
            (folder / f"{name}.bin").unlink()
            file = SlotFile(folder / f"{name}.bin")
            rows = np.concatenate([np.empty((0, STREAMS[name]), np.uint8), *parts])
            batch = slots or max(len(rows), 1)
            for begin in range(0, len(rows), batch):
                file.append(rows[begin : begin + batch])
                if slots:
                    file.sums.seal()
            if slots:
                file.close()
        return folder


def runtime_step(w: Writer, at: int, seq: int, phase: int, n: int, cache: int) -> None:
    """One step of 1000 ns: attention 100..300, experts 400..800 with expert 5 at 450..750 and a demand load at 460..560."""
    w.add("token_begin", ts=at, seq=seq, phase=phase, n_tokens=n, position=seq, maj_flt=2 * seq)
    w.add("op_begin", ts=at + 100, tensor=11, type=0, layer=0, n_tokens=n)
    w.add("graph_begin", ts=at + 120, handle=7, type=0, layer=0, expert=-1, backend=2, tier=n, n_tokens=n)
    w.add("graph_end", ts=at + 280, handle=7)
    w.add("op_end", ts=at + 300, tensor=11)
    w.add("op_begin", ts=at + 400, tensor=12, type=2, layer=0, n_tokens=n)
    w.add("expert_begin", ts=at + 450, layer=0, expert=5, n_tokens=n, cache=cache, backend=1)
    w.add("load_begin", ts=at + 460, layer=0, expert=5, bytes=64, reason=1, backend=1)
    w.add("load_end", ts=at + 560, layer=0, expert=5, bytes=64, resident=640 + seq)
    w.add("expert_end", ts=at + 750, layer=0, expert=5)
    w.add("op_end", ts=at + 800)
    w.add("token_end", ts=at + 1000, seq=seq, result=90 + seq, maj_flt=2 * seq + 1)


def runtime(steps: int = 3) -> Writer:
    """A prefill and decode steps of our runtime, with tensors and routes."""
    w = Writer()
    for i in range(steps):
        runtime_step(w, 10_000 + 2000 * i, i, 2 if i else 1, 1 if i else 4, 1 if i else 2)
    w.add("tensor", ts=10_100, tensor=11, type=0, n_sources=2, sources=[[3, 4] + [0] * 8])
    w.add("tensor", ts=10_400, tensor=12, type=2, n_sources=1, sources=[[11] + [0] * 9])
    w.add(
        "route",
        ts=10_420,
        layer=0,
        n_tokens=4,
        k=2,
        first=0,
        count=8,
        has_weights=1,
        experts=[[5, 1] * 4 + [0] * 24],
        weights=0.5,
    )
    return w
