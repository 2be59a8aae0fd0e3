"""Results of many builds, devices and runs: a partitioned Parquet dataset in a folder or an object store, and its change points.

    DATASET/build=<name>/device=<name>/<time>-<digest>.parquet     one file per run, a row per metric

Any tool for hive-partitioned Parquet reads it: DuckDB, Dask, Spark, pandas. Files are only added, never changed.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet as parquet

from analyzer.compare.equal_heat import judge_at_clocks
from analyzer.compare.metrics import METRICS, metric_keys
from analyzer.compare.results import RENAMED, CompareError, Result, value_matrices
from analyzer.compare.statistics import SUCCESSIVE, runs_for_p, smallest_p
from analyzer.compare.verdicts import FASTER, SLOWER, Rules, judge_apart
from analyzer.questions.changepoints import LEAST_SERIES, level_shifts
from analyzer.tables.recording_folders import open_folder
from moescope.answers import note_emulator

RUN = {"key": "string", "run": "string", "npu": "string", "recorded": "float64"}
PARTITION = ("build", "device")
COLUMNS = ("key", "build", "recorded", "run", "npu", "value")
OF_RUNS = {"median": "median", "mean": "mean", "sd": "std", "low": "min", "high": "max", "runs": "size"}
"""Column of `build_medians` → what it is of the runs."""
CHANGES = ["device", "key", "metric", "before", "build", "ratio", "better", "runs"]


def add_runs(url: str, results: list[Result], build: str, device: str = "", recorded: float | None = None) -> list[str]:
    """Add runs of a build; the device defaults to the machine's CPU. Returns the files written; a run is stored once."""
    filesystem, root = open_folder(url)
    written = []
    for number, result in enumerate(results):
        of, about = build or result.build, result.environment
        name = device or result.device or about.get("cpu_model") or about.get("arch") or "unknown"
        recorded_s = (time.time() if recorded is None else recorded) + number * 1e-3
        frame = result.metrics.reset_index().assign(run=result.name, npu=npu_of(result), recorded=recorded_s)
        table = pyarrow.Table.from_pandas(frame, schema=_run_schema(), preserve_index=False)
        values = repr(sorted(zip(frame["key"], frame["value"], strict=True)))
        digest = hashlib.sha256(f"{result.name}{values}".encode()).hexdigest()[:16]
        if not of:
            raise CompareError(f"{result.name}: its path contains no build=NAME: give --build")
        folder = f"{root}/build={quote(of, safe='')}/device={quote(name, safe='')}"
        filesystem.makedirs(folder, exist_ok=True)
        if not any(path.endswith(f"-{digest}.parquet") for path in filesystem.ls(folder, detail=False)):
            path = f"{folder}/{int(recorded_s * 1e3)}-{digest}.parquet"
            parquet.write_table(table, path, filesystem=filesystem)
            written.append(path)
    return written


def npu_of(result: Result) -> str:
    """The NPU of a run, or its emulator; "" if it used none."""
    return str(result.environment.get("NPU") or "")


def _run_schema() -> pyarrow.Schema:
    kinds = {"object": pyarrow.string(), "int64": pyarrow.int64(), "float64": pyarrow.float64()}
    columns = [(name, pyarrow.string() if kind == "string" else pyarrow.float64()) for name, kind in RUN.items()]
    return pyarrow.schema([*columns, *((c.name, kinds[c.dtype]) for c in METRICS)])


def read_runs(url: str, family: str, device: str = "") -> pd.DataFrame:
    """Runs with a family of metrics, in time order: a row per run and metric, columns COLUMNS, device and METRICS."""
    import duckdb
    from pyarrow import dataset

    filesystem, root = open_folder(url)
    if not filesystem.exists(root):
        raise CompareError(f"{url} does not exist; add runs with --add")
    parts = dataset.partitioning(pyarrow.schema([(name, pyarrow.string()) for name in PARTITION]), flavor="hive")
    schema = pyarrow.unify_schemas([_run_schema(), parts.schema])  # files of older versions lack the NPU
    files = dataset.dataset(root, schema, filesystem=filesystem, partitioning=parts, format="parquet")
    columns = [*COLUMNS, "device", *(c.name for c in METRICS if c.name not in COLUMNS)]
    selected = ", ".join(f'"{name}"' for name in columns)
    with duckdb.connect() as database:
        database.register("history", files)
        text = f"select {selected} from history where family = ? and (? = '' or device = ?)"
        frame = database.execute(text, [family, device, device]).df()
    frame["metric"] = frame["metric"].replace(RENAMED)
    frame["key"] = metric_keys(frame)
    return in_time(frame, f"no run in {url}", family)


