"""BigMoeOnEdge: a stand-in with its functions' names that logs what it did, and a real build where BMOE_CLI names one."""

import json
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analyzer.questions import expert_loads, experts
from analyzer.questions.figures import cache_hits
from analyzer.tables import store
from tests.conftest import ROOT, trace
from workloads.gguf_model import SHAPES, write_model

CLI = os.environ.get("BMOE_CLI", "")
STAND_IN = ROOT / "workloads/programs/bigmoe_stand_in.c"
TOKENS, CACHE_MIB = 50, 40


def build_stand_in(folder: Path, *flags: str) -> str:
    subprocess.run(["cc", "-O2", "-pthread", *flags, "-o", folder / "stand_in", STAND_IN], check=True)
    return str(folder / "stand_in")


def record(folder: Path, *command: str, levels: str = "token,graph,operator,expert") -> tuple[str, dict, pd.DataFrame]:
    done = trace("run", "--no-views", "--levels", levels, "-o", str(folder / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "run/manifest.json").read_text()), store.load_tables(folder / "run")


@pytest.mark.needs("probes")
def test_reads_hits_and_evictions_are_those_that_the_stand_in_logs(tmp_path: Path) -> None:
    printed, manifest, tables = record(tmp_path, build_stand_in(tmp_path), levels="graph,expert")
    told = [json.loads(line) for line in printed.splitlines() if line.startswith('["')][1:]
    loads = tables["loads"]
    seen = loads.assign(what=loads["reason"].where(loads["action"] == "load", loads["action"]))
    assert Counter(map(tuple, seen[["what", "layer", "expert", "matrix", "bytes"]].values.tolist())) == Counter(map(tuple, told))
    assert set(loads["engine"]) == {"bigmoeonedge"} and loads["complete"].all() and not manifest["lost"]
    times = Counter(what for what, *_ in told)
    whole = expert_loads.whole_loads(tables)
    assert len(whole) * 3 == times["demand"] + times["prefetch"] and set(whole["bytes"]) == {3 * 8192}
    assert times["evict"] > 0 and loads["tid"].nunique() > 2
    counts = experts.prefetch_counts(tables)
    assert counts["prefetches"] == times["prefetch"] // 3 and 0 < counts["used"] <= counts["prefetches"]


@pytest.mark.needs("probes")
@pytest.mark.parametrize(("flags", "said"), [(("-s",), "without its symbols"), (("-DOTHER_VERSION",), "version that is not known")])
def test_a_build_that_cannot_be_recorded_is_named_and_leaves_no_rows(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    _, manifest, tables = record(tmp_path, build_stand_in(tmp_path, *flags), levels="graph,expert")
    assert len(tables["loads"]) == 0
    assert any(said in warning and "bigmoeonedge" in warning for warning in manifest["warnings"])
