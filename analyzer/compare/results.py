"""One run's stored result: metrics, environment, series of steps and routing, small enough to store for every build.

A result is one Parquet file: the metrics are its rows, everything else JSON in its metadata. A recording has the same result.
"""

import contextlib
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet as parquet

from analyzer.compare.environment import begin_s, environment_of
from analyzer.compare.functions import with_unsampled
from analyzer.compare.graph import Skeleton, skeleton_of, unpack_skeleton
from analyzer.compare.metrics import DIMS, METRICS, RunTables, extract_metrics, metric_keys, routed_rows
from analyzer.errors import AnalysisError
from analyzer.questions.steady import steady_part
from analyzer.questions.step_origin import step_event
from analyzer.records.manifest import section
from analyzer.tables.recording_folders import RecordingFolder, is_pattern, recording_folders
from analyzer.tables.store import TABLES_VERSION, input_fingerprint, load_tables
from moescope.answers import note_emulator
from tracer.recording.format import Recording, RecordingError, is_whole, with_checksum

RESULT = "result.parquet"
ABOUT, GRAPH = b"moescope_result", b"moescope_graph"
RESULT_VERSION = 10
RENAMED = {"TPOT": "TPOT, median"}
"""Metrics with other names in older versions."""
SERIES_STEPS = 4000


class CompareError(AnalysisError):
    """A comparison cannot be made; the message has the reason and the remedy."""


@dataclass
class Result:
    """A run's inputs to a comparison. `metrics`: columns METRICS, indexed by key. `series`: ms of each decode step.

    `routes`: (layer, expert, rows). `graph`: the operators of one decode step. `began`: begin of the run (s), NaN if unknown.
    `build`, `device`: from the recording's path, "" if absent. `seal`: the checksum of the recording's manifest, "" if unknown.
    `place`: where it was read.
    """

    name: str
    metrics: pd.DataFrame
    environment: dict[str, Any] = field(default_factory=dict)
    series: list[float] = field(default_factory=list)
    routes: list[tuple[int, int, int]] = field(default_factory=list)
    graph: Skeleton = field(default_factory=Skeleton)
    began: float = math.nan
    build: str = ""
    device: str = ""
    seal: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        note_emulator("emulator" in str(self.environment.get("NPU")))


def of_place(place: RecordingFolder) -> Result:
    """The result of a recording in a local folder or object store, cached there."""
    result = None if place.is_local else _cached_result(place)
    if result is None:
        with place.here() as folder:
            result = of_recording(folder)
    return replace(result, build=place.said("build"), device=place.said("device"), place=str(place))


def _cached_result(place: RecordingFolder) -> Result | None:
    """The cached result beside a recording in an object store, if it is up to date."""
    with contextlib.suppress(CompareError, OSError):
        result, about = _read_stored(place, place.filesystem.cat_file(f"{place.path}/{RESULT}"))
        if about.get("stamp") == _input_stamp(place.files()):
            return result
    return None


