"""Tables as they are handed on: Arrow as declared, frames of it, kept files, and SQL that sees these and nothing else."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest

from analyzer.commands.query import query_tables
from analyzer.errors import AnalysisError
from analyzer.records.schema import TABLES, frame_of
from analyzer.tables import store
from analyzer.tables.store import LazyTables, build_tables, load_tables
from moescope.scratch import scratch_folder
from tests.conftest import ROOT
from tests.test_analyzer_tables import llama
from tracer.recording.format import Recording
from workloads.recordings import runtime


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runtime().write(tmp_path_factory.mktemp("store") / "it's a run")
    load_tables(folder)
    return folder


@pytest.mark.parametrize("kept", [True, False])
def test_arrow_has_the_declared_types_and_each_text_once(run: Path, kept: bool) -> None:
    tables = load_tables(run) if kept else build_tables(Recording(run), most=7, block=2)
    assert set(tables.paths) == (set(TABLES) if kept else set())
    assert tables["operators"]["op_id"].tolist() == list(range(len(tables["operators"])))
    for name, columns in TABLES.items():
        table = tables.arrow(name)
        assert [(field.name, field.type) for field in table.schema] == [(c.name, c.arrow_type) for c in columns]
        for column in table.columns:
            if pyarrow.types.is_dictionary(column.type):
                values = [value for chunk in column.chunks for value in chunk.dictionary.to_pylist()]
                assert len(set(values)) == len(values)


def test_a_table_is_read_when_it_is_asked_for_and_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    monkeypatch.setattr(store, "frame_of", lambda table: frames.append(table.num_rows) or pd.DataFrame({"rows": [1]}))
    tables = load_tables(run, ("operators", "tokens"))
    assert list(tables) == ["operators", "tokens"] and frames == []
    assert tables["tokens"] is tables["tokens"] and frames == [3]
    assert tables.arrow("operators") is tables.arrow("operators")


def test_another_table_takes_the_place_of_one_and_leaves_the_others(run: Path) -> None:
    tables = load_tables(run)
    tokens = tables["tokens"]
    changed = tables.with_table("operators", tables["operators"].assign(type="NEW")).with_table("own", pd.DataFrame({"x": [7]}))
    assert changed.arrow("operators").column("type").to_pylist() == ["NEW"] * 6
    assert tables["operators"]["type"].tolist() == ["attention", "experts"] * 3
    assert changed["tokens"] is tokens and changed.arrow("own").to_pydict() == {"x": [7]}
    assert "operators" not in changed.paths and {**changed}.keys() == changed.keys()


def test_frames_in_memory_are_arrow_as_declared_too(run: Path) -> None:
    whole = load_tables(run)
    given = LazyTables.of(dict(whole))
    for name in whole:
        assert given.arrow(name).schema == whole.arrow(name).schema
        pd.testing.assert_frame_equal(frame_of(given.arrow(name)), whole[name])
    assert LazyTables.of(whole) is whole


def test_tables_outlast_those_that_are_made_again(tmp_path: Path) -> None:
    folder = runtime(2).write(tmp_path)
    tables = load_tables(folder)
    runtime(5).write(folder)
    assert len(load_tables(folder)["tokens"]) == 5
    assert len(tables["tokens"]) == 2


def test_sql_answers_what_the_tables_hold(run: Path) -> None:
    tables = load_tables(run)
    names, rows = query_tables(run, "select type, count(*) n, sum(duration_ns) ns from operators group by type order by type")
    expected = tables["operators"].groupby("type")["duration_ns"].agg(["size", "sum"])
    assert names == ["type", "n", "ns"] and rows == list(expected.itertuples(name=None))
    assert query_tables(run, "select sources from tensors order by tensor")[1] == [([3, 4],), ([11],)]
    assert query_tables(run, "select distinct token_id from gaps order by 1")[1] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('{run}/manifest.json')",
        "copy (select 1 from tokens) to '{run}/tables/tokens.parquet' (use_tmp_file false)",
        "explain analyze copy (select 1 from tokens) to '{run}/tables/tokens.parquet' (use_tmp_file false)",
        "select 1 from tokens; set enable_external_access = true",
        "attach '{run}/own.db' as own",
    ],
)
def test_sql_sees_nothing_outside_and_changes_nothing(run: Path, sql: str) -> None:
    with pytest.raises(AnalysisError, match=r"^query: "):
        query_tables(run, sql.format(run=str(run).replace("'", "''")))
    assert len(load_tables(run)["tokens"]) == 3 and not (run / "own.db").exists()


def test_sql_reads_a_recording_that_keeps_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama().write(tmp_path)
    monkeypatch.setattr(store, "build_and_store", lambda *given: (_ for _ in ()).throw(PermissionError()))
    assert query_tables(folder, "select name from operators where token_id = 0 order by op_id")[1] == [
        ("ffn_out-0",),
        ("attn_out-1",),
    ]
    assert not (folder / "tables").exists()


def test_a_query_says_nothing_but_its_answer(run: Path) -> None:
    command = [sys.executable, "-m", "moescope", "query", str(run), "select count(*) n from tokens", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert (json.loads(done.stdout)["rows"], done.stderr) == ([{"n": 3}], "")


def test_a_frame_s_numbers_lie_where_arrow_has_them(run: Path) -> None:
    tables = load_tables(run)
    frame, column = tables["operators"]["begin_ns"].to_numpy(), tables.arrow("operators").column("begin_ns")
    assert np.shares_memory(frame, column.chunk(0).to_numpy())


FAULTS = """
import resource, sys
import numpy as np
from analyzer.records.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    arrays = [np.ones(1 << 20) for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_kept_memory_is_not_cleared_anew_for_every_array() -> None:
    def faults(way: str) -> int:
        command = [sys.executable, "-c", FAULTS, way]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    assert faults("kept") * 2 < faults("given back")


def test_what_a_killed_build_left_is_removed_by_the_next_and_what_another_works_in_is_not(run: Path) -> None:
    abandoned = run / ".tables-killed"
    abandoned.mkdir()
    (abandoned / "tokens.parquet").write_bytes(b"half")
    shutil.rmtree(run / "tables", ignore_errors=True)
    with scratch_folder(run, ".tables-") as busy:
        load_tables(run)
        assert busy.exists() and not abandoned.exists() and (run / "tables" / "index.json").exists()
    assert not busy.exists()


def test_folders_for_work_in_progress_begun_beside_each_other_all_stay(tmp_path: Path) -> None:
    def work(number: int) -> bool:
        with scratch_folder(tmp_path, "work-") as folder:
            (folder / "file").write_text(str(number))
            return (folder / "file").read_text() == str(number)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(2000)))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's folder")
def test_an_abandoned_folder_of_another_user_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "work-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with scratch_folder(tmp_path, "work-"):
        assert theirs.exists()
