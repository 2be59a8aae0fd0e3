"""The recording's format: layouts from BTF, slots from the ring, and what is left after a crash."""

import json
import mmap
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT, drawn
from tracer.kernel.btf import UNION, Btf, BtfError
from tracer.kernel.definitions import constant, record_layouts
from tracer.recording.format import (
    BUSY,
    DISCARD,
    FIRST_DETAIL,
    RING_HEADER_BYTES,
    STREAMS,
    RecordingError,
    dtype_from_json,
    dtype_to_json,
    write_manifest,
)
from tracer.recording.paths import BPF_OBJECT
from workloads.raw_records import RawRecording
from workloads.recorder_buffers import Buffer

SLOT = STREAMS["events"]


def test_a_constant_that_nobody_defines_is_named() -> None:
    with pytest.raises(BtfError, match="no constant MAX_NOTHING"):
        constant("MAX_NOTHING")


def test_every_layout_has_the_size_and_offsets_that_c_gives_it(tmp_path: Path) -> None:
    lines = ["#include <stdio.h>", "#include <stddef.h>", '#include "records.h"', "int main(void) {"]
    rows = record_layouts()
    for name, layout in rows.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct rec_{name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof(struct rec_{name}, {field}));'
            for field, *_ in layout["fields"]
            if field not in ("ts", "pid", "tid", "kind", "cpu", "engine")
        ]
    (tmp_path / "layout.c").write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["cc", f"-I{ROOT / 'bpf'}", str(tmp_path / "layout.c"), "-o", str(tmp_path / "layout")], check=True)
    out = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    truth = {key: int(value) for key, value in (line.split() for line in out.splitlines())}
    for name, layout in rows.items():
        assert layout["bytes"] == truth[name]
        stream = "details" if layout["kind"] >= FIRST_DETAIL else "events"
        assert layout["bytes"] <= STREAMS[stream] - RING_HEADER_BYTES
        for field, _, offset, _ in layout["fields"]:
            assert truth.get(f"{name}.{field}", offset) == offset


def test_layouts_survive_json() -> None:
    btf = Btf.of_file(BPF_OBJECT)
    for _, type_id, _ in btf.members(btf.find(UNION, "record")):
        dtype = btf.dtype(type_id)
        rows = json.loads(json.dumps(dtype_to_json(dtype)))
        again = dtype_from_json(rows, dtype.itemsize)
        assert dtype_to_json(again) == rows and again.itemsize == dtype.itemsize


def test_btf_that_is_none_is_refused() -> None:
    with pytest.raises(BtfError, match="little-endian"):
        Btf(b"\0" * 64)
    with pytest.raises(BtfError, match="nothing"):
        Btf.of_file(BPF_OBJECT).find(UNION, "nothing")


class FakeRing:
    """A file laid out like a ring map: consumer page, producer page, data twice. The test plays the kernel."""

    def __init__(self, slots: int):
        self.fd = os.memfd_create("ring")
        self.bytes = slots * SLOT
        os.ftruncate(self.fd, 2 * mmap.PAGESIZE + 2 * self.bytes)
        self.memory = mmap.mmap(self.fd, 0)
        self.produced = 0

    def consumed(self) -> int:
        return struct.unpack_from("<Q", self.memory, 0)[0]

    def free(self) -> int:
        return (self.bytes - (self.produced - self.consumed())) // SLOT

    def put(self, serial: int, flags: int) -> int:
        """Reserve a slot; returns its position in the file."""
        at = 2 * mmap.PAGESIZE + self.produced % self.bytes
        record = struct.pack("<II", SLOT - 8 | flags, 0) + struct.pack("<QIIHHI", serial, 1, 1, 5, 0, 0)
        for copy in (at, at + self.bytes):
            self.memory[copy : copy + SLOT] = record.ljust(SLOT, b"\0")
        self.produced += SLOT
        struct.pack_into("<Q", self.memory, mmap.PAGESIZE, self.produced)
        return at

    def commit(self, at: int) -> None:
        for copy in (at, at + self.bytes):
            word = struct.unpack_from("<I", self.memory, copy)[0]
            struct.pack_into("<I", self.memory, copy, word & ~BUSY)


@pytest.mark.needs("recorder")
@settings(max_examples=drawn(60))
@given(st.lists(st.sampled_from(["put", "reserve", "discard", "commit", "drain"]), max_size=120))
def test_every_committed_record_is_taken_once_and_in_order(actions: list[str]) -> None:
    kernel = FakeRing(64)
    ring, taken = Buffer(kernel.fd, SLOT, kernel.bytes), []
    serial, open_slots = 0, []
    for action in [*actions, *["commit"] * 120, "drain"]:
        if action == "drain":
            taken.append(ring.take())
        elif action == "commit":
            if open_slots:
                kernel.commit(open_slots.pop(0))
        elif kernel.free():
            flags = {"put": 0, "reserve": BUSY, "discard": DISCARD}[action]
            at = kernel.put(serial, flags)
            serial += 1
            if action == "reserve":
                open_slots.append(at)
    serials = np.concatenate(taken)[:, 8:16].copy().view("<u8")[:, 0]
    kernel.memory.close()
    os.close(kernel.fd)
    assert serials.tolist() == list(range(serial))


def write_recording(folder: Path, events: bytes, version: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "events.bin").write_bytes(events)
    write_manifest(folder, {"schema_version": version, "layouts": record_layouts()})


def slot(kind: int, ts: int, flags: int = 0) -> bytes:
    return (struct.pack("<II", 56 | flags, 0) + struct.pack("<QIIHHI", ts, 1, 2, kind, 0, 0)).ljust(SLOT, b"\0")


def test_a_half_written_last_record_is_left_out(tmp_path: Path) -> None:
    write_recording(tmp_path / "r", slot(1, 30) + slot(1, 10) + slot(1, 20, DISCARD) + slot(1, 40)[:17])
    assert RawRecording(tmp_path / "r").records("token_begin")["ts"].tolist() == [10, 30]


def test_missing_event_files_read_as_empty(tmp_path: Path) -> None:
    write_recording(tmp_path / "r", b"")
    run = RawRecording(tmp_path / "r")
    assert len(run.records("token_begin")) == 0 and len(run.records("route")) == 0


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: None, "has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema_version": 99}'), "schema version 99"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(tmp_path: Path, prepare, words: str) -> None:
    prepare(tmp_path)
    with pytest.raises(RecordingError, match=words):
        RawRecording(tmp_path)
