"""Operators that wait for the disk: the phase and the figures of a row are those of the same steps."""

import re

import numpy as np

from analyzer.questions.disk_faults import disk_faults
from workloads import tables_fixture as fixture

MIB = 1 << 20


def faulty(op_ids: list[int], kinds: list[str], waited: list[int]) -> fixture.Tables:
    """A prefill and five decode steps of two layers; faults on their operators' main threads."""
    _, tables = fixture.make_tables(tokens=6, layers=2, npu=False)
    operators = tables["operators"].set_index("op_id").loc[op_ids]
    begin = operators["begin_ns"].to_numpy()
    tables["faults"] = fixture.frame(
        "faults", token_id=operators["token_id"].to_numpy(), op_id=np.array(op_ids), pid=fixture.PID, tid=fixture.MAIN,
        kind=kinds, bytes=MIB, begin_ns=begin, end_ns=begin + waited, fault_id=np.arange(len(op_ids)),
    )  # fmt: skip
    return tables


def operators_of(step: int, layer: int) -> list[int]:
    _, tables = fixture.make_tables(tokens=6, layers=2, npu=False)
    rows = tables["operators"].query("token_id == @step and layer == @layer")
    return rows["op_id"].tolist()


def test_faults_of_prefill_are_not_told_of_decode() -> None:
    rows = disk_faults(faulty(operators_of(0, 0)[:2] + operators_of(0, 1)[:1], ["major"] * 3, [500, 700, 900]))
    assert [(row.phase, row.layers, row.steps, row.of_steps, row.faults) for row in rows] == [("prefill", (0, 1), 1, 1, 3)]
    assert (rows[0].bytes, rows[0].waited_ns) == (3 * MIB, 2100)
    assert re.findall(r"[\d.]+", rows[0].text) == ["0", "1", "1", "1", "3", "3.0"]


def test_each_phase_has_its_own_layers_steps_and_sums_and_the_longer_wait_comes_first() -> None:
    decode = [operators_of(step, 1)[0] for step in (2, 4)]
    rows = disk_faults(faulty([operators_of(0, 0)[0], *decode, decode[0]], ["major"] * 4, [100, 300, 400, 50]))
    assert [(row.phase, row.layers, row.steps, row.of_steps, row.faults, row.waited_ns) for row in rows] == [
        ("decode", (1, 1), 2, 5, 3, 750),
        ("prefill", (0, 0), 1, 1, 1, 100),
    ]
    assert re.findall(r"[\d.]+", rows[0].text) == ["1", "2", "5", "3", "3.0"]


def test_faults_outside_steps_and_minor_ones_that_did_not_sleep_are_no_waits() -> None:
    tables = faulty([operators_of(1, 0)[0]] * 2, ["minor", "major"], [100, 100])
    tables["thread_states"] = tables["thread_states"].iloc[:0]
    assert [row.faults for row in disk_faults(tables)] == [1]
    tables["faults"] = tables["faults"].assign(token_id=-1)
    assert disk_faults(tables) == []
