"""The report, the ProfDAG page, the server and the command line, without a browser."""

import base64
import gzip
import http.client
import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.commands.query import query_tables
from analyzer.questions import ceilings
from analyzer.questions.critical_path import critical_path
from analyzer.questions.findings import findings as analyzer_findings
from analyzer.questions.live import LiveTables
from analyzer.questions.profdag import as_text, build_profdag, dot_string
from analyzer.questions.summary import summarize
from analyzer.tables.store import LazyTables, input_fingerprint, load_tables
from analyzer.tables.store import write_tables as write_tables
from moescope.__main__ import main
from moescope.answers import json_value
from tracer.recording.format import Recording, dtype_from_json
from views.colours import CAUSES
from views.errors import ViewError
from views.profdag.layout import HEIGHT, WIDTH, lay_out, page_data
from views.profdag.page import write_profdag
from views.report.operators import roofline_chart
from views.report.page import LARGEST
from views.report.report import write_report
from views.report.sections import Run
from views.serving import make_server
from workloads import tables_fixture as fixture

HOSTILE = "</script><img src=x onerror='document.pwned=1'>"


def report(tmp_path: Path, manifest: dict[str, Any], tables: fixture.Tables) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "report.html"
    tables = LazyTables.of(tables)  # as of a recording
    write_report(manifest, tables, summarize(Recording(tmp_path), tables), path)
    return path


def data_of(path: Path) -> Any:
    """The document inside a page."""
    found = re.search(r'id="asset-data">([^<]*)<', path.read_text())
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def blocks(path: Path, section: str) -> list[dict[str, Any]]:
    return next(s["blocks"] for s in data_of(path)["sections"] if s["name"] == section)


def test_the_first_picture_divides_the_mean_step_of_each_phase(usual: Path) -> None:
    tokens = fixture.make_tables(tokens=12)[1]["tokens"]
    picture, figures, findings = blocks(usual, "summary")[:3]
    assert [block["kind"] for block in (picture, figures, findings)] == ["time", "cards", "findings"]
    assert [bar["title"] for bar in picture["bars"]] == ["Prefill step", "Decode step"]
    for bar, phase in zip(picture["bars"], ("prefill", "decode"), strict=True):
        mine = tokens[tokens["phase"] == phase]
        assert bar["steps"] == len(mine) and bar["ms"] == pytest.approx(mine["duration_ns"].mean() / 1e6)
        assert sum(ms for _, parts in bar["causes"] for _, ms in parts) == pytest.approx(bar["ms"])
        causes = [cause for cause, _ in bar["causes"]]
        assert causes == [cause for cause in CAUSES if cause in causes] and len(causes) > 1


def test_causes_are_drawn_in_their_own_colours(usual: Path) -> None:
    charts = [block["traces"] for block in blocks(usual, "time") if block["kind"] == "chart"]
    assert charts and all(trace["cause"] == trace["name"] in CAUSES for traces in charts for trace in traces)
    named = [item["cause"] for item in blocks(usual, "summary")[2]["items"] if item.get("cause")]
    assert named and set(named) <= set(CAUSES)


def listed(values: Any) -> list[float]:
    """A trace's values: a list, or Plotly's base64 of an array."""
    return values if isinstance(values, list) else np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()


def test_steps_have_the_recordings_numbers_on_every_axis(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=12)
    first = 500
    for table in tables.values():
        if "token_id" in table:
            table["token_id"] += first * (table["token_id"] >= 0)
    shown = [b for s in data_of(report(tmp_path, manifest, tables))["sections"] for b in s["blocks"]]
    charts = [b for b in shown if b["kind"] == "chart" and b["layout"].get("xaxis", {}).get("title", {}).get("text") == "step"]
    numbers = [n for chart in charts for trace in chart["traces"] for n in listed(trace["x"])]
    numbers += [n for block in shown if block["kind"] == "heat" for n in block["columns"]]
    assert len(charts) >= 4 and min(numbers) == first and max(numbers) == first + 11


