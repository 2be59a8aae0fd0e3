"""Attaching and detaching again and again leaves a living target, the kernel and the tracer as they were."""

import shutil
import time
from pathlib import Path

import pytest

from workloads.attach_cycles import end_steady, run_cycles, start_steady
from workloads.stress import build_program, record_stress

pytestmark = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
CYCLES = 3


@pytest.mark.long
@pytest.mark.alone  # whoever records another process of the same library changes its sites in this one, too
def test_cycles_on_a_living_target_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.attach_cycles.SETTLE_SECONDS", 60.0)
    program = start_steady(tmp_path)
    try:
        time.sleep(0.2)
        cycles = run_cycles(program.pid, CYCLES)
    finally:
        told = end_steady(program)
    assert told["wrong"] == 0 and told["exit_code"] == 0 and told["rounds"] > 10
    assert all(cycle.records > 0 and cycle.probes >= 12 for cycle in cycles)
    assert [cycle.changed_sites for cycle in cycles] == [0] * CYCLES
    assert [cycle.left_in_kernel for cycle in cycles] == [0] * CYCLES
    assert all(0 < cycle.resident_bytes < 64 << 20 for cycle in cycles)


@pytest.mark.parametrize(("ring_mib", "threads"), [(32, 1), (1, 2)])
def test_every_hit_is_a_record_or_a_counted_loss(tmp_path: Path, ring_mib: int, threads: int) -> None:
    result = record_stress(build_program(tmp_path), 1.0, threads, ring_mib)
    assert result.hits == result.records + result.lost
    assert result.hits >= result.records > 1000
    assert result.bytes_per_record < 65


def test_a_ring_larger_than_what_is_written_loses_nothing(tmp_path: Path) -> None:
    assert record_stress(build_program(tmp_path), 1.0, 1, 256).lost == 0
