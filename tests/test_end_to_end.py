"""The main job, from the user's command to what they look at, held against the runtime's own log."""

import threading
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analyzer.questions import fidelity, npu_windows
from analyzer.tables import store as tables_module
from tests.conftest import ROOT, DemoRun, trace
from tests.judge import Judge
from tests.test_step_time import by_step
from tests.test_views_browser import browser, complaints, opened, wait  # noqa: F401
from tests.truth import skip_where_stolen
from views.serving import make_server, ui_address

pytestmark = pytest.mark.needs("probes", "htp")
Tables = dict[str, Any]


@pytest.fixture(scope="module")
def judge(demo: DemoRun) -> Judge:
    return Judge(demo.folder / "trace.pftrace")


@pytest.fixture(scope="module")
def tables(demo: DemoRun) -> Tables:
    return tables_module.load_tables(demo.folder)


def counted(judge: Judge, category: str) -> tuple[int, int]:
    """(slices, summed ns) of one category."""
    return judge.rows(f"select count(*) as n, sum(dur) as d from slice where category = '{category}'")[0]


def test_sql_on_the_trace_counts_what_the_runtime_counted(judge: Judge, demo: DemoRun) -> None:
    log = demo.log
    assert counted(judge, "token")[0] == len(log["steps"])
    assert counted(judge, "expert")[0] == sum(row["runs"] for row in log["expert_runs"])
    executes = "select count(*) as n from slice s join track t on s.track_id = t.id where t.name like 'QNN Execute%'"
    htp = sum(row.get("htp", 0) for row in log["statistics"]["graph_runs"].values())
    assert judge.rows(executes) == [(htp,)] and htp > 30


def test_durations_in_the_trace_are_those_of_the_recording(judge: Judge, tables: Tables) -> None:
    for category, table in (("token", "tokens"), ("graph", "graphs"), ("expert", "experts")):
        assert counted(judge, category) == (len(tables[table]), tables[table].duration_ns.sum())
    executes = "select sum(dur) as d from slice s join track t on s.track_id = t.id where t.name like 'QNN Execute%'"
    assert judge.rows(executes) == [(tables["qnn_executes"].duration_ns.sum(),)]


def test_every_moment_of_the_demo_has_a_part_and_a_cause(tables: Tables) -> None:
    rows = by_step(tables)
    assert (rows.sum(axis=1) == tables["tokens"].set_index("token_id")["duration_ns"]).all()
    assert (rows["residual"] < 0.02 * rows.sum(axis=1)).all()
    windows = npu_windows.npu_windows(tables).dropna(subset=["accelerator_ns"])
    parts = windows[["before_ns", "accelerator_ns", "residual_ns", "after_ns"]].sum(axis=1)
    assert len(windows) > 30 and ((parts - windows["window_ns"]).abs() < 1).all()


def test_the_manifest_has_the_declared_keys(demo: DemoRun) -> None:
    assert set(demo.manifest) == set(tomllib.loads((ROOT / "analyzer" / "records" / "manifest.toml").read_text()))


@pytest.mark.long
def test_phases_last_as_long_as_by_the_runtimes_own_timers(tables: Tables, demo: DemoRun) -> None:
    skip_where_stolen(demo.stolen)
    found = fidelity.fidelity_report(tables, {"phases": fidelity.log_truth(demo.folder / "runtime.json")})["phases"]["rows"]
    assert set(found["name"]) == {"prefill", "decode"} and (found["accuracy_percent"] > 97).all()


def test_thread_states_in_the_trace_are_those_of_the_recording(judge: Judge, tables: Tables, demo: DemoRun) -> None:
    main = demo.manifest["target"]["pid"]
    sql = f"select state, sum(dur) as d from thread_state join thread using (utid) where tid = {main} and dur > 0 group by 1"
    drawn = dict(judge.rows(sql))
    states = tables["thread_states"]
    expected = states[states["tid"] == main].groupby("state")["duration_ns"].sum().to_dict()
    assert drawn["Running"] == expected["running"]
    assert drawn["S"] == expected["sleeping"]
    assert drawn["R"] + drawn.get("R+", 0) == expected["runnable"]
    assert drawn["T"] == expected["stopped"]


