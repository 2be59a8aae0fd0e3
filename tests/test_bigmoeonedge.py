"""BigMoeOnEdge: a stand-in with its functions' names that logs what it did, and a real build where BMOE_CLI names one."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from analyzer.questions import expert_loads, experts
from analyzer.questions.figures import cache_hits
from analyzer.tables import store
from tests.conftest import ROOT, trace
from workloads.gguf_model import Shape, write_model

CLI = os.environ.get("BMOE_CLI", "")
STAND_IN = ROOT / "workloads/programs/bigmoe_stand_in.c"
STREAMED = Shape("qwen2moe", 4, 512, 512, 8, 8, 4096, 16, 4, 512, 512)
TOKENS = 50
WHERE = ["token_id", "layer", "expert"]
READ = ["layer", "expert", "matrix", "bytes", "ahead"]


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
@pytest.mark.parametrize(("flag", "said"), [("-s", "without its symbols"), ("-DOTHER_VERSION", "version that is not known")])
def test_a_build_that_cannot_be_recorded_is_named_and_leaves_no_rows(tmp_path: Path, flag: str, said: str) -> None:
    _, manifest, tables = record(tmp_path, build_stand_in(tmp_path, flag), levels="graph,expert")
    assert len(tables["loads"]) == 0
    assert any(said in warning and "bigmoeonedge" in warning for warning in manifest["warnings"])


def own_figures(path: Path) -> dict[str, float]:
    """The last line of its metrics."""
    last = path.read_text().splitlines()[-1]
    return {name: float(value) for name, value in (word.split("=") for word in last.split() if "=" in word)}


@pytest.mark.long
@pytest.mark.needs("probes")
@pytest.mark.skipif(not CLI, reason="BMOE_CLI names no bmoe-cli")
@pytest.mark.parametrize(
    ("cache_mib", "options"),
    [("12", []), ("4", ["--prefetch", "2", "--prefetch-sync"]), ("12", ["--overlap"]), ("4", ["--overlap"])],
)
def test_steps_reads_and_hits_of_a_real_build_are_those_of_its_own_logs(
    tmp_path: Path, cache_mib: str, options: list[str]
) -> None:
    write_model(tmp_path / "moe.gguf", STREAMED, quantized=True, tokenizer=True)
    logs = {name: tmp_path / f"{name}.csv" for name in ("csv", "io-trace", "route-trace")}
    command = [CLI, "-m", str(tmp_path / "moe.gguf"), "-p", "experts on the edge", "-n", str(TOKENS), "-t", "1", *options]
    command += ["--moe-stream", "--cache-mb", cache_mib, "--force-cache", "--no-odirect", "--io-threads", "2"]
    _, manifest, tables = record(tmp_path, *command, *(word for name, path in logs.items() for word in (f"--{name}", str(path))))
    steps, io, routes = (pd.read_csv(path, comment="#") for path in logs.values())
    loads, told = tables["loads"], own_figures(logs["csv"])
    decode = tables["tokens"].query("phase == 'decode'")
    assert len(decode) == len(steps) == TOKENS and not manifest["lost"]
    reads = loads[loads["action"] == "load"].assign(ahead=(loads["reason"] == "prefetch").astype(int))
    own = io.rename(columns={"proj": "matrix", "req_bytes": "bytes", "spec": "ahead"})
    assert Counter(map(tuple, reads[READ].values.tolist())) == Counter(map(tuple, own[READ].values.tolist()))
    assert (
        reads.groupby("token_id")["bytes"].sum().reindex(decode["token_id"], fill_value=0).tolist()
        == steps["read_bytes"].tolist()
    )
    hits, misses = cache_hits(tables)[["hits", "misses"]].sum()
    assert round(100 * hits / (hits + misses), 1) == told["cache_hit_pct"]
    step_of = dict(zip(sorted(routes.query("phase == 1")["step"].unique()), decode["token_id"], strict=True))
    own_hits = routes.query("phase == 1 and residency > 0").assign(token_id=lambda rows: rows["step"].map(step_of))
    seen = loads[(loads["action"] == "hit") & loads["token_id"].isin(decode["token_id"])]
    assert Counter(map(tuple, seen[WHERE].values.tolist())) == Counter(map(tuple, own_hits[WHERE].values.tolist()))
    evicted, again = loads[loads["action"] == "evict"], expert_loads.whole_loads(tables).duplicated(["layer", "expert"])
    assert len(evicted) == told["evictions"] > 0 and (evicted["layer"] >= 0).all() and again.sum() == told["rereads"]
    assert experts.prefetch_counts(tables).get("used", 0) == told["spec_useful"] and (told["spec_useful"] > 0) == (
        "--prefetch" in options
    )
