"""Unwound stacks are what the program's own backtrace() recorded at the same points, whatever compiled it."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.questions.stacks import frame_names, function_shares, stack_lists
from analyzer.records.schema import Tables
from analyzer.tables.store import load_tables
from tests.conftest import ROOT, rest_long, trace

pytestmark = pytest.mark.needs("probes")
SIGMAS, HZ = 4.0, 997
POINTS, OWN_STACK = 13, "signal on its own stack"
FLAGS = {
    "none": ["-fomit-frame-pointer"],
    "frame pointers": ["-fno-omit-frame-pointer"],
    "fixed address": ["-no-pie"],
    "static": ["-static"],
    "static, any address": ["-static-pie"],
}
COMPILERS = {"g++": "gcc", "clang++": "clang"}


@dataclass
class Points:
    """The tables of a recording of the program, and what it printed."""

    tables: Tables
    said: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=rest_long([(compiler, flags) for compiler in COMPILERS for flags in FLAGS], ("g++", "none"), ("clang++", "static")),
    ids="-".join,
)
def points(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Points:
    compiler, flags = request.param
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    place = tmp_path_factory.mktemp("points")
    sources, program, library = ROOT / "workloads" / "programs", place / "points", place / "library.so"
    words: list[str | Path] = ["-O2", *FLAGS[flags], "-o", program, sources / "stack_points.cpp", "-lpthread"]
    subprocess.run([compiler, *words], check=True, capture_output=True)
    subprocess.run([COMPILERS[compiler], "-O2", "-shared", "-fPIC", "-o", library, sources / "stack_library.c"], check=True)
    shell = f"{program} 900 '{'' if 'static' in flags else library}' > {place}/said.json"
    done = trace("run", "--no-views", "--stacks", str(HZ), "-o", str(place / "run"), "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    return Points(load_tables(place / "run"), json.loads((place / "said.json").read_text()))


def wait_at(tables: Tables, point: dict[str, Any]) -> pd.Series:
    """The one wait that lies within the times that the program noted."""
    waits = tables["waits"]
    within = (waits["tid"] == point["tid"]) & (waits["begin_ns"] >= point["begin"]) & (waits["end_ns"] <= point["end"])
    assert within.sum() == 1, (point["name"], int(within.sum()))
    return waits[within].iloc[0]


def callers(tables: Tables, stack: int) -> list[tuple[str, int]]:
    """(file, address) of the callers of `point`, innermost first."""
    names, frames, rows = frame_names(tables), tables["frames"], stack_lists(tables)[stack][::-1]
    at = next(i for i, row in enumerate(rows) if names[row].startswith("point"))
    return [(os.path.realpath(frames["file"][row]), int(frames["address"][row])) for row in rows[at + 1 :]]


def same_places(found: list[tuple[str, int]], truth: list[list[Any]]) -> bool:
    """Whether frames are those of return addresses: each is the call's last byte, but for one place that a signal interrupted."""
    pairs = [(mine, (os.path.realpath(file), address)) for mine, (file, address) in zip(found, truth, strict=True)]
    interrupted = [mine for mine, theirs in pairs if mine == theirs]
    return len(interrupted) <= 1 and all(mine in (theirs, (theirs[0], theirs[1] - 1)) for mine, theirs in pairs)


def test_stacks_of_waits_are_those_that_backtrace_gave(points: Points) -> None:
    said = [point for point in points.said["points"] if point["name"] != OWN_STACK]
    assert len(said) >= POINTS - 2
    for point in said:
        wait = wait_at(points.tables, point)
        assert wait["end"] == "whole", point["name"]
        assert same_places(callers(points.tables, wait["stack_id"]), point["frames"][1:]), point["name"]


def test_a_signals_own_stack_is_followed_as_far_as_it_was_copied(points: Points) -> None:
    point = next(point for point in points.said["points"] if point["name"] == OWN_STACK)
    wait = wait_at(points.tables, point)
    found = callers(points.tables, wait["stack_id"])
    assert wait["end"] == "cut" and 2 <= len(found) < len(point["frames"])
    assert same_places(found, point["frames"][1 : len(found) + 1])


def test_samples_of_functions_that_throw_recurse_and_align_are_their_cpu_time(points: Points) -> None:
    samples = points.tables["samples"]
    shares = function_shares(points.tables, samples, np.ones(len(samples))).set_index("function")["total"]
    spent = points.said["spent"]
    found = np.array([float(shares.get(name, 0) + shares.get(name[:-2], 0)) for name in spent])
    truth = np.array(list(spent.values())) / sum(spent.values())
    assert found.sum() > 300
    error = np.sqrt(truth * (1 - truth) * found.sum())
    assert (np.abs(found - truth * found.sum()) < SIGMAS * error).all(), (found, truth)
    assert (samples["end"] == "whole").mean() > 0.95