def test_every_npu_execute_has_an_arrow_from_the_cpu(judge: Judge, tables: Tables) -> None:
    sql = (
        "select count(distinct f.slice_in) as n from flow f join slice s on f.slice_in = s.id join track t on s.track_id = t.id "
        "where t.name like 'QNN Execute%'"
    )
    assert judge.rows(sql) == [(len(tables["qnn_executes"]),)]


def test_the_npu_tracks_say_that_they_are_emulated(judge: Judge, demo: DemoRun) -> None:
    names = {name for (name,) in judge.rows("select distinct name from track where name like 'QNN %'")}
    assert {name.split(" (")[0] for name in names} >= {"QNN Execute", "QNN Device", "QNN Node"}
    if demo.manifest["qnn"]["emulator"]:
        assert all(name.endswith("(HTP emulator)") for name in names)


def test_the_cpu_and_the_npu_work_at_the_same_time(tables: Tables) -> None:
    graphs = tables["graphs"]
    attention = graphs[(graphs["kind"] == "attention") & (graphs["token_id"] == 0)]
    experts = graphs[(graphs["kind"] == "expert") & (graphs["token_id"] == 0)]
    assert set(attention["tid"]).isdisjoint(experts["tid"])
    starts = attention["begin_ns"].to_numpy()[:, None]
    overlaps = (starts < experts["end_ns"].to_numpy()) & (
        attention["end_ns"].to_numpy()[:, None] > experts["begin_ns"].to_numpy()
    )
    assert overlaps.any()


def test_loads_evictions_and_hits_are_the_runtimes(tables: Tables, demo: DemoRun) -> None:
    facts, loads = demo.log["statistics"], tables["loads"]
    assert Counter(loads["action"]) == {"load": sum(facts["loads"].values()), "evict": facts["evictions"]}
    state = tables["experts"].groupby(["token_id", "layer", "expert", "backend", "tier"])["cache"].first()
    assert (state == "hit").sum() / len(state) == pytest.approx(facts["hit_rate"], abs=0.02)
    assert loads["resident_bytes"].max() <= demo.log["engine"]["expert_cache_bytes"]


def test_a_tokens_time_is_the_sum_of_its_parts(tables: Tables) -> None:
    main = tables["tokens"]["tid"].iloc[0]
    operators = tables["operators"][tables["operators"]["tid"] == main]
    decode = tables["tokens"][tables["tokens"]["phase"] == "decode"].set_index("token_id")["duration_ns"]
    share = operators.groupby("token_id")["duration_ns"].sum().reindex(decode.index) / decode
    assert share.max() <= 1.0 and share.median() > 0.85


def test_the_summary_names_everything_a_user_asks_for(demo: DemoRun) -> None:
    words = ("HTP emulator", "TTFT", "TPOT", "tok/s", "expert load", "hits", "demand", "executions", "accelerator")
    words += ("computing", "records kept", "probes", "trace.pftrace", "report.html", "profdag.html")
    for word in words:
        assert word in demo.output, word
    assert len(demo.output.splitlines()) < 80


@pytest.mark.needs("chromium")
def test_report_and_profdag_of_the_demo_open_without_complaint(browser: Any, demo: DemoRun) -> None:  # noqa: F811
    run = opened(browser, demo.folder / "report.html")
    assert run("return document.querySelectorAll('section').length") == 10
    assert "HTP emulator" in run("return document.body.innerText")
    run = opened(browser, demo.folder / "profdag.html")
    assert run("return dag.nodes.length") == 4 * 6 + 3, "six operators a layer; embedding, head and the choice"
    assert complaints(browser) == []


@pytest.mark.needs("chromium")
def test_the_perfetto_ui_shows_the_demo(browser: Any, demo: DemoRun) -> None:  # noqa: F811
    with make_server(demo.folder / "trace.pftrace", True, 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        browser.get(ui_address(served, True))
        wait(lambda: browser.execute_script("return !!(self.app && self.app.trace)"))
        expand = "self.app.commands.runCommand('dev.perfetto.ExpandAllGroups'); return document.body.innerText"
        shown = f"try {{ {expand} }} catch (not_ready_yet) {{ return '' }}"
        assert wait(lambda: "QNN Execute" in browser.execute_script(shown))
        browser.get("about:blank")
        served.shutdown()


def test_tracing_a_second_time_writes_a_folder_of_its_own(tmp_path: Path) -> None:
    done = trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path / "again"))
    assert done.returncode == 0 and (tmp_path / "again" / "runtime.json").exists()
