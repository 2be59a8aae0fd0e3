"""Routes in formats of others: written and read back, held against files as the other programs describe them, and used."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.imports.routes import FORMATS, is_routes, read_routes, write_routes
from analyzer.predict.trace import from_tables
from analyzer.records.schema import TABLES, Tables, empty_table
from moescope.__main__ import main
from tests.conftest import drawn
from tracer.recording.format import RecordingError
from workloads.tables_fixture import frame

TRACE = """# route_trace v1
# model=m.gguf arch=qwen3moe n_layer=4 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=640 dense_bytes=320
# layer=3 expert_bytes=640 dense_bytes=320
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
0,0,0,1,0,5,0.75,0,640,0
0,0,0,1,1,2,0.25,0,640,0
0,0,0,3,0,7,nan,1,0,0
0,0,0,3,1,0,nan,2,0,0
0,0,1,1,0,2,0.5,0,0,0
0,0,1,1,1,5,0.5,0,0,0
0,0,1,3,0,1,0.5,1,0,0
0,0,1,3,1,7,0.5,1,0,0
0,1,2,1,0,4,0.6,1,0,0
0,1,2,1,1,5,0.4,1,0,0
0,1,2,3,0,7,0.9,1,0,0
0,1,2,3,1,3,0.1,1,0,0
"""
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
CONFIG |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 96}
ROUTES = ["token_id", "layer", "row", "rank", "expert", "weight"]


@st.composite
def recordings(draw: st.DrawFn) -> Tables:
    """Tables of one turn: a prompt, then decoded tokens; some layers have no experts."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    layers = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=5)))
    n_experts, prompt, decoded = draw(st.integers(2, 64)), draw(st.integers(2, 9)), draw(st.integers(1, 6))
    k, known = draw(st.integers(1, min(4, n_experts))), draw(st.booleans())
    rows = [prompt] + [1] * decoded
    positions = np.cumsum([0, *rows[:-1]])
    phases = ["prefill"] + ["decode"] * decoded
    routes = [
        (step, layer, row, rank, int(expert), float(np.float32(rng.random())) if known else np.nan)
        for step, n in enumerate(rows)
        for layer in layers
        for row in range(n)
        for rank, expert in enumerate(rng.permutation(n_experts)[:k])
    ]
    nothing = {name: empty_table(name) for name in TABLES}
    tokens = pd.DataFrame({"token_id": range(len(rows)), "phase": phases, "n_tokens": rows, "position": positions})
    return {**nothing, "tokens": frame("tokens", **tokens), "routes": frame("routes", **pd.DataFrame(routes, columns=ROUTES))}


