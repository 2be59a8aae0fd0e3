"""The two kinds of buffer: what is written comes out once and in order, and what is lost is counted."""

import mmap
import os
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, DemoRun, trace
from tracer.kernel.perf_buffer import DATA_HEAD, DATA_TAIL, PAGE, RAW_OFFSET, RECORD_LOST, RECORD_SAMPLE, CpuBuffer, stride_of
from tracer.recording.drain import BUSY_SHARE, IDLE_SHARE, QUICK_S, SLOW_S, WATCHFUL_S, Pace
from tracer.recording.format import RING_HEADER_BYTES, STREAMS
from workloads.raw_records import RawRecording

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
THROTTLE = 5
Item = tuple[str, int]


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


@settings(max_examples=60)
@given(
    st.sampled_from(list(STREAMS.values())),
    st.integers(0, 3 * PAGE // 8),
    st.lists(st.sampled_from(["sample"] * 6 + ["many", "many", "other", "take"]), max_size=60),
)
def test_perf_records_come_out_once_in_order_and_every_loss_is_told(slot_bytes: int, start: int, actions: list[str]) -> None:
    kernel = FakeKernel(slot_bytes, start * 8)
    buffer = CpuBuffer(mmap.mmap(kernel.fd, 2 * PAGE), slot_bytes)
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
    buffer.close()
    kernel.memory.close()
    os.close(kernel.fd)


@given(st.lists(st.floats(0, 1), max_size=40), st.sampled_from([WATCHFUL_S, SLOW_S]))
def test_the_drain_hurries_when_a_buffer_fills_and_rests_when_it_does_not(shares: list[float], slowest: float) -> None:
    pace = Pace(slowest)
    waits = [pace.seconds]
    for share in shares:
        pace.after(share, False)
        waits.append(pace.seconds)
    for share, (before, after) in zip(shares, pairwise(waits), strict=True):
        assert QUICK_S / 8 <= after <= slowest
        assert after <= before if share >= IDLE_SHARE else after >= before or after == QUICK_S
        assert after < before or after == QUICK_S / 8 or share <= BUSY_SHARE
    for _ in range(10):
        pace.after(0.0, False)
    assert pace.seconds == slowest
    pace.after(0.0, True)
    assert pace.seconds == QUICK_S


@pytest.fixture(scope="module")
def demo_perf(demo: DemoRun, tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The same seeded run through perf buffers."""
    folder = tmp_path_factory.mktemp("demo-perf") / "run"
    done = trace("run", "--buffer", "perf", "--no-views", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return DemoRun(folder, done.stdout + done.stderr)


@pytest.mark.needs("probes", "htp")
def test_both_buffers_see_the_same_run(demo: DemoRun, demo_perf: DemoRun) -> None:
    one, other = tables_module.load(demo.folder), tables_module.load(demo_perf.folder)
    assert demo_perf.manifest["buffer"] == "perf" and demo_perf.manifest["lost"] == {}
    by_the_machine = {"sched", "thread_states", "threads", "counters", "reads", "faults", "blocks", "qnn_gaps", "clocks"}
    for name in one.keys() - by_the_machine:  # the rows of these depend on who ran when, not on what the program did
        assert len(one[name]) == len(other[name]), name
    same = ["token_id", "layer", "expert", "n_tokens", "backend", "tier", "cache"]
    left, right = (t["experts"].sort_values(same)[same].reset_index(drop=True) for t in (one, other))
    assert left.equals(right)


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


@pytest.mark.needs("probes")
@pytest.mark.parametrize("buffer", ["ring", "perf"])
def test_what_a_tiny_buffer_loses_is_hits_minus_records(tmp_path: Path, buffer: str) -> None:
    """Through the session itself: the command line offers no buffer this small."""
    script = f"""
from pathlib import Path
from tracer.engines import choose
from tracer.session import Options, Session
from tracer.target.process import Target
from tracer.recording.paths import invoking_user
engines, owner = choose(["moescope"]), invoking_user()
options = Options(Path({str(tmp_path)!r}), engines, {{"token"}}, buffer={buffer!r}, ring_bytes=8192, owner=owner)
with Session(options) as session:
    session.load()
    target = Target([{sys.executable!r}, {STEPS!r}, "50000", "0"], options.owner)
    try:
        session.follow(target)
        target.release()
        session.run(lambda _: None)
    finally:
        session.finish()
"""
    done = trace_script(script)
    assert done == 0
    run = RawRecording(tmp_path)
    hits = {row["program"]: row["hits"] for row in run.manifest["probes"]}
    for record in ("token_begin", "token_end"):
        lost = run.manifest["lost"].get(record, 0)
        assert lost > 0 and hits[f"moescope_{record}"] - lost == len(run.records(record))
    by_cpu = run.manifest["lost_by_cpu"]
    if buffer == "perf":  # a CPU tells of its losses with the next record that finds room: those after the last one stay untold
        told, lost = sum(by_cpu["events"].values()), sum(run.manifest["lost"].values())
        assert 0 < told <= lost


def trace_script(script: str) -> int:
    """Run a script of ours in a process of its own; its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=False).returncode
