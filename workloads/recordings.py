"""Synthetic recordings: well-formed folders written from rows, with the layouts that the compiled BPF object's BTF declares."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tracer.kernel.btf import ENUM, STRUCT, Btf
from tracer.recording.format import FIRST_DETAIL, RING_HEADER_BYTES, STREAMS, dtype_from_json, dtype_to_json, write_manifest
from tracer.recording.paths import BPF_OBJECT

PID, MAIN, WORKER = 400, 400, 401
LLAMA_OPERATORS = ["NONE", "MUL_MAT", "ADD", "SOFT_MAX", "MUL_MAT_ID"]
MOESCOPE_OPERATORS = ["attention", "router", "experts", "combine", "head"]
MOESCOPE_GRAPHS = ["attention", "expert", "head"]


@cache
def layouts() -> dict[str, tuple[int, np.dtype]]:
    """Kind's name → (number, dtype), from the object's BTF."""
    btf = Btf.of_file(BPF_OBJECT)
    numbers = {name.removeprefix("KIND_").lower(): number for name, number in btf.enum("record_kind").items()}
    answer = {}
    for name, number in numbers.items():
        if (STRUCT, f"rec_{name}") in btf.by_name:
            dtype = btf.dtype(btf.find(STRUCT, f"rec_{name}"))
            answer[name] = (number, dtype_from_json(dtype_to_json(dtype), dtype.itemsize))
    assert (ENUM, "record_kind") in btf.by_name
    return answer


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest as the tracer writes it, with changes."""
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
    rows = {name: {"kind": k, "bytes": d.itemsize, "fields": dtype_to_json(d)} for name, (k, d) in layouts().items()}
    return {**base, "layouts": rows, **changes}


def records(kind: str, n: int = 1, **fields: Any) -> np.ndarray:
    """`n` records of a kind as ring slots (uint8 [n, slot bytes]); header fields default to the main thread."""
    number, dtype = layouts()[kind]
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
        write_manifest(folder, json.loads(json.dumps(manifest(**changes))))
        for name, parts in self.slots.items():
            (folder / f"{name}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
        return folder
