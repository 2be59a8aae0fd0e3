"""The report, the ProfDAG page, the server and the command line, without a browser."""

import base64
import gzip
import http.client
import json
import re
import threading
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from analyzer import ceilings
from analyzer.commands.query import execute
from analyzer.findings import findings as analyzer_findings
from analyzer.profdag import build
from analyzer.summary import summarize
from tests import tables_fixture as fixture
from tracer.recording import Recording
from views.__main__ import main
from views.layout import HEIGHT, WIDTH, document, lay_out
from views.page import plain, write_page
from views.profdag_page import write_profdag
from views.report import write_report
from views.serving import server

HOSTILE = "</script><img src=x onerror='document.pwned=1'>"


def report(tmp_path: Path, manifest: dict[str, Any], tables: fixture.Tables) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    path = tmp_path / "report.html"
    write_report(manifest, tables, summarize(Recording(tmp_path), tables), path)
    return path


def data_of(path: Path) -> Any:
    """The document inside a page."""
    found = re.search(r'id="asset-data">([^<]*)<', path.read_text())
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def blocks(path: Path, section: str) -> list[dict[str, Any]]:
    return next(s["blocks"] for s in data_of(path)["sections"] if s["name"] == section)


def hostile() -> tuple[dict[str, Any], fixture.Tables]:
    manifest, tables = fixture.make()
    manifest["command"] = [HOSTILE]
    manifest["machine"]["cpu_model"] = manifest["probes"][0]["symbol"] = HOSTILE
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
    ):
        tables[table] = tables[table].assign(**{column: HOSTILE})
    return manifest, tables


def test_the_report_is_one_small_file_that_fetches_nothing(tmp_path: Path) -> None:
    path = report(tmp_path, *fixture.make())
    page = path.read_text()
    assert path.stat().st_size < 3_000_000
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "default-src 'none'" in page


def test_the_report_s_sums_are_the_tables(tmp_path: Path) -> None:
    _, tables = fixture.make()
    path = report(tmp_path, *fixture.make())
    table = next(b for b in blocks(path, "operators") if b["kind"] == "table" and b["title"] == "Operators by name")
    column = [c["name"] for c in table["columns"]].index("total ms")
    assert sum(row[column] for row in table["rows"]) == pytest.approx(tables["operators"].duration_ns.sum() / 1e6)
    heat = next(b for b in blocks(path, "experts") if b["kind"] == "heat")
    cells = [np.frombuffer(base64.b64decode(m["rows routed"]["bdata"]), np.uint16).sum() for m in heat["matrices"]]
    assert sum(cells) == len(tables["routes"])
    phases = next(b for b in blocks(path, "phases") if b["kind"] == "table")
    assert sum(row[1] for row in phases["rows"]) == len(tables["tokens"])


def test_an_emulated_npu_is_named_so_in_the_report(tmp_path: Path) -> None:
    path = report(tmp_path, *fixture.make())
    titles = [s["title"] for s in data_of(path)["sections"]]
    assert "NPU: HTP emulator" in titles
    findings = next(b for b in blocks(path, "recording") if b["kind"] == "findings")
    assert any("HTP emulator" in item["text"] for item in findings["items"])


