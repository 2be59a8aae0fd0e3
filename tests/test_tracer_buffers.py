"""The two kinds of buffer: what is written comes out once and in order, and what is lost is counted."""

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, DemoRun, begin_trace, drawn, manifest_when, trace
from tracer.kernel.trial import recorder_output
from tracer.recording.format import RING_HEADER_BYTES, STREAMS
from workloads.compiling import WITH_SITES, compile_c
from workloads.kernel_objects import recorder_of
from workloads.raw_records import RawRecording
from workloads.recorder_buffers import Buffer

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
PAGE = mmap.PAGESIZE
DATA_HEAD, DATA_TAIL = 1024, 1032  # struct perf_event_mmap_page
RECORD_LOST, RECORD_SAMPLE, THROTTLE = 2, 9, 5
RAW_OFFSET = 12  # of a sample's bytes: struct perf_event_header, u32 size
Item = tuple[str, int]


def stride_of(slot_bytes: int) -> int:
    """Bytes of a sample that holds a slot's record."""
    return -(-(RAW_OFFSET + slot_bytes - RING_HEADER_BYTES) // 8) * 8


class FakeKernel:
    """One CPU's perf buffer as the kernel writes it: no record where there is no room, losses told with the next."""

    def __init__(self, slot_bytes: int, start: int):
        self.slot, self.size = slot_bytes, PAGE
        self.fd = os.memfd_create("perf")
        os.ftruncate(self.fd, 2 * PAGE)
        self.memory = mmap.mmap(self.fd, 0)
        self.head, self.lost = start, 0
        struct.pack_into("<QQ", self.memory, DATA_HEAD, start, start)

    def _append(self, record: bytes) -> None:
        for byte, at in zip(record, range(self.head, self.head + len(record)), strict=True):
            self.memory[PAGE + at % self.size] = byte
        self.head += len(record)
        struct.pack_into("<Q", self.memory, DATA_HEAD, self.head)

    def write(self, kind: str, serial: int) -> bool:
        """One record; False where it was lost."""
        stride = stride_of(self.slot)
        lost = struct.pack("<IHHQQ", RECORD_LOST, 0, 24, 7, self.lost) if self.lost else b""
        if kind == "other":
            record = struct.pack("<IHHQQQ", THROTTLE, 0, 32, 1, 2, 3)
        else:
            body = struct.pack("<Q", serial) * ((self.slot - RING_HEADER_BYTES) // 8)
            misc = serial & 3  # whether user or kernel code was interrupted: it says nothing about the record
            head = struct.pack("<IHHI", RECORD_SAMPLE, misc, stride, stride - RAW_OFFSET)
            record = (head + body).ljust(stride, b"\xee")
        tail = struct.unpack_from("<Q", self.memory, DATA_TAIL)[0]
        if len(lost) + len(record) > self.size - (self.head - tail):
            self.lost += kind == "sample"
            return kind == "other"
        self._append(lost + record)
        self.lost = 0
        return True


@pytest.mark.needs("recorder")
@settings(max_examples=drawn(60))
@given(
    st.sampled_from(list(STREAMS.values())),
    st.integers(0, 3 * PAGE // 8),
    st.lists(st.sampled_from(["sample"] * 6 + ["many", "many", "other", "take"]), max_size=60),
)
def test_perf_records_come_out_once_in_order_and_every_loss_is_told(slot_bytes: int, start: int, actions: list[str]) -> None:
    kernel = FakeKernel(slot_bytes, start * 8)
    buffer = Buffer(kernel.fd, slot_bytes, PAGE, perf=True)
    serial, kept, taken = 0, [], []
    for action in [*actions, "take", "sample", "take"]:
        if action == "take":
            taken.append(buffer.take())
            continue
        for _ in range(25 if action == "many" else 1):
            if kernel.write("other" if action == "other" else "sample", serial) and action != "other":
                kept.append(serial)
            serial += action != "other"
    slots = np.concatenate(taken)
    assert slots[:, 8:].copy().view("<u8").tolist() == [[number] * ((slot_bytes - 8) // 8) for number in kept]
    assert (slots[:, :8].copy().view("<u4") == [slot_bytes - RING_HEADER_BYTES, 0]).all()
    assert buffer.lost == serial - len(kept)
    kernel.memory.close()
    os.close(kernel.fd)


@pytest.fixture(scope="module")
def demo_perf(demo: DemoRun, tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The same seeded run through perf buffers."""
    folder = tmp_path_factory.mktemp("demo-perf") / "run"
    done = trace("run", "--buffer", "perf", "--no-views", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return DemoRun(folder, done.stdout + done.stderr)


@pytest.mark.long
@pytest.mark.needs("probes", "htp")
def test_both_buffers_see_the_same_run(demo: DemoRun, demo_perf: DemoRun) -> None:
    one, other = tables_module.load_tables(demo.folder), tables_module.load_tables(demo_perf.folder)
    assert demo_perf.manifest["buffer"] == "perf" and demo_perf.manifest["lost"] == {}
    by_the_machine = {
        "sched",
        "thread_states",
        "threads",
        "counters",
        "reads",
        "writes",
        "faults",
        "blocks",
        "qnn_gaps",
        "clocks",
    }
    for name in one.keys() - by_the_machine:  # the rows of these depend on who ran when, not on what the program did
        assert len(one[name]) == len(other[name]), name
    same = ["token_id", "layer", "expert", "n_tokens", "backend", "tier", "cache"]
    left, right = (t["experts"].sort_values(same)[same].reset_index(drop=True) for t in (one, other))
    assert left.equals(right)


@pytest.mark.needs("probes")
@pytest.mark.parametrize("buffer", ["ring", "perf"])
def test_this_kernel_accepts_every_program(buffer: str) -> None:
    trial = recorder_output("--buffer", buffer, "--try-programs")
    assert trial["programs"] > 100 and trial["refused"] == {}


@pytest.mark.needs("probes")
def test_perf_buffers_record_every_call_of_a_program_and_its_child(tmp_path: Path, on: tuple[str, ...]) -> None:
    options = ("--no-views", "--buffer", "perf", "--levels", "token", "-o", str(tmp_path / "run"), *on)
    done = trace("run", *options, "--", sys.executable, STEPS, "3000", "0", "--child", env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.is_whole and run.manifest["buffer"] == "perf"
    for record in ("token_begin", "token_end"):
        rows = run.records(record)
        for pid in np.unique(rows["pid"]):
            assert rows["seq"][rows["pid"] == pid].tolist() == list(range(3000))
        assert len(np.unique(rows["pid"])) == 2


@pytest.mark.long
@pytest.mark.needs("probes")
@pytest.mark.parametrize("buffer", ["ring", "perf"])
def test_what_a_full_buffer_loses_is_hits_minus_records(tmp_path: Path, buffer: str) -> None:
    """Two threads call one site as fast as they can, into the smallest buffer, while the recorder is stopped again and again."""
    program = compile_c(tmp_path / "stress", "stress.c", flags=WITH_SITES)
    options = ("--no-views", "--levels", "expert", "--ring-mib", "1", "--buffer", buffer, "-o", str(tmp_path / "run"))
    tracer = begin_trace("run", *options, "--", str(program), "3", "2")
    manifest_when(lambda manifest: True, tmp_path / "run", tracer)
    time.sleep(1)  # by then the program's first instructions have been answered
    while tracer.poll() is None:
        if pid := recorder_of(tracer):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    printed, said = tracer.communicate(timeout=60)
    assert tracer.returncode == 0, said
    run = RawRecording(tmp_path / "run")
    hits = next(row["hits"] for row in run.manifest["probes"] if row["program"] == "moescope_evict")
    lost = run.manifest["lost"].get("evict", 0)
    assert lost > 0 and hits == json.loads(printed)["hits"] == lost + len(run.records("evict"))
    if buffer == "perf":  # a CPU tells of its losses with the next record that finds room: those after the last one stay untold
        assert 0 < sum(run.manifest["lost_by_cpu"]["events"].values()) <= sum(run.manifest["lost"].values())
