"""Many recordings in a folder and in an object store: made into tables on Dask, asked as one, and one that is damaged."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analyzer.commands._show import map_recordings
from analyzer.tables.recording_folders import RecordingFolder, make_tables, recording_folders
from moescope.__main__ import main
from moescope.scratch import locked_folder
from tests.conftest import rest_long, wait_until
from workloads.recordings import runtime

pytest.importorskip("distributed")
BUILDS, DEVICES, RUNS = ("v1", "v2"), ("board/1", "phone"), 3
DAMAGED = ("device=phone/build=v2/run-1", "device=phone/build=v1/run-2")


@dataclass
class Store:
    """Where the recordings lie, and how they are asked."""

    root: str
    capsys: pytest.CaptureFixture[str]

    def said(self, *words: str) -> tuple[int, Any, str]:
        """(exit code, JSON, standard error) of a verb."""
        code = main([*words, "--json"])
        said = self.capsys.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err


def recorded(root: Path) -> None:
    """Twelve recordings, of as many steps as their numbers; one has a manifest that was cut off, one lost its."""
    for number, (device, build, run) in enumerate((d, b, r) for d in DEVICES for b in BUILDS for r in range(RUNS)):
        folder = root / f"device={device.replace('/', '%2F')}" / f"build={build}" / f"run-{run}"
        clock = {"monotonic_ns": 0, "realtime_ns": (1_700_000_000 + number) * 10**9}
        runtime(3 + number).write(folder, clocks=[clock])
    cut, lost = (root / name / "manifest.json" for name in DAMAGED)
    cut.write_text(cut.read_text()[:1000])
    lost.unlink()


@pytest.fixture(params=rest_long(["folder", "s3"], "folder"))
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Iterator[Store]:
    recorded(tmp_path / "recordings")
    if request.param == "folder":
        yield Store(str(tmp_path / "recordings"), capsys)
        return
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    from workloads.object_store import object_store

    with object_store("bucket") as env:
        for name in (name for name in env if name.startswith("AWS_")):
            monkeypatch.setenv(name, env[name])
        s3fs.S3FileSystem(skip_instance_cache=True).put(str(tmp_path / "recordings"), "bucket/recordings", recursive=True)
        yield Store("s3://bucket/recordings", capsys)


def names_the_damaged(text: str) -> bool:
    lines = text.strip().splitlines()
    return len(lines) == len(DAMAGED) and all(any(name in line for line in lines) for name in DAMAGED)


def test_recordings_are_made_tables_and_asked_as_one(store: Store) -> None:
    code, answer, errors = store.said("query", store.root, "--dask", "2" if "://" in store.root else "")
    assert code == 1 and answer["recordings"] == 10 and len(answer["failed"]) == 2 and names_the_damaged(errors)
    before = kept(store)
    assert len(before) == 10

    sql = "select device, build, run, count(*) n from tokens join recordings using (recording) group by all"
    code, steps, errors = store.said("query", store.root, sql)
    assert code == 1 and names_the_damaged(errors)
    numbers = [(device, build, f"run-{run}") for device in DEVICES for build in BUILDS for run in range(RUNS)]
    damaged = [("phone", "v2", "run-1"), ("phone", "v1", "run-2")]
    expected = {of: 3 + number for number, of in enumerate(numbers) if of not in damaged}
    assert {(row["device"], row["build"], row["run"]): row["n"] for row in steps["rows"]} == expected
    code, texts, _ = store.said("query", f"{store.root}/device=board*/**", "select distinct type from operators order by 1")
    assert code == 0 and [row["type"] for row in texts["rows"]] == ["attention", "experts"]

    code, history, errors = store.said("history", store.root)
    assert code == 1 and names_the_damaged(errors)
    runs = {(row["device"], row["build"]): row["runs"] for row in history["builds"] if row["metric"] == "TPOT, median"}
    assert runs == {("board/1", "v1"): 3, ("board/1", "v2"): 3, ("phone", "v1"): 2, ("phone", "v2"): 2}

    sides = f"{store.root}/device=board*/build=v1/*", f"{store.root}/device=board*/build=v2/*"
    code, comparison, errors = store.said("compare", sides[0], "::", sides[1])
    assert code == 0 and comparison["runs"] == {side: ["run-0", "run-1", "run-2"] for side in ("base", "cand")}, errors
    assert kept(store) == before  # nothing was made twice


def kept(store: Store) -> dict[str, Any]:
    """When each recording's tables were written."""
    found = recording_folders(store.root)
    found[0].filesystem.invalidate_cache()
    indices = {str(place): f"{place.path}/tables/index.json" for place in found}
    return {name: found[0].filesystem.modified(index) for name, index in indices.items() if found[0].filesystem.exists(index)}


def lost_once(place: RecordingFolder) -> str:
    """Make tables; the worker that has begun to write those of run-1 of a build is lost the first time."""
    mark = Path(place.path) / "was-read"
    if place.name == "run-1" and not mark.exists():
        mark.touch()
        folder, _ = locked_folder(Path(place.path), ".tables-")
        (folder / "tokens.parquet").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return make_tables(place).name


def deadly(place: RecordingFolder) -> str:
    """Ends every worker that reads run-1."""
    if place.name == "run-1":
        os.kill(os.getpid(), signal.SIGKILL)
    return place.name


def last_first(place: RecordingFolder) -> str:
    """Answers for run-0 once it has answered for run-2."""
    answered = Path(place.path).with_name("answered")
    if place.name == "run-2":
        answered.touch()
    assert place.name != "run-0" or wait_until(answered.exists)
    return place.name


def test_answers_have_the_order_of_their_recordings(tmp_path: Path) -> None:
    recorded(tmp_path)
    made, failures = map_recordings(last_first, recording_folders(f"{tmp_path}/device=board*/build=v1/*"), "2")
    assert made == ["run-0", "run-1", "run-2"] and failures == []


@pytest.mark.long
def test_a_lost_worker_costs_no_recording(tmp_path: Path) -> None:
    recorded(tmp_path)
    made, failures = map_recordings(lost_once, recording_folders(f"{tmp_path}/device=board*/**"), "2")
    assert made == 2 * ["run-0", "run-1", "run-2"] and failures == []
    assert len(list(tmp_path.rglob("was-read"))) == 2 and len(list(tmp_path.rglob("index.json"))) == 6
    assert not list(tmp_path.rglob(".tables-*"))


@pytest.mark.long
def test_a_recording_that_ends_every_worker_is_named_and_the_others_go_on(tmp_path: Path, capsys) -> None:
    recorded(tmp_path)
    made, failures = map_recordings(deadly, recording_folders(f"{tmp_path}/device=board*/build=v1/*"), "2")
    assert made == ["run-0", "run-2"] and [failure.place.name for failure in failures] == ["run-1"]
    assert f"{failures[0].place}: " in capsys.readouterr().err


def test_what_cannot_be_asked_of_many_says_so(tmp_path: Path, capsys) -> None:
    recorded(tmp_path)
    board = f"{tmp_path}/device=board*/build=v1/*"
    for words in (
        ("query", board, "select * from time"),
        ("query", f"{tmp_path}/nothing*", "select 1"),
        ("write", board, "--only", "tables", "--out", str(tmp_path / "out")),
        ("query", board, "copy tokens to 'x'"),
    ):
        assert main(list(words)) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