def hostile() -> tuple[dict[str, Any], fixture.Tables]:
    manifest, tables = fixture.make_tables()
    manifest["command"] = [HOSTILE]
    manifest["machine"]["cpu_model"] = manifest["probes"][0]["symbol"] = HOSTILE
    manifest["level_changes"] = [{"ts_ns": fixture.START, "level": HOSTILE, "on": False, "why": HOSTILE}]
    manifest["engines"]["moescope"]["libraries"][0]["path"] = HOSTILE
    for table, column in (
        ("operators", "name"),
        ("operators", "type"),
        ("operators", "shape"),
        ("qnn_executes", "graph_name"),
        ("tensors", "name"),
        ("qnn_events", "name"),
        ("threads", "name"),
        ("counters", "name"),
        ("tokens", "phase"),
        ("tokens", "engine"),
        ("graphs", "kind"),
        ("graphs", "backend"),
        ("loads", "reason"),
        ("qnn_calls", "name"),
        ("tensors", "type"),
    ):
        tables[table] = tables[table].assign(**{column: HOSTILE})
    return manifest, tables


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an ordinary recording."""
    return report(tmp_path_factory.mktemp("report"), *fixture.make_tables(tokens=12))


def test_the_report_is_one_small_file_that_fetches_nothing(usual: Path) -> None:
    page = usual.read_text()
    assert usual.stat().st_size < 3_000_000
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "default-src 'none'" in page


def test_the_report_s_sums_are_the_tables(usual: Path) -> None:
    path, (_, tables) = usual, fixture.make_tables(tokens=12)
    table = next(b for b in blocks(path, "operators") if b["kind"] == "table" and b["title"] == "Operators by name")
    column = [c["name"] for c in table["columns"]].index("total ms")
    assert sum(row[column] for row in table["rows"]) == pytest.approx(tables["operators"].duration_ns.sum() / 1e6)
    heat = next(b for b in blocks(path, "experts") if b["kind"] == "heat")
    cells = [np.frombuffer(base64.b64decode(m["rows routed"]["bdata"]), np.uint16).sum() for m in heat["matrices"]]
    assert sum(cells) == len(tables["routes"])
    phases = next(b for b in blocks(path, "time") if b.get("title") == "Steps by phase")
    assert sum(row[1] for row in phases["rows"]) == len(tables["tokens"])


def test_an_emulated_npu_is_named_so_in_the_report(usual: Path) -> None:
    titles = [s["title"] for s in data_of(usual)["sections"]]
    assert "NPU: HTP emulator" in titles
    findings = next(b for b in blocks(usual, "recording") if b["kind"] == "findings")
    assert any("HTP emulator" in item["text"] for item in findings["items"])


def test_losses_are_told_first_where_the_recording_is_described(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    manifest |= {"lost": {"op_end": 12}, "state": "recording"}
    items = next(b for b in blocks(report(tmp_path, manifest, tables), "recording") if b["kind"] == "findings")["items"]
    assert any(item["level"] == "bad" and "12 records" in item["text"] for item in items)
    assert any("not finished" in item["text"] for item in items)


def test_the_findings_stand_before_all_else_with_saving_and_query(usual: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=12)
    expected = analyzer_findings(tables, ceilings.ceilings_for(manifest))
    found = next(b for b in blocks(usual, "summary") if b["kind"] == "findings")["items"]
    assert expected and [item["query"] for item in found] == [finding.query for finding in expected]
    assert [item["share"] for item in found] == [pytest.approx(min(finding.share, 1)) for finding in expected]


def told_by(cell: object, row: tuple[object, ...]) -> bool:
    """Whether a cell of a table stands in a row of a query's answer."""
    numbers = [float(value) for value in row if isinstance(value, int | float) and not isinstance(value, bool)]
    return str(cell) in map(str, row) or (isinstance(cell, int | float) and any(cell == pytest.approx(n) for n in numbers))


