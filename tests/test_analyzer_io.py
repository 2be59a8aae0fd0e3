"""I/O and counters of recordings whose truth is known, and the tables and figures that must come of them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.questions.summary import summarize
from analyzer.tables import io
from analyzer.tables.store import build_tables
from tests.conftest import drawn
from tracer.recording.format import Recording
from workloads.recordings import MAIN, WORKER, Writer

DISK, MODEL = 8 << 20 | 1, 4711
FILES = {"page_bytes": 4096, "files": [{"dev": DISK, "ino": MODEL, "path": "/models/moe.gguf"}]}
COUNTED = {"events": [{"name": "cycles"}, {"name": "faults"}]}
UNREAD = 2**64 - 1


def step() -> Writer:
    """A token 1000..3000 with one operator 1100..2000, in it expert 5 from 1200, in that a load 1300..1800."""
    w = Writer()
    w.add("token_begin", ts=1000, seq=0, phase=2, n_tokens=1)
    w.add("op_begin", ts=1100, tensor=11, type=2, layer=0)
    w.add("expert_begin", ts=1200, layer=0, expert=5)
    w.add("load_begin", ts=1300, layer=0, expert=5, reason=1)
    w.add("load_end", ts=1800, layer=0, expert=5)
    w.add("expert_end", ts=1900, layer=0, expert=5)
    w.add("op_end", ts=2000, tensor=11)
    w.add("token_end", ts=3000, seq=0)
    return w


def tables_of(w: Writer, folder: Path, **changes: object) -> dict[str, pd.DataFrame]:
    return build_tables(Recording(w.write(folder, **{"io": FILES, **changes})))


def test_a_fault_belongs_to_everything_that_its_thread_was_in_when_it_began(tmp_path: Path) -> None:
    w = step()
    w.add("page_fault", ts=1500, begin=1400, ino=MODEL, dev=DISK, page=3, added=8, flags=io.MAJOR | io.EXACT)
    w.add("page_fault", ts=1950, begin=1920, ino=MODEL, dev=DISK, page=16, flags=0)
    w.add("page_fault", ts=1960, tid=WORKER, begin=1400, ino=9, dev=DISK, page=1, flags=io.MAJOR)
    w.add("page_fault", ts=9000, flags=io.MAJOR)
    faults = tables_of(w, tmp_path)["faults"]
    assert faults["kind"].tolist() == ["major", "minor", "major", "major"]
    assert faults[["token_id", "op_id", "expert", "load_id"]].to_numpy().tolist() == [
        [0, 0, 5, 0],
        [0, 0, 5, -1],
        [0, -1, -1, -1],
        [-1, -1, -1, -1],
    ]
    assert faults["file"].tolist() == ["/models/moe.gguf"] * 2 + ["", ""]
    assert faults["device"].tolist() == ["8:1"] * 3 + [""]
    assert faults["offset"].tolist() == [3 * 4096, 16 * 4096, 4096, -1]
    assert faults["bytes"].tolist() == [8 * 4096, 0, 0, 0]
    assert faults["duration_ns"].tolist() == [100, 30, 560, -1]
    assert faults["exact"].tolist() == [True, False, False, False]


def test_reads_end_with_their_result_and_take_their_files_name_from_the_record_where_no_path_is_known(tmp_path: Path) -> None:
    w = step()
    w.add("io_file", ts=1, ino=12, dev=DISK, name=b"other.bin")
    w.add("read_begin", ts=1350, ino=MODEL, dev=DISK, offset=4096, bytes=100, fd=3, call=1)
    w.add("read_begin", ts=1360, tid=WORKER, ino=12, dev=DISK, bytes=2**32 - 1, fd=4, call=2)
    w.add("read_end", ts=1370, tid=WORKER, result=-5)
    w.add("read_end", ts=1750, result=60, added=2)
    w.add("read_end", ts=1760, result=1)
    w.add("read_begin", ts=2500, ino=MODEL, dev=DISK, fd=3, call=0)
    tables = tables_of(w, tmp_path)
    reads = tables["reads"]
    assert reads["file"].tolist() == ["/models/moe.gguf", "other.bin", "/models/moe.gguf"]
    assert reads["call"].tolist() == ["pread64", "readv", "read"]
    assert reads[["asked_bytes", "bytes", "error", "missed_bytes"]].to_numpy().tolist() == [
        [100, 60, 0, 8192],
        [-1, 0, 5, 0],
        [0, 0, 0, 0],
    ]
    assert reads["duration_ns"].tolist()[:2] == [400, 10] and reads["complete"].tolist() == [True, True, False]
    assert reads["load_id"].tolist() == [0, -1, -1]
    assert tables["unpaired"]["kind"].tolist() == ["read"]


def test_blocks_pair_by_device_and_sector_whatever_comes_between(tmp_path: Path) -> None:
    w = step()
    for ts, dev, sector, text in (
        (1400, DISK, 8, b"RA"),
        (1410, DISK, 16, b"WS"),
        (1420, DISK + 1, 8, b"R"),
        (1430, DISK, 99, b"FF"),
    ):
        w.add("block_issue", ts=ts, dev=dev, sector=sector, bytes=4096, rwbs=text)
    w.add("block_done", ts=1500, dev=DISK + 1, sector=8, cpu=1)
    w.add("block_done", ts=1600, dev=DISK, sector=16, error=-5)
    w.add("block_done", ts=1700, dev=DISK, sector=8)
    blocks = tables_of(w, tmp_path)["blocks"]
    assert blocks["operation"].tolist() == ["read", "write", "read", "flush"]
    assert blocks["duration_ns"].tolist()[:3] == [300, 190, 80] and blocks["complete"].tolist() == [True, True, True, False]
    assert blocks["error"].tolist() == [0, 5, 0, 0]
    assert (blocks["load_id"] == 0).all() and (blocks["expert"] == 5).all()


@pytest.mark.parametrize(("lost", "rest"), [({}, "whose end was not seen"), ({"block_done": 1}, "whose end was lost")])
def test_a_request_without_end_has_the_reason_that_the_records_give(tmp_path: Path, lost: dict, rest: str) -> None:
    w = step()
    for ts, sector in ((1000, 8), (1100, 16), (1200, 24), (1300, 24), (2900, 32)):
        w.add("block_issue", ts=ts, dev=DISK, sector=sector, bytes=4096, rwbs=b"R")
    w.add("block_done", ts=1200, dev=DISK, sector=8)  # 200 ns, the longest; sector 24 is asked for twice and answered once
    w.add("block_done", ts=1400, dev=DISK, sector=24)
    folder = w.write(tmp_path, lost=lost)
    told = summarize(Recording(folder), build_tables(Recording(folder)))["records"]
    assert told["begins_without_end"]["blocks"] == 3
    assert told["reasons"]["blocks"] == {"in flight at the end": 1, "issued again later": 1, rest: 1}


def test_the_summary_tells_how_much_was_read_and_what_waited(tmp_path: Path) -> None:
    w = step()
    w.add("page_fault", ts=1500, begin=1400, ino=MODEL, dev=DISK, added=2, flags=io.MAJOR)
    w.add("read_begin", ts=1850, ino=MODEL, dev=DISK, bytes=100, call=0)
    w.add("read_end", ts=1880, result=100)
    w.add("read_begin", ts=4000, ino=MODEL, dev=DISK, bytes=10, call=0)
    w.add("read_end", ts=4070, result=10)
    tables = tables_of(w, tmp_path)
    told = summarize(Recording(tmp_path), tables)["io"]
    assert (told["major_faults"], told["reads"], told["read_bytes"], told["fault_bytes"]) == (1, 2, 110, 8192)
    assert told["waited_ms"] == pytest.approx(200e-6)
    assert told["shares"] == {"tokens": 0.65, "operators": 0.65, "expert loads": 0.5}
    assert told["files"] == {"/models/moe.gguf": 8192 + 110}


def test_nothing_is_said_of_io_where_there_is_none(tmp_path: Path) -> None:
    tables = tables_of(step(), tmp_path)
    assert summarize(Recording(tmp_path), tables)["io"] == {}


def counted(w: Writer, ts: int, cycles: int, faults: int, tid: int = MAIN) -> None:
    w.add("pmc", ts=ts, tid=tid, values=[[cycles, faults, UNREAD, UNREAD]])


def test_counts_run_from_an_operators_begin_to_its_wait_or_its_end(tmp_path: Path) -> None:
    w = Writer()
    w.add("op_begin", ts=100, tensor=1, type=1)
    counted(w, 100, 1000, 5)
    w.add("op_begin", ts=120, tensor=2, type=1)
    counted(w, 120, 1200, 5)
    w.add("op_end", ts=180, tensor=2)
    counted(w, 180, 1900, 6)
    w.add("op_end", ts=200, tensor=1)
    counted(w, 200, 3000, 9)
    w.add("op_begin", ts=100, engine=2, tid=WORKER, tensor=64, type=1)
    counted(w, 100, 50, 0, WORKER)
    w.add("op_wait", ts=150, engine=2, tid=WORKER)
    counted(w, 150, 90, UNREAD, WORKER)
    w.add("op_begin", ts=160, engine=2, tid=WORKER, tensor=65, type=1)
    table = tables_of(w, tmp_path, pmc=COUNTED)["pmc"]
    wide = table.pivot(index=["tid", "op_id"], columns="event", values="value")
    assert wide["cycles"].dropna().tolist() == [2000, 700, 40]
    assert wide["faults"].dropna().tolist() == [4, 1]
    assert len(table) == 2 * 4 and table["event"].tolist() == ["cycles", "faults"] * 4


@settings(max_examples=drawn(20))
@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**40)), min_size=1, max_size=20), st.data())
def test_counts_are_differences_of_readings_and_a_lost_reading_is_not_a_number(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[int, int]], data: st.DataObject
) -> None:
    w, expected = Writer(), []
    w.add("op_end", ts=10)
    counted(w, 10, 0, 0)
    for i, (start, delta) in enumerate(values, 1):
        kept = data.draw(st.tuples(st.booleans(), st.booleans()))
        w.add("op_begin", ts=100 * i, tensor=i + 1, type=1)
        if kept[0]:
            counted(w, 100 * i, start, 0)
        w.add("op_end", ts=100 * i + 50, tensor=i + 1)
        if kept[1]:
            counted(w, 100 * i + 50, start + delta, 0)
        expected.append(float(delta) if all(kept) else np.nan)
    table = tables_of(w, tmp_path_factory.mktemp("pmc"), pmc={"events": [{"name": "cycles"}]})["pmc"]
    np.testing.assert_array_equal(table["value"].to_numpy(), expected)