def again(tables: Tables, name: str, folder: Path) -> Tables:
    write_routes(tables, folder / "routes.csv", name)
    return read_routes(folder / "routes.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@settings(max_examples=drawn(15), deadline=None)
@given(recordings())
def test_a_route_trace_keeps_steps_routes_and_weights(folder: Path, tables: Tables) -> None:
    back = again(tables, "route-trace", folder)
    pd.testing.assert_frame_equal(back["routes"][ROUTES], tables["routes"][ROUTES])
    steps = ["phase", "n_tokens", "position"]
    assert back["tokens"][steps].to_numpy().tolist() == tables["tokens"][steps].to_numpy().tolist()


@settings(max_examples=drawn(10), deadline=None)
@given(recordings())
def test_tokens_are_counted_in_a_route_trace_where_the_engine_was_given_no_positions(folder: Path, tables: Tables) -> None:
    unknown = {**tables, "tokens": tables["tokens"].assign(position=np.int32(-1))}
    back = again(unknown, "route-trace", folder)
    pd.testing.assert_frame_equal(back["routes"][ROUTES], tables["routes"][ROUTES])
    assert back["tokens"]["position"].tolist() == tables["tokens"]["position"].tolist()


def test_a_file_is_known_by_all_columns_of_a_format_and_may_have_others() -> None:
    for columns in filter(None, (form.columns for form in FORMATS.values())):
        assert is_routes(",".join(columns)) and is_routes(",".join((*columns, "other"))) and not is_routes(columns[0])


@settings(max_examples=drawn(15), deadline=None)
@given(recordings())
def test_rows_of_layer_and_expert_keep_everything_but_weights(folder: Path, tables: Tables) -> None:
    back = again(tables, "layer-expert", folder)
    pd.testing.assert_frame_equal(back["routes"][ROUTES[:-1]], tables["routes"][ROUTES[:-1]])
    assert back["tokens"]["n_tokens"].tolist() == tables["tokens"]["n_tokens"].tolist()
    assert back["tokens"]["phase"].tolist() == tables["tokens"]["phase"].tolist()


@settings(max_examples=drawn(15), deadline=None)
@given(recordings())
def test_counts_are_those_of_the_routes_and_survive_another_trip(folder: Path, tables: Tables) -> None:
    back = again(tables, "counts", folder)
    counted = back["experts"].set_index(["layer", "expert"])["n_tokens"].to_dict()
    assert counted == tables["routes"].groupby(["layer", "expert"]).size().to_dict()
    pd.testing.assert_frame_equal(again(back, "counts", folder)["experts"], back["experts"])


@settings(max_examples=drawn(15), deadline=None)
@given(recordings(), st.sampled_from(["routed-experts", "router-trace"]))
def test_json_keeps_everything_but_weights(folder: Path, tables: Tables, name: str) -> None:
    if name == "routed-experts" and (tables["routes"].groupby("layer")["expert"].max() == 0).any():
        return  # a layer of zeros is a dense one there
    back = again(tables, name, folder)
    assert back["tokens"]["n_tokens"].tolist() == tables["tokens"]["n_tokens"].tolist()
    assert back["tokens"]["phase"].tolist() == tables["tokens"]["phase"].tolist()
    k = int(tables["routes"]["rank"].max()) + 1
    routed = back["routes"][back["routes"]["layer"].isin(tables["routes"]["layer"])]
    assert len(routed) == len(tables["routes"])
    pd.testing.assert_frame_equal(routed[ROUTES[:-1]].reset_index(drop=True), tables["routes"][ROUTES[:-1]])
    if k > 1 or name == "router-trace":
        assert len(routed) == len(back["routes"])


def test_a_response_of_vllm_is_read_without_its_dense_layers(tmp_path: Path) -> None:
    experts = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 5]], [[0, 0], [5, 0]]], np.int32)
    file = io.BytesIO()
    np.save(file, experts)
    choice = {"text": "", "routed_experts": base64.b64encode(file.getvalue()).decode()}
    answer = {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}}
    (tmp_path / "answer.json").write_text(json.dumps(answer, indent=1))
    trace = from_tables(read_routes(tmp_path / "answer.json"))
    assert [(step.phase, step.position) for step in trace.steps] == [("prefill", 0), ("decode", 2)]
    assert [routes.tolist() for routes in trace.steps[0].routes] == [[[3, 1], [2, 5]]]
    assert [routes.tolist() for routes in trace.steps[1].routes] == [[[5, 0]]]