def _input_stamp(files: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a recording's result."""
    return {"result": RESULT_VERSION, "tables": TABLES_VERSION, "files": files}


def of_recording(folder: Path) -> Result:
    """The result of a recording; cached beside it, and rebuilt when the recording or the analysis changes."""
    recording = Recording(folder)
    stamp = _input_stamp(input_fingerprint(folder)["files"])
    stored = folder / RESULT
    with contextlib.suppress(CompareError, OSError):
        result, about = _read_stored(stored, stored.read_bytes())
        if about.get("stamp") == stamp:
            return result
    tables = steady_part(load_tables(folder), recording.manifest)
    routes = [(int(a), int(b), int(c)) for a, b, c in routed_rows(tables).to_numpy().tolist()]
    facts = RunTables(tables, int(section(recording.manifest, "stacks").get("hz") or 0))
    series = np.round(facts.itl.to_numpy()[:SERIES_STEPS], 5).tolist()
    about = environment_of(recording.manifest)
    about |= {"steps": event} if (event := step_event(tables)) else {}
    seal = str(with_checksum(recording.manifest)["checksum"])
    result = Result(
        folder.name, extract_metrics(facts), about, series, routes, skeleton_of(facts), begin_s(recording.manifest), seal=seal
    )
    with contextlib.suppress(OSError):  # a read-only recording is analysed every time
        save_result(result, stored, stamp)
    return result


def save_result(result: Result, path: Path, stamp: dict[str, Any] | None = None) -> None:
    """Write a result atomically, by rename."""
    about = {
        "name": result.name,
        "environment": result.environment,
        "series": result.series,
        "routes": result.routes,
        "began": None if math.isnan(result.began) else result.began,
        "seal": result.seal,
        "stamp": stamp,
    }
    table = pyarrow.Table.from_pandas(result.metrics.reset_index(drop=True), preserve_index=False)
    table = table.replace_schema_metadata({ABOUT: json.dumps(with_checksum(about)).encode(), GRAPH: result.graph.packed()})
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    parquet.write_table(table, fresh, write_page_checksum=True)
    fresh.replace(path)


def _read_stored(path: Path | RecordingFolder, content: bytes) -> tuple[Result, dict[str, Any]]:
    try:
        table = parquet.read_table(pyarrow.BufferReader(content), page_checksum_verification=True)
        about = json.loads((table.schema.metadata or {})[ABOUT])
        if "checksum" in about and not is_whole(about):
            raise ValueError("damaged")
        metrics = table.to_pandas()[[c.name for c in METRICS]]
        metrics["metric"] = metrics["metric"].replace(RENAMED)
        for column in METRICS:
            metrics[column.name] = metrics[column.name].astype(column.dtype)
        metrics.index = pd.Index(metric_keys(metrics), name="key")
        routes = [(int(a), int(b), int(c)) for a, b, c in about["routes"]]
        graph = unpack_skeleton(table.schema.metadata.get(GRAPH))
        start = about.get("began")
        start = math.nan if start is None else float(start)
        own = str(about["name"]), metrics, about["environment"], about["series"], routes, graph, start
        return Result(*own, seal=str(about.get("seal", ""))), about
    except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise CompareError(f"{path} is not a stored result ({error!r}); give a recording, or make one with --save") from None


def read_runs(address: str | Path) -> list[Result]:
    """Every run at an address: a recording, a stored result, a folder of either (sorted by name), or a pattern."""
    path = Path(address)
    if not path.exists() and is_pattern(str(address)):
        return [of_place(place) for place in recording_folders(str(address))]
    if path.is_file():
        return [replace(_read_stored(path, path.read_bytes())[0], place=str(path))]
    if (path / "manifest.json").exists():
        return [replace(of_recording(path), place=str(path))]
    if not path.is_dir():
        raise CompareError(f"{path} does not exist; give recordings, stored results or folders of them")
    entries = sorted(p for p in path.iterdir() if (p / "manifest.json").exists() or p.suffix == ".parquet")
    if not entries:
        raise CompareError(f"{path} holds no recording and no stored result")
    return [result for entry in entries for result in read_runs(entry)]


def read_all(paths: Sequence[str | Path], step: Callable[[str], None] = lambda _: None) -> list[Result]:
    """The runs of one side, in the order given."""
    results = []
    for path in paths:
        step(f"reading {path}")
        try:
            results += read_runs(path)
        except RecordingError as error:
            raise CompareError(str(error)) from None
    if not any(len(result.metrics) for result in results):
        raise CompareError(f"{', '.join(map(str, paths))}: no run has any metric; record with at least the level token")
    return results


def refuse_repeats(base: list[Result], cand: list[Result]) -> None:
    """Raise CompareError if a run is given twice, as itself, a copy, a link or its stored result: it would count as two.

    Seals distinguish recordings; figures of speed that are equal to the last digit are those of one run, too.
    """
    seen: dict[str, tuple[str, Result]] = {}
    for side, run in (*(("base", run) for run in base), *(("candidate", run) for run in cand)):
        for sign in run_identities(run):
            where, first = seen.setdefault(sign, (side, run))
            if first is not run:
                sides = f"both in the {side}" if where == side else f"one in the {where}, one in the {side}"
                names = f"{first.place or first.name} and {run.place or run.name}"
                raise CompareError(f"{names} are the same run ({sides}), which counts once: leave one out")


def run_identities(run: Result) -> list[str]:
    """What no two runs have in common: the seal, and all metrics if some are times of steps."""
    timed = (run.metrics["family"] == "speed").any()
    values = repr(sorted(zip(run.metrics.index, run.metrics["value"], strict=True)))
    return [*([run.seal] if run.seal else []), *([hashlib.sha256(values.encode()).hexdigest()] if timed else [])]


def value_matrices(base: list[Result], cand: list[Result]) -> tuple[pd.DataFrame, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(dims per metric, base values, candidate values, base means, candidate means), arrays [runs, metrics], NaN for absent.

    dims: DIMS, unit, better, offset (greatest), share (mean over all runs), label.
    """
    runs = [*base, *cand]
    frame = pd.concat([result.metrics for result in runs])
    number, metric_keys = pd.factorize(frame.index)
    run = np.repeat(np.arange(len(runs)), [len(result.metrics) for result in runs])
    out = np.full((2, len(runs), len(metric_keys)), np.nan)
    out[0, run, number] = frame["value"]
    out[1, run, number] = frame["mean"]
    dims = frame[~frame.index.duplicated()][[*DIMS, "unit", "better", "label"]].copy()
    dims["offset"] = frame["offset"].groupby(number).max().to_numpy()
    dims["share"] = frame["share"].groupby(number).mean().to_numpy()
    with_unsampled(dims, out)
    n = len(base)
    return dims, out[0, :n], out[0, n:], out[1, :n], out[1, n:]