def test_tables_show_what_their_queries_answer(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tables = fixture.make_tables(tokens=12)
    monkeypatch.setattr("analyzer.commands.query.load_tables", lambda run_dir, names=None: LazyTables.of(tables))
    sections = data_of(usual)["sections"]
    shown = [block for section in sections for block in section["blocks"] if block["kind"] == "table" and block["query"]]
    assert len(shown) > 6
    for block in shown:
        _, rows = query_tables(usual.parent, block["query"])
        plain = [i for i, column in enumerate(block["columns"]) if column["kind"] != "moment"]
        assert block["total"] == len(rows)
        for cells, row in zip(block["rows"], rows, strict=False):
            assert all(told_by(cells[i], row) for i in plain if cells[i] not in (None, "unknown")), (block["title"], cells, row)


def test_every_chart_has_a_query_or_a_command_and_every_query_runs(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tables = fixture.make_tables(tokens=12)
    monkeypatch.setattr("analyzer.commands.query.load_tables", lambda run_dir, names=None: LazyTables.of(tables))
    every = [b for section in data_of(usual)["sections"] for b in section["blocks"]]
    drawn = [b for b in every if b["kind"] in ("chart", "heat")]
    assert len(drawn) > 8 and all(b["query"] or b.get("command") for b in drawn)
    for query in {b["query"] for b in every if b.get("query")}:
        names, rows = query_tables(usual.parent, query)
        assert names and (rows or "growth" in query), query


def test_sampled_operators_are_told_in_words(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables()
    manifest["sampling"] = {"allowed": 0.1, "slowdown_while_on": 0.5, "share_on": 0.25}
    change = {"ts_ns": fixture.START + 10**6, "level": "operator", "on": False, "tps": 4.5, "why": "slowdown of at most 10%"}
    manifest["level_changes"] = [change]
    shown = blocks(report(tmp_path, manifest, tables), "recording")
    told = " ".join(item["text"] for item in shown[0]["items"])
    assert all(figure in told for figure in ("25.0 %", " 10 %", "50.0 %", " 9.1 %"))  # 1 / (0.25 / 1.5 + 0.75) = 1.0909
    changes = next(b for b in shown if b.get("title") == "Levels switched")
    assert changes["rows"][0][-1] == [fixture.START + 10**6 + fixture.BOOT_OFFSET, 0]


def test_links_lead_to_where_the_slice_stands_in_the_trace(usual: Path) -> None:
    _, tables = fixture.make_tables(tokens=12)
    table = next(b for b in blocks(usual, "operators") if b.get("title") == "Operators by name")
    row, name = table["rows"][0], [column["name"] for column in table["columns"]].index("name")
    mine = tables["operators"][tables["operators"].name == row[name]]
    assert row[-1] in [[b + fixture.BOOT_OFFSET, d] for b, d in mine[["begin_ns", "duration_ns"]].to_numpy().tolist()]


@pytest.mark.parametrize(
    "missing",
    [(), ("qnn_executes", "qnn_events", "qnn_calls"), ("tokens",), ("operators", "op_threads"), ("routes", "experts")],
)
def test_a_recording_that_lacks_a_part_still_makes_a_report(tmp_path: Path, missing: tuple[str, ...]) -> None:
    manifest, tables = fixture.make_tables() if missing else fixture.empty_tables()
    for name in missing:
        tables[name] = tables[name].iloc[:0]
    names = [s["name"] for s in data_of(report(tmp_path, manifest, tables))["sections"]]
    assert names[0] == "summary" and names[-1] == "machine"


def test_names_from_the_traced_program_are_never_markup(tmp_path: Path) -> None:
    manifest, tables = hostile()
    path = report(tmp_path, manifest, tables)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    for page in (path, tmp_path / "profdag.html"):
        text = page.read_text()
        assert "<img" not in text and text.count("</script>") == text.count("<script")
    charts = [b for s in data_of(path)["sections"] for b in s["blocks"] if b["kind"] == "chart"]
    assert charts and "<img" not in json.dumps([c["traces"] for c in charts])


def test_a_roofline_is_drawn_under_a_roof_or_not_at_all() -> None:
    manifest, tables = fixture.make_tables()
    tables["operators"] = tables["operators"].assign(flops=4e6, read_bytes=1_000_000, written_bytes=1_000_000)
    roof = ceilings.Ceilings("a CPU", 4, {"1": 5e9, "4": 16e9}, {"1": 30e9, "4": 96e9}, 1e3)
    assert roofline_chart(Run(manifest, tables)) is None
    drawn = roofline_chart(Run(manifest, tables, {}, roof))
    lines = [trace for trace in (drawn or {})["traces"] if trace["mode"] == "lines"]
    for line, bandwidth, flops in zip(lines, (5, 16), (30, 96), strict=True):
        slope, top = float(line["y"][0] / line["x"][0]), float(max(line["y"]))
        assert slope == pytest.approx(bandwidth) and top == pytest.approx(flops)


def test_a_page_has_no_number_that_json_lacks() -> None:
    assert json_value({"a": np.float64("nan"), "b": np.int64(2**60), "c": [np.bool_(True), float("inf")]}, LARGEST) == {
        "a": None,
        "b": str(2**60),
        "c": [True, None],
    }


def test_identical_layers_are_recognised_and_nodes_do_not_overlap() -> None:
    _, tables = fixture.make_tables(layers=5)
    graph = build_profdag(tables, 1)
    layout = lay_out(graph)
    assert [b.same_as for b in layout.blocks if b.title.startswith("layer")] == ["layer 0"] * 5
    for number, block in enumerate(layout.blocks):
        places = sorted(place for node, place in layout.centre.items() if layout.block[node] == number)
        assert places and all(x - WIDTH / 2 >= 0 and x + WIDTH / 2 <= block.width and y <= block.height for x, y in places)
        for i, (x, y) in enumerate(places):
            assert all(abs(x - a) >= WIDTH or abs(y - b) >= HEIGHT for a, b in places[i + 1 :])
    ops = [n for n, d in graph.nodes(data=True) if d["role"] == "op"]
    assert set(ops) <= set(layout.centre)


def test_constants_are_drawn_once_per_consumer() -> None:
    graph = nx.DiGraph(token_id=0)
    common = {
        "type": "X",
        "layer": 0,
        "expert": -1,
        "shape": "",
        "backend": "",
        "begin_ns": 0,
        "duration_ns": 1,
        "busy_ns": 1,
        "wait_ns": 0,
        "maj_flt": 0,
    }
    graph.add_node("constant", role="constant", name="c", order=-1, **common)
    for i in range(4):
        graph.add_node(f"op {i}", role="op", name=f"op {i}", order=i, **common)
        graph.add_edge("constant", f"op {i}")
    shown = page_data(graph, lay_out(graph))
    assert [dot["of"] for dot in shown["dots"]] == [0, 1, 2, 3] and shown["edges"] == []


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 30))), min_size=1, max_size=12))
def test_the_critical_path_is_the_longest_of_all_chains(rows: list[tuple[int, list[int]]]) -> None:
    graph = nx.DiGraph()
    for i, (ns, above) in enumerate(rows):
        graph.add_node(str(i), duration_ns=ns)
        graph.add_edges_from((str(a), str(i)) for a in above if a < i)
    path, spent = critical_path(graph, list(graph))
    weighted = nx.DiGraph([("start", node, {"weight": graph.nodes[node]["duration_ns"]}) for node in graph])
    weighted.add_weighted_edges_from((a, b, graph.nodes[b]["duration_ns"]) for a, b in graph.edges)
    assert spent == nx.dag_longest_path_length(weighted) == sum(graph.nodes[node]["duration_ns"] for node in path)
    assert all(graph.has_edge(a, b) for a, b in pairwise(path))


