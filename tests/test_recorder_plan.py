"""The plan: made without root or kernel, for this machine and for another, and the same as what the tracer places."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tracer.errors import EngineError
from tracer.kernel.plan_file import shortest_prefixes
from tracer.probes.elf import read_binary

SITES = ROOT / "runtime" / "telemetry" / "_probes.so"


def plan(folder: Path, *words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """(what `moescope plan` wrote, how it ended)."""
    out = folder / "plan.json"
    command = [sys.executable, "-m", "tracer", "plan", "-o", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return json.loads(out.read_text()) if out.exists() else {}, done


@pytest.mark.needs("probes")
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_a_plan_places_what_the_tracer_places(tmp_path: Path) -> None:
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.submodule_search_locations
    library = next(Path(package.submodule_search_locations[0]).glob("*.so"))
    made, done = plan(tmp_path, "--libraries", str(library), "--", sys.executable)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "tracer", "probes", "--json", str(library)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    keys = ("program", "symbol", "offset", "at", "instruction", "cost", "why")
    file = next(file for file in made["files"] if file["path"] == str(library.resolve()))
    placed = [[row[key] for key in keys] for row in json.loads(shown.stdout)["probes"] if row["offset"] >= 0]
    planned = [[row[key] for key in keys] for row in file["rows"]]
    assert [row for row in planned if row in placed] == placed
    assert {row[0] for row in planned if row not in placed} == {"ggml_graph_begin", "ggml_graph_end"}
    assert file["id"] == read_binary(str(library)).build_id and file["settings"]["mul_mat_id"] < 200
    assert made["programs"]["ggml_op_wait"] >= 0


def test_a_plan_for_a_device_names_files_as_they_lie_there(tmp_path: Path) -> None:
    root, features = tmp_path / "root", tmp_path / "features.json"
    (root / "vendor" / "lib64").mkdir(parents=True)
    shutil.copy(SITES, root / "vendor" / "lib64" / "_probes.so")
    arch = {"x64": "x86_64", "AArch64": "aarch64"}[read_binary(str(SITES)).machine]
    features.write_text(json.dumps({"arch": arch, "fast_nop": False}))
    made, done = plan(tmp_path, "--sysroot", str(root), "--features", str(features), "--", "/vendor/bin/engine")
    assert done.returncode == 0, done.stderr
    assert [file["path"] for file in made["files"]] == ["/vendor/lib64/_probes.so"]
    assert len(made["files"][0]["rows"]) == 12 and made["arch"] == arch


def test_a_plan_for_another_machine_leaves_this_machines_files_out(tmp_path: Path) -> None:
    features = tmp_path / "features.json"
    other = {"x64": "aarch64", "AArch64": "x86_64"}[read_binary(str(SITES)).machine]
    features.write_text(json.dumps({"arch": other, "fast_nop": False}))
    made, done = plan(tmp_path, "--libraries", str(SITES), "--features", str(features), "--", "/bin/engine")
    assert (made, done.returncode) == ({}, 2) and "--libraries" in done.stderr


def test_features_that_no_recorder_wrote_are_refused(tmp_path: Path) -> None:
    features = tmp_path / "features.json"
    for content in ("", "[]", '{"arch": "riscv64", "fast_nop": true}', '{"arch": "x86_64"}'):
        features.write_text(content)
        made, done = plan(tmp_path, "--features", str(features), "--", "true")
        assert (made, done.returncode) == ({}, 2) and "--probe-features" in done.stderr


def test_more_names_of_libraries_than_the_recorder_can_watch_for_are_refused() -> None:
    names = {f"lib{letter}" for letter in "abcdefghijklmnopqrstuvwxyzABCDEF"}
    assert shortest_prefixes(names | {"liba.so"}) == sorted(names)
    with pytest.raises(EngineError, match="33"):
        shortest_prefixes(names | {"further"})