def of_results(results: list[Result], family: str, device: str = "") -> pd.DataFrame:
    """The same from results in memory with build and device from their paths."""
    parts = [
        result.metrics.reset_index().assign(
            build=result.build, device=result.device, run=result.name, npu=npu_of(result), recorded=result.began
        )
        for result in results
        if device in ("", result.device)
    ]
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["family"])
    return in_time(frame[frame["family"] == family], "no recording", family)


def in_time(frame: pd.DataFrame, where: str, family: str) -> pd.DataFrame:
    """Rows in time order, labelled if the emulator made some; raises CompareError if there are none."""
    if not len(frame):
        raise CompareError(f"{where} holds a metric of the family {family!r}")
    note_emulator(frame["npu"].str.contains("emulator", na=False).any())
    return frame.sort_values(["device", "key", "recorded"], kind="stable").reset_index(drop=True)


def build_changes(frame: pd.DataFrame, rules: Rules | None = None) -> pd.DataFrame:
    """Changes of metrics between builds: columns CHANGES; `build` is the first of the new level, `before` the last of the old.

    Neighbouring builds with enough runs for a verdict are judged as `compare` judges sides recorded one after the other. If the
    runs of all builds are enough for a series, its changes of level are listed too: these need only one run per build.
    """
    judged = [row for _, runs in frame.groupby("device", sort=False) for row in judge_neighbours(runs, rules or Rules())]
    judged_builds = {(row["device"], row["key"], row["build"]) for row in judged}
    series = [row for row in level_changes(frame) if (row["device"], row["key"], row["build"]) not in judged_builds]
    return pd.DataFrame([*judged, *series], columns=CHANGES)


def judge_neighbours(runs: pd.DataFrame, rules: Rules) -> Iterator[dict[str, Any]]:
    """The verdicts of `compare` on each build of a device and the previous one, if both have enough runs."""
    builds = {build: results_of(rows) for build, rows in runs.groupby("build", sort=False)}
    apart = replace(rules, drift=SUCCESSIVE)
    for (before, base), (build, cand) in pairwise(builds.items()):
        if smallest_p(len(base), len(cand)) > rules.alpha:
            continue
        dims, old, new, _, _ = value_matrices(base, cand)
        verdicts, _ = judge_at_clocks(*judge_apart(dims, old, new, apart))
        for key, row in verdicts[verdicts["verdict"].isin([SLOWER, FASTER])].iterrows():
            if row["family"] in set(runs["family"]):
                change = {"device": runs["device"].iloc[0], "key": key, "before": before, "build": build}
                yield change | {"runs": len(base) + len(cand), **row[["metric", "ratio", "better"]]}


def results_of(rows: pd.DataFrame) -> list[Result]:
    """The runs that these rows of a dataset belong to."""
    names = [c.name for c in METRICS]
    return [Result(str(name), part.set_index("key")[names]) for (_, name), part in rows.groupby(["recorded", "run"], sort=False)]


def level_changes(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Changes of level in the series of all runs, each at the first build of the new level; a drift is not a change."""
    for (device, key), rows in frame.groupby(["device", "key"], sort=False):
        values = rows["value"].to_numpy()
        if (values <= 0).any():
            continue
        builds = rows["build"].to_numpy()
        first = np.flatnonzero(np.append(True, builds[1:] != builds[:-1]))
        for shift in level_shifts(np.log(values)):
            first_row = first[1:][np.argmin(np.abs(first[1:] - shift.at))] if len(first) > 1 else -1
            if first_row > 0:
                place = {"device": device, "key": key, "build": builds[first_row], "before": builds[first_row - 1]}
                row = rows.iloc[first_row]
                yield place | {"runs": len(values), "ratio": float(np.exp(shift.change)), **row[["metric", "better"]]}


def unjudged_text(frame: pd.DataFrame) -> str:
    """A sentence on builds that cannot be judged and on what is missing; "" if all can."""
    counts = frame.groupby(["device", "build"])["run"].nunique()
    least = runs_for_p(Rules.alpha)
    few = counts[counts < least]
    if not len(few) or counts.groupby("device").sum().min() >= LEAST_SERIES:
        return ""
    return (
        f"{len(few)} of {len(counts)} builds have fewer than {least} runs, too few to compare with the previous build; "
        f"as a series they are judged from {LEAST_SERIES} runs per device on"
    )


def build_medians(frame: pd.DataFrame) -> pd.DataFrame:
    """For each device, metric and build, in time order: OF_RUNS."""
    grouped = frame.groupby(["device", "key", "metric", "phase", "type", "unit", "build"], sort=False)
    table = grouped.agg(
        **{name: ("value", how) for name, how in OF_RUNS.items()}, label=("label", "first"), since=("recorded", "min")
    )
    return table.reset_index().sort_values(["device", "key", "since"]).drop(columns="since")
