"""llama.cpp split between the CPU and another device: operators, copies, submissions and waits are those that it tells itself."""

import json
import signal
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from analyzer.questions import accelerators, parts, step_time
from tests.test_llamacpp_truth import Both, Operator, Run, fused
from tests.test_step_time import by_step
from views.timeline.slices import graph_slices
from workloads.gguf_model import SMALL
from workloads.llama_libraries import library_folder

LAYERS, ON_DEVICE = 4, 2
COPY = "DUP"


@dataclass(frozen=True)
class Split(Run):
    """A run whose last layers another device computes."""

    more: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return super().environment() | {"LLAMA_GPU_LAYERS": str(ON_DEVICE)} | self.more


# Fused operators are told as the first of them; a llama.cpp of the first such device alone, which may be Mesa's on the CPU.
VULKAN = {"GGML_VK_DISABLE_FUSION": "1", "GGML_VK_VISIBLE_DEVICES": "0"}


def split_run(batches: list[list[int]]) -> Split:
    """A run of contexts that are fed these batches, half of the layers on the device."""
    try:
        library = next(library_folder("x64-vulkan").glob("libllama.*.so"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"llama.cpp's libraries cannot be fetched here: {error}")
    return Split(batches, replace(SMALL, layers=LAYERS), library=str(library), more=VULKAN)


@pytest.fixture(scope="module")
def vulkan(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder, run = tmp_path_factory.mktemp("vulkan"), split_run([[20, 1, 7]])
    return Both(folder, replace(run, more=run.more | {"LLAMA_CLOCK": str(folder / "clock")}))


pytestmark = [pytest.mark.long, pytest.mark.needs("probes", "llama.cpp on Vulkan")]


def traced(both: Both, step: int) -> list[tuple[str, Operator]]:
    """(backend, operator) in the order of a traced step, without copies."""
    graphs = both.tables["graphs"].set_index("graph_id")
    rows = both.tables["operators"].query("token_id == @step").sort_values("order")
    rows = rows[(rows["shape"].str.count("x") == 3) & (graphs["kind"].reindex(rows["graph_id"]) == "ggml").to_numpy()]
    backend = graphs["backend"].reindex(rows["graph_id"])
    return list(zip(backend, zip(rows["type"], rows["name"], rows["shape"], strict=True), strict=True))


def test_every_operator_on_both_sides_is_seen_in_order_with_its_name_and_shape(vulkan: Both) -> None:
    for step in range(len(vulkan.place)):
        seen = traced(vulkan, step)
        assert fused([operator for _, operator in seen]) == fused(vulkan.computed(step)), f"step {step}"
        assert {backend for backend, _ in seen} == {"cpu", "vulkan"}


@pytest.mark.long
def test_a_fused_norm_is_told_as_such_where_other_graphs_use_its_address(tmp_path: Path) -> None:
    try:
        both = Both(tmp_path, split_run([[20, 64, 1, 7], [3, 40]]))  # from 32 rows on the device computes the CPU's layers too
    except subprocess.CalledProcessError as crash:
        if crash.returncode not in (-signal.SIGSEGV, -signal.SIGABRT):
            raise
        pytest.skip("llama.cpp often crashes with such batches on Mesa's llvmpipe, untraced")
    on_cpu = 0
    for step in range(len(both.place)):
        norms = {name for kind, name, _ in fused(both.computed(step)) if kind == "RMS_NORM+MUL"}
        kinds = {name: kind for backend, (kind, name, _) in traced(both, step) if backend == "cpu" and name in norms}
        assert set(kinds.values()) <= {"RMS_NORM+MUL"}, f"step {step}"
        on_cpu += len(kinds)
    assert on_cpu


def test_the_backend_of_every_operator_is_that_of_its_results_buffer(vulkan: Both) -> None:
    for step in range(len(vulkan.place)):
        on_device = {node["name"] for node in vulkan.step[vulkan.place[step]] if node["where"].startswith("Vulkan0")}
        layers = {name.rpartition("-")[2] for name in on_device if name.startswith("ffn_moe_down")}
        assert layers == {str(layer) for layer in range(LAYERS - ON_DEVICE + 1, LAYERS)}
        for backend, (_, name, _) in traced(vulkan, step):
            assert (backend == "vulkan") == (name in on_device) or name.startswith("cache_"), name


def test_what_the_device_reads_of_the_cpus_results_is_copied_before_it_is_given_the_graph(vulkan: Both) -> None:
    graphs, operators = vulkan.tables["graphs"], vulkan.tables["operators"]
    copies = operators[operators["graph_id"].isin(graphs.loc[graphs["kind"] == "copy", "graph_id"])]
    assert set(copies["type"]) == {COPY} and copies["name"].str.startswith("Vulkan0#").all()
    given = parts.given_away(vulkan.tables).set_index("token_id")["begin_ns"]
    within = copies[copies["token_id"] >= 0]
    assert within.groupby("token_id").size().min() > 0
    assert (within["end_ns"].to_numpy() <= given.loc[within["token_id"]].to_numpy()).all()
    assert (within["duration_ns"] < 1_000_000_000).all() and within["complete"].all()


def test_a_submission_its_completion_and_the_wait_for_it_are_three_things(vulkan: Both) -> None:
    rows = accelerators.submissions(vulkan.tables)
    assert len(rows) == len(vulkan.place) and set(rows["backend"]) == {"vulkan"}
    assert (rows["begin_ns"] < rows["submitted_ns"]).all() and (rows["submitted_ns"] <= rows["wait_ns"]).all()
    assert (rows["wait_ns"] < rows["done_ns"]).all()
    graphs = vulkan.tables["graphs"]
    assert (graphs["kind"] == "wait").any() and graphs["complete"].all()


def test_a_step_lasts_until_the_program_has_waited_for_its_results(vulkan: Both) -> None:
    clock = json.loads(Path(vulkan.run.environment()["LLAMA_CLOCK"]).read_text())
    assert len(clock) == len(vulkan.tables["tokens"])
    for step, (begin, returned, there) in zip(vulkan.tables["tokens"].itertuples(), clock, strict=True):
        assert begin < step.begin_ns and returned < step.end_ns < there


def test_the_causes_add_up_and_host_code_is_not_what_the_device_is_given(vulkan: Both) -> None:
    rows = by_step(vulkan.tables)
    assert rows["residual"].sum() < 0.01 * rows.sum(axis=None)
    assert (rows[["submission", "transport"]] > 0).all(axis=None) and (rows["accelerator"] > 0).mean() > 0.5
    waited = rows["accelerator"] + rows["completion"] + rows["run queue"] + rows["disk and faults"]
    submitted = accelerators.submissions(vulkan.tables)
    assert (waited.to_numpy() >= 0.9 * (submitted["done_ns"] - submitted["wait_ns"]).to_numpy()).all()
    spent = step_time.time_summary(vulkan.tables, step_time.step_time(vulkan.tables))["phases"]["decode"]
    assert spent["cause_ms"]["submission"] > 0


def test_no_operator_falls_back_where_whole_layers_are_given_to_the_device(vulkan: Both) -> None:
    assert not np.any(accelerators.fallen_back(vulkan.tables))


def test_the_devices_operators_have_layers_and_no_helpers(vulkan: Both) -> None:
    operators = vulkan.tables["operators"]
    on_device = operators[parts.submitted_only(vulkan.tables)]
    assert (on_device["n_threads"] == 1).all()
    assert set(on_device.loc[on_device["layer"] >= 0, "layer"]) == {LAYERS - ON_DEVICE, LAYERS - 1}


def test_the_timeline_leads_from_a_submission_to_the_wait_for_it(vulkan: Both) -> None:
    slices = graph_slices(vulkan.tables)
    name = np.array(slices.name.to_pylist(), object)
    rows = accelerators.submissions(vulkan.tables)
    begun, ended = slices.flow[(slices.flow > 0) & ~slices.ends_flow], slices.flow[slices.ends_flow]
    assert sorted(begun) == sorted(ended) == sorted(rows["graph_id"] + 1)
    assert set(name[slices.ends_flow]) == {"wait for VULKAN"}