def test_a_router_trace_of_megatron_is_read_without_its_mtp_layers(tmp_path: Path) -> None:
    record = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 2, "topk": 2}
    lines = [record | {"top_indices": [[12, 45], [1, 2]]}, record | {"mtp_idx": 0, "top_indices": [[1, 2], [3, 4]]}]
    lines.append(record | {"step": 1, "num_tokens": 1, "top_indices": [[7, 12]]})
    (tmp_path / "rank0.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    trace = from_tables(read_routes(tmp_path / "rank0.jsonl"))
    assert [(step.phase, step.routes[0].tolist()) for step in trace.steps] == [
        ("prefill", [[12, 45], [1, 2]]),
        ("decode", [[7, 12]]),
    ]


def test_joined_traces_of_a_cache_profile_are_read(tmp_path: Path) -> None:
    (tmp_path / "merged.csv").write_text("layer,expert\n0,3\n1,1\n" * 2)
    assert len(from_tables(read_routes(tmp_path / "merged.csv")).steps) == 2


def test_a_trace_as_its_makers_describe_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    trace = from_tables(read_routes(tmp_path / "trace.csv"))
    assert [(step.phase, step.position, step.rows) for step in trace.steps] == [("prefill", 0, 2), ("decode", 2, 1)]
    assert [routes.tolist() for routes in trace.steps[0].routes] == [[[5, 2], [2, 5]], [[7, 0], [1, 7]]]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rows_without_a_header_are_read(tmp_path: Path, mark: str) -> None:
    (tmp_path / "moe_trace.csv").write_text(mark + "0,3\n0,1\n0,2\n0,3\n2,5\n2,4\n2,1\n2,0\n0,1\n0,2\n2,7\n2,6\n")
    trace = from_tables(read_routes(tmp_path / "moe_trace.csv"))
    assert [routes.tolist() for routes in trace.steps[0].routes] == [[[3, 1], [2, 3]], [[5, 4], [1, 0]]]
    assert [routes.tolist() for routes in trace.steps[1].routes] == [[[1, 2]], [[7, 6]]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "layer,expert\n1,x\n",
        "layer,expert\n",
        "layer,expert\n1\n",
        "layer,expert\n1,-2\n",
        "layer,expert\n1,1e300\n",
        "layer,expert\n0,1\n0,2\n0,3\n",
        TRACE[:-14],
        "{",
        '{"choices": []}',
        '{"choices": [{"routed_experts": "AAAA"}], "usage": {"prompt_tokens": 1}}',
        '{"step": 0, "layer": 0, "num_tokens": 2, "topk": 1, "top_indices": [[1]]}',
        '{"step": 0, "layer": 0, "num_tokens": 1, "topk": 1, "top_indices": [[1]]}\n{"step": 1, "lay',
        TRACE.replace("route_trace v1", "route_trace v2"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "routes.csv").write_text(text)
    with pytest.raises(RecordingError):
        read_routes(tmp_path / "routes.csv")
    assert main(["experts", str(tmp_path / "routes.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_recording_without_routes_has_none_to_write(tmp_path: Path) -> None:
    for name in FORMATS:
        with pytest.raises(RecordingError, match="no routes"):
            write_routes({table: empty_table(table) for table in TABLES}, tmp_path / "routes.csv", name)


def test_the_verbs_take_a_file_of_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, rows = tmp_path / "trace.csv", tmp_path / "rows.csv"
    trace.write_text(TRACE)
    assert main(["experts", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["layer"] == 1
    assert main(["write", str(trace), "--format", "layer-expert", "--out", str(rows)]) == 0
    assert rows.read_text().splitlines()[:3] == ["layer,expert", "1,5", "1,2"]
    capsys.readouterr()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    device = ["--device", "snapdragon-8-elite", "--config", str(tmp_path / "config.json"), "--cache", "25%,100%", "--json"]
    assert main(["simulate", str(trace), *device, "--weights", "bf16"]) == 0
    from_trace = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(rows), *device]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == from_trace["runs"]
    assert from_trace["steps"] == 2
    assert main(["simulate", str(trace), *device]) == 0
    sized = json.loads(capsys.readouterr().out)
    assert sized["runs"][1]["loaded_bytes"] % 640 == 0, "the bytes in the file's head, unless --weights names others"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"num_experts_per_tok": 1}, "experts per token"), ({"num_hidden_layers": 3}, "layers"), ({"num_experts": 7}, "expert 7")],
)
def test_routes_that_contradict_the_config_are_refused(
    tmp_path: Path, change: dict[str, int], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    device = ["--device", "snapdragon-8-elite", "--config", str(tmp_path / "config.json")]
    assert main(["simulate", str(tmp_path / "trace.csv"), *device]) == 2
    told = capsys.readouterr().err
    assert named in told and "contradict" in told and told.count("\n") == 1


def test_prompts_whose_last_layer_computes_only_output_rows_are_used_and_dropped_steps_are_counted(tmp_path: Path) -> None:
    """llama.cpp routes the last layer for rows whose output is asked for; a step without a middle layer is incomplete."""
    lines = TRACE.splitlines()
    one_output = [line for line in lines if not line.startswith("0,0,0,3,")]
    (tmp_path / "trace.csv").write_text("\n".join(one_output) + "\n")
    trace = from_tables(read_routes(tmp_path / "trace.csv"))
    assert [[len(rows) for rows in step.routes] for step in trace.steps] == [[2, 1], [1, 1]]
    assert (trace.steps[0].rows, trace.dropped, trace.expert_bytes) == (2, 0, (640, 640))
    (tmp_path / "trace.csv").write_text("\n".join(line for line in lines if not line.startswith("0,0,0,1,")) + "\n")
    trace = from_tables(read_routes(tmp_path / "trace.csv"))
    assert [step.phase for step in trace.steps] == ["decode"] and trace.dropped == 1