def test_losses_are_told_first_where_the_recording_is_described(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
    manifest |= {"lost": {"op_end": 12}, "state": "recording"}
    items = next(b for b in blocks(report(tmp_path, manifest, tables), "recording") if b["kind"] == "findings")["items"]
    assert any(item["level"] == "bad" and "12 records were lost" in item["text"] for item in items)
    assert any("not finished" in item["text"] for item in items)


def test_the_findings_stand_before_all_else_with_prize_and_query(tmp_path: Path) -> None:
    manifest, tables = fixture.make(tokens=12)
    path = report(tmp_path, manifest, tables)
    expected = analyzer_findings(tables, ceilings.load(manifest["machine"]))
    found = next(b for b in blocks(path, "summary") if b["kind"] == "findings")["items"]
    assert expected and [item["query"] for item in found] == [finding.query for finding in expected]
    assert [item["prize"] for item in found] == [pytest.approx(min(finding.prize_share, 1)) for finding in expected]


def test_every_chart_has_a_query_and_every_query_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, tables = fixture.make(tokens=12)
    path = report(tmp_path, manifest, tables)
    monkeypatch.setattr("analyzer.commands.query.load", lambda run_dir, names=None: tables)
    every = [b for section in data_of(path)["sections"] for b in section["blocks"]]
    drawn = [b for b in every if b["kind"] in ("chart", "heat")]
    assert len(drawn) > 8 and all(b["query"] for b in drawn)
    for query in {b["query"] for b in every if b.get("query")}:
        names, rows = execute(tmp_path, query)
        assert names and (rows or "growth" in query), query


def test_sampled_operators_are_told_in_words(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
    manifest["sampling"] = {"allowed": 0.1, "slowdown_while_on": 0.5, "share_on": 0.25}
    change = {"ts_ns": fixture.START + 10**6, "level": "operator", "on": False, "tps": 4.5, "why": "slowdown of at most 10%"}
    manifest["level_changes"] = [change]
    shown = blocks(report(tmp_path, manifest, tables), "recording")
    told = " ".join(item["text"] for item in shown[0]["items"])
    assert "for 25.0 % of the time only" in told and "allowed to slow decode down by 10 %" in told
    assert "50.0 % longer" in told and "about 9.1 %" in told  # 1 / (0.25 / 1.5 + 0.75) = 1.0909
    changes = next(b for b in shown if b.get("title") == "Levels switched")
    assert changes["rows"][0][-1] == [fixture.START + 10**6 + fixture.BOOT_OFFSET, 0]


def test_links_lead_to_where_the_slice_stands_in_the_trace(tmp_path: Path) -> None:
    manifest, tables = fixture.make()
    table = next(b for b in blocks(report(tmp_path, manifest, tables), "operators") if b.get("title") == "Operators by name")
    row, name = table["rows"][0], [column["name"] for column in table["columns"]].index("name")
    mine = tables["operators"][tables["operators"].name == row[name]]
    assert row[-1] in [[b + fixture.BOOT_OFFSET, d] for b, d in mine[["begin_ns", "duration_ns"]].to_numpy().tolist()]


@pytest.mark.parametrize(
    "missing",
    [(), ("qnn_executes", "qnn_events", "qnn_calls"), ("tokens",), ("operators", "op_threads"), ("routes",), ("experts",)],
)
def test_a_recording_that_lacks_a_part_still_makes_a_report(tmp_path: Path, missing: tuple[str, ...]) -> None:
    manifest, tables = fixture.make() if missing else fixture.nothing()
    for name in missing:
        tables[name] = tables[name].iloc[:0]
    names = [s["name"] for s in data_of(report(tmp_path, manifest, tables))["sections"]]
    assert names[0] == "summary" and names[-1] == "machine"


def test_names_from_the_traced_program_are_never_markup(tmp_path: Path) -> None:
    manifest, tables = hostile()
    path = report(tmp_path, manifest, tables)
    write_profdag(build(tables, 1), tables, manifest, tmp_path / "profdag.html")
    for page in (path, tmp_path / "profdag.html"):
        text = page.read_text()
        assert "<img" not in text and text.count("</script>") == text.count("<script")
    charts = [b for s in data_of(path)["sections"] for b in s["blocks"] if b["kind"] == "chart"]
    assert charts and "<img" not in json.dumps([c["traces"] for c in charts])


def test_a_page_has_no_number_that_json_lacks(tmp_path: Path) -> None:
    assert plain({"a": np.float64("nan"), "b": np.int64(2**60), "c": [np.bool_(True), float("inf")]}) == {
        "a": None,
        "b": str(2**60),
        "c": [True, None],
    }
    with pytest.raises(TypeError):
        write_page(tmp_path / "x.html", "report", "x", {"a": object()})


def test_identical_layers_are_recognised_and_nodes_do_not_overlap() -> None:
    _, tables = fixture.make(layers=5)
    graph = build(tables, 1)
    layout = lay_out(graph)
    assert [b.same_as for b in layout.blocks if b.title.startswith("layer")] == ["layer 0"] * 5
    places = sorted(layout.centre.values())
    assert len(set(places)) == len(places)
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
    shown = document(graph, lay_out(graph))
    assert [dot["of"] for dot in shown["dots"]] == [0, 1, 2, 3] and shown["edges"] == []


def test_twenty_thousand_operators_are_laid_out_in_seconds() -> None:
    graph = nx.DiGraph(token_id=0)
    for i in range(20_000):
        graph.add_node(i, role="op", type="X", name=str(i), layer=i // 400, expert=-1, order=i)
        graph.add_edges_from((j, i) for j in {i - 1, i - 2, i - 37} if j >= 0)
    layout = lay_out(graph)
    assert len(layout.centre) == 20_000 and len(layout.blocks) == 50


def test_the_server_gives_the_trace_to_the_ui_s_origin_alone_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace.pftrace"
    trace.write_bytes(b"\x0a\x00")
    (tmp_path / "secret").write_text("x")
    with server(trace, False, 0) as served:
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


@pytest.mark.parametrize("words", [["write", "{}"], ["trace", "{}/nothing"], ["report", "{}"], ["dag", "{}"], ["open", "{}"]])
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([word.format(tmp_path) for word in words]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ") and "\n" not in told and "manifest.json" in told


def test_a_crashed_empty_recording_can_still_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, _ = fixture.nothing()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["write", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(file["path"]).name for file in told["files"]] == ["trace.pftrace", "report.html"] and "operators" in told[
        "no_profdag"
    ]
    assert main(["dag", str(tmp_path)]) == 2