def test_nodes_carry_their_loads_and_the_npu_s_cycles(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(layers=4)
    tables["operators"]["expert"] = tables["operators"]["graph_id"].map(tables["graphs"].set_index("graph_id").expert).fillna(-1)
    write_profdag(build_profdag(tables, 1), tables, manifest, tmp_path / "profdag.html")
    shown = data_of(tmp_path / "profdag.html")
    mine = tables["loads"][(tables["loads"].token_id == 1) & (tables["loads"].action == "load")]
    assert sum(node.get("load_ns", 0) for node in shown["nodes"]) == mine.duration_ns.sum() > 0
    cycles = tables["qnn_executes"].query("token_id == 1").accel_cycles.sum()
    assert sum(node.get("cycles", 0) for node in shown["nodes"]) == pytest.approx(cycles) and cycles > 0


def test_twenty_thousand_operators_are_laid_out_in_seconds() -> None:
    graph = nx.DiGraph(token_id=0)
    for i in range(20_000):
        graph.add_node(i, role="op", type="X", name=str(i), layer=i // 400, expert=-1, order=i)
        graph.add_edges_from((j, i) for j in {i - 1, i - 2, i - 37} if j >= 0)
    layout = lay_out(graph)
    assert len(layout.centre) == 20_000 and len(layout.blocks) == 50


def test_a_port_that_does_not_exist_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match="70000"):
        make_server(tmp_path / "trace.pftrace", False, 70000)


def test_the_server_gives_the_trace_to_the_ui_s_origin_alone_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace.pftrace"
    trace.write_bytes(b"\x0a\x00")
    (tmp_path / "secret").write_text("x")
    with make_server(trace, False, 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        port = served.server_address[1]
        assert served.server_address[0] == "127.0.0.1"

        def get(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str | None]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers.get("Access-Control-Allow-Origin")

        assert get("/trace.pftrace") == (200, b"\x0a\x00", "https://ui.perfetto.dev")
        assert get("/secret")[0] == get("/")[0] == get("/../secret")[0] == 404
        assert get("/trace.pftrace", Host="evil.example")[0] == 403
        assert get("/secret", "HEAD")[0] == 405
        served.shutdown()


@pytest.mark.parametrize(
    "words", ["write {}", "write {}/nothing --only trace", "write {} --only report", "write {} --format dot", "open {}"]
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main([word.format(tmp_path) for word in words.split()]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("moescope: ") and "\n" not in told and "manifest.json" in told


def test_a_crashed_empty_recording_can_still_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, _ = fixture.empty_tables()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["write", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(file["path"]).name for file in told["files"]] == ["trace.pftrace", "report.html"] and "operators" in told[
        "no_profdag"
    ]
    assert main(["write", str(tmp_path), "--only", "profdag"]) == 2


def test_exports_hold_what_the_timeline_holds(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = load_tables(exported)
    assert main(["write", str(exported), "--format", "chrome", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["files"]
    events = json.loads(Path(told["path"]).read_text())["traceEvents"]
    assert told["events"] == len(events)
    drawn = [event for event in events if event.get("cat") == "operator" and event["ph"] == "X"]
    spent = (tables["op_threads"].end_ns - tables["op_threads"].begin_ns).sum()
    assert sum(event["dur"] for event in drawn) * 1e3 == pytest.approx(spent)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"generate", "worker"}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_exported_tables_have_every_row(exported: Path, form: str, tmp_path: Path) -> None:
    assert main(["write", str(exported), "--format", form, "--out", str(tmp_path / "x")]) == 0
    read = pd.read_csv if form == "csv" else pd.read_parquet
    for name, frame in load_tables(exported).items():
        assert len(read(tmp_path / "x" / f"{name}.{form}")) == len(frame), name


def test_an_exported_graph_opens_elsewhere(exported: Path, tmp_path: Path) -> None:
    assert main(["write", str(exported), "--format", "graphml", "--out", str(tmp_path / "x.graphml")]) == 0
    graph = nx.read_graphml(tmp_path / "x.graphml")
    assert sum(data["role"] == "op" for _, data in graph.nodes(data=True)) == 12
    assert main(["write", str(exported), "--format", "graphml", "--token", "99"]) == 2


FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1")


@pytest.fixture(scope="module")
def hostile_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording whose operators are named to be run, computed, or to break out of what they stand in."""
    folder = tmp_path_factory.mktemp("hostile")
    manifest, tables = fixture.make_tables(tokens=2, layers=2)
    names = [*FORMULAS, HOSTILE, 'a"]; evil [label="x', "end\\", "\\", "bell\x07 null\x00 line\nnext", "]]><evil/>"]
    ops = tables["operators"]
    tables["operators"] = ops.assign(name=[names[i % len(names)] for i in range(len(ops))], type='"x\\')
    manifest["command"] = [HOSTILE, "not\udcffUTF-8"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_tables(tables, folder / "tables", input_fingerprint(folder))
    return folder


def test_no_cell_of_a_csv_is_a_formula(hostile_export: Path, tmp_path: Path) -> None:
    assert main(["write", str(hostile_export), "--format", "csv", "--out", str(tmp_path / "x")]) == 0
    names = pd.read_csv(tmp_path / "x" / "operators.csv", dtype=str, keep_default_na=False).name.tolist()
    expected = load_tables(hostile_export)["operators"].name.tolist()
    assert [
        name.removeprefix("'") if wanted in FORMULAS else name for name, wanted in zip(names, expected, strict=True)
    ] == expected
    assert not any(name.lstrip()[:1] in tuple("=+-@") for name in names if name.strip())
    starts = pd.read_csv(tmp_path / "x" / "loads.csv").begin_ns
    assert starts.tolist() == load_tables(hostile_export)["loads"].begin_ns.tolist()


def test_hostile_names_survive_json_and_graphml_as_text(hostile_export: Path, tmp_path: Path) -> None:
    assert main(["write", str(hostile_export), "--format", "chrome", "--out", str(tmp_path / "x.json")]) == 0
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert any(HOSTILE in event["name"] for event in events)
    assert main(["write", str(hostile_export), "--format", "graphml", "--token", "1", "--out", str(tmp_path / "x.graphml")]) == 0
    names = {data["name"] for _, data in nx.read_graphml(tmp_path / "x.graphml").nodes(data=True)}
    assert {"]]><evil/>", "bell\ufffd null\ufffd line\nnext"} <= names


def test_hostile_names_stay_within_their_strings_in_dot(hostile_export: Path) -> None:
    text = as_text(build_profdag(load_tables(hostile_export), 1), "dot")
    string = re.compile(r'"(?:[^"\\]|\\.)*"')
    left = string.sub("", text)
    assert '"' not in left and "evil" not in left and "onerror" not in left and "evil" in text
    assert json.loads(dot_string("ends in \\", 'a "word"', "two\nlines")) == 'ends in \\\na "word"\ntwo lines'


def test_pages_of_a_command_line_that_is_no_utf8(hostile_export: Path) -> None:
    assert main(["write", str(hostile_export), "--json"]) == 0
    assert "<img" not in (hostile_export / "report.html").read_text()


def test_findings_and_change_points_lead_into_the_timeline(tmp_path: Path) -> None:
    manifest, tables = fixture.make_tables(tokens=24)
    tokens = tables["tokens"]
    tables["tokens"] = tokens.assign(
        end_ns=tokens.end_ns.where(tokens.token_id < 12, tokens.begin_ns + tokens.duration_ns * 3 // 4),
        duration_ns=tokens.duration_ns.where(tokens.token_id < 12, tokens.duration_ns * 3 // 4),
    )
    path = report(tmp_path, manifest, tables)
    found = next(b for b in blocks(path, "summary") if b["kind"] == "findings")["items"]
    assert found and all(item["at"][0] >= fixture.START + fixture.BOOT_OFFSET and item["at"][1] > 0 for item in found)
    trend = next(b for b in blocks(path, "series") if b["kind"] == "pairs")["items"]
    begin = int(tokens.begin_ns[12]) + fixture.BOOT_OFFSET
    assert [row[2][0] for row in trend if row[0] == "from step 12"] == [begin]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    manifest, tables = fixture.make_tables()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_tables(tables, folder / "tables", input_fingerprint(folder))
    return folder


def growing(folder: Path, tokens: int, extra: bytes = b"") -> None:
    """A recording of `tokens` decode steps of 10 ms each, one after the other, that is still being made."""
    header = [["ts", "<u8", 0, 0], ["pid", "<u4", 8, 0], ["tid", "<u4", 12, 0], ["kind", "<u2", 16, 0], ["cpu", "<u2", 18, 0]]
    header += [["engine", "|u1", 20, 0], ["seq", "<u8", 24, 0], ["phase", "<u4", 32, 0], ["n_tokens", "<u4", 36, 0]]
    layouts = {name: {"kind": k, "bytes": 56, "fields": header} for name, k in (("token_begin", 1), ("token_end", 2))}
    slots = np.zeros((2 * tokens, 64), np.uint8)
    record = slots[:, 8:].view(dtype_from_json(header, 56))[:, 0]
    record["ts"] = fixture.START + np.repeat(np.arange(tokens), 2) * 10_000_000 + np.tile([0, 9_000_000], tokens)
    record["pid"], record["tid"], record["engine"], record["n_tokens"] = 7, 7, 1, 1
    record["kind"], record["seq"], record["phase"] = np.tile([1, 2], tokens), np.repeat(np.arange(tokens), 2), 2
    (folder / "events.bin").write_bytes(slots.tobytes() + extra)
    manifest = fixture.empty_tables()[0] | {"layouts": layouts, "records": {"token_begin": tokens}, "lost": {"token_end": 3}}
    manifest["cost"] = {"trap_ns": 10**7, "bpf_ns": 10**7}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_top_shows_the_latest_steps_of_a_growing_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveTables(tmp_path, seconds=1.0)
    for tokens in (20, 300):
        growing(tmp_path, tokens, extra=b"half a slot")
        now = live.snapshot()
        assert now.tokens["decode_tokens_per_s"] == pytest.approx(100) and now.state == "recording"
        assert now.tokens["steps"] == min(tokens, 101) and now.lost == 3
    assert main(["top", str(tmp_path), "--once"]) == 0
    told = capsys.readouterr().out
    assert "100.0 tok/s" in told and "probes 2.0% of a CPU" in told and "300 records | 3 lost" in told
