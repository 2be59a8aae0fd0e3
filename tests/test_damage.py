"""Damage of a recording and of what is kept beside it: found by checksums, named, and never without a word."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions import cached
from analyzer.records.reading import Source
from analyzer.records.stamps import outdated_views, recording_stamp, stamp_of
from analyzer.tables.store import load_tables
from moescope import plain
from moescope.__main__ import main
from tests.golden import Golden
from tracer.recording.checksums import digest
from tracer.recording.format import SEAL_BYTES, Recording, with_checksum, write_manifest
from views.commands.open import written_trace
from workloads.recordings import Writer, runtime


def damage(folder: Path) -> list[str]:
    return Source(Recording(folder)).damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime(3).write_sealed(tmp_path_factory.mktemp("damage") / "whole")


def test_a_whole_recording_has_no_damage(whole: Path) -> None:
    assert damage(whole) == []


@given(
    st.sampled_from(["events.bin", "details.bin", "events.sum", "details.sum", "manifest.json"]),
    st.floats(0, 1),
    st.integers(0, 7),
)
def test_every_flipped_bit_is_found_in_the_file_that_holds_it(whole: Path, name: str, where: float, bit: int) -> None:
    path = whole / name
    content = path.read_bytes()
    if not content:
        return
    at = int(where * (len(content) - 1))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    try:
        found = damage(whole)
    except Exception as error:
        assert "manifest.json" in str(error)
    else:
        same = name == "manifest.json" and json.loads(path.read_bytes()) == json.loads(content)
        assert same or any(name.split(".")[0] in line for line in found)
    finally:
        path.write_bytes(content)


def test_damage_is_named_by_its_place_and_by_the_records_that_it_costs(tmp_path: Path, golden: Golden) -> None:
    folder = Writer().add("token_begin", 9, ts=np.arange(9) * 10**9).write_sealed(tmp_path / "run")
    content = bytearray((folder / "events.bin").read_bytes())
    content[5 * 64 + 40] ^= 1
    (folder / "events.bin").write_bytes(content)
    found = damage(folder)
    (folder / "events.bin").write_bytes(content[:-64])
    found += damage(folder)
    (folder / "events.sum").unlink()
    killed = Writer().add("token_begin", 9, ts=np.arange(9)).write_sealed(tmp_path / "killed", slots=0)
    golden("warnings", "\n".join([*found, *damage(folder), *damage(killed)]))


def test_recordings_older_than_checksums_are_read_without_a_word(tmp_path: Path) -> None:
    assert damage(runtime().write(tmp_path / "run")) == []


@pytest.mark.parametrize("number", ["5e-5", "5e-05", "0.00005"])
def test_a_manifest_is_sealed_over_its_bytes_however_its_numbers_are_written(tmp_path: Path, number: str) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    path = folder / "manifest.json"
    body = path.read_bytes()[:-SEAL_BYTES].replace(b"{", b'{"number": %s, ' % number.encode(), 1)
    path.write_bytes(body + f'{digest(body)}"}}\n'.encode())
    assert damage(folder) == []
    path.write_bytes(path.read_bytes().replace(number.encode(), b"5e-6", 1))
    assert len(damage(folder)) == 1 and "manifest.json" in damage(folder)[0]


def test_a_manifest_sealed_over_its_content_as_earlier_ones_is_checked(tmp_path: Path) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    path = folder / "manifest.json"
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text())), indent=1))
    assert damage(folder) == []
    path.write_text(path.read_text().replace('"complete"', '"recording"'))
    assert len(damage(folder)) == 1 and "manifest.json" in damage(folder)[0]


@pytest.mark.parametrize("lost", [{"checksum"}, {"checksum", "checksums"}])
def test_a_manifest_that_lost_its_checksum_is_not_taken_for_an_older_one(tmp_path: Path, lost: set[str]) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({key: value for key, value in manifest.items() if key not in lost}))
    assert len(damage(folder)) == 1 and "manifest.json" in damage(folder)[0]


def test_kept_tables_whose_index_lost_a_warning_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    content = (folder / "events.bin").read_bytes()
    (folder / "events.bin").write_bytes(content[:-1] + b"\xff")
    load_tables(folder)
    index = folder / "tables" / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"damage": []}))
    plain.warn.cache_clear()
    capsys.readouterr()
    load_tables(folder)
    assert "events.bin" in capsys.readouterr().err


def test_every_reader_of_a_damaged_recording_is_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    content = (folder / "events.bin").read_bytes()
    (folder / "events.bin").write_bytes(content[:-1] + b"\xff")
    for verb in ("time", "predict steps", "summary"):  # the first makes the tables, the others find them made
        plain.warn.cache_clear()
        assert main([*verb.split(), str(folder)]) == 0
        assert "events.bin" in capsys.readouterr().err
    assert main(["summary", str(folder), "--json"]) == 0
    assert "events.bin" in json.loads(capsys.readouterr().out)["missing"][0]


def test_damaged_tables_and_summaries_are_made_again(tmp_path: Path) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    summary = cached.cached_summary(folder)
    table, kept = folder / "tables" / "tokens.parquet", folder / "tables" / "summary.json"
    whole = table.read_bytes()
    for at in range(4, len(whole) - 4, 97):
        table.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        load_tables(folder, ["tokens"])
        assert table.read_bytes() == whole
    content = json.loads(kept.read_text())
    del content["summary"]["tokens"]["prefill_tokens"]
    kept.write_text(json.dumps(content))
    assert cached.cached_summary(folder) == summary


def test_views_say_what_they_were_made_from_and_that_the_recording_changed_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    assert main(["write", str(folder)]) == main(["write", str(folder), "--gzip", "--only", "trace"]) == 0
    names = ["profdag.html", "report.html", "trace.pftrace", "trace.pftrace.gz"]
    manifest = Recording(folder).manifest
    assert {stamp_of(folder / name) for name in names} == {recording_stamp(manifest)}
    assert outdated_views(folder, manifest) == []
    shutil.copytree(folder, tmp_path / "copy")
    assert outdated_views(tmp_path / "copy", manifest) == []
    write_manifest(folder, manifest | {"state": "complete", "duration_ns": 1})
    changed = Recording(folder).manifest
    assert outdated_views(folder, changed) == names
    assert main(["summary", str(folder)]) == 0
    assert ", ".join(names) in " ".join(capsys.readouterr().out.split())
    assert stamp_of(written_trace(folder, changed)) == recording_stamp(changed) and capsys.readouterr().err
    assert written_trace(folder, changed).is_file() and not capsys.readouterr().err
    assert main(["write", str(folder)]) == 0
    assert outdated_views(folder, changed) == ["trace.pftrace.gz"]


def test_a_view_of_an_older_release_or_no_view_at_all_is_not_called_outdated(tmp_path: Path) -> None:
    folder = runtime(3).write_sealed(tmp_path / "run")
    for name in ("trace.pftrace", "report.html", "trace.pftrace.gz", "notes.html"):
        (folder / name).write_bytes(b"nothing of ours")
    assert outdated_views(folder, Recording(folder).manifest) == []


@pytest.mark.parametrize("value", [1 << 70, "9", None, [7], -5])
def test_threads_of_a_manifest_with_impossible_numbers_are_left_out(tmp_path: Path, value: object) -> None:
    folder, manifest = runtime(3).write_sealed(tmp_path / "run"), Recording(tmp_path / "run").manifest
    threads = [{"tid": 4242, "pid": 4000, "name": "kept"}, {"tid": value, "pid": 4000}, {"tid": 4243, "pid": value}]
    write_manifest(folder, manifest | {"threads": threads})
    assert main(["summary", str(folder)]) == main(["write", str(folder), "--only", "trace"]) == 0
    named = load_tables(folder)["threads"].set_index("tid")["name"]
    assert named[4242] == "kept" and 4243 not in named
