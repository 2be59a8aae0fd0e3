"""Comparing runs: the verb, its files and its exit codes, on results made from tables whose numbers are known."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.environment import environment_differences, environment_of
from analyzer.compare.graph import Skeleton, skeleton_of
from analyzer.compare.history import add_runs, build_changes, read_runs
from analyzer.compare.metrics import RunTables, _undisturbed_ns, extract_metrics, routed_rows
from analyzer.compare.results import CompareError, Result, save_result
from analyzer.compare.results import read_runs as read_results
from analyzer.compare.verdict_text import HEADLINES, figure_text, percent_text
from analyzer.imports.run_folder import Run, write_run
from analyzer.questions.step_time import charged_ns, step_time
from moescope.__main__ import main
from views.profdag.change_graph import as_graph
from views.regression import MOST_RUNS, list_runs, write_regression
from views.regression import metric_table as regression_table
from workloads import tables_fixture as fixture
from workloads.planting import Tables, displace_thread, make_cold, slow_operator, split_operator, stretch_ranges

HOSTILE = '</script><img src=x onerror="document.pwned=1">|\u0001`'


def result(name: str, seed: int, slow: str = "", factor: float = 1.0, swap: str = "", began: float = np.nan) -> Result:
    """A run of the fixture's model, its operators' times jittered by 0.5 %; those of type `slow` take `factor` as long."""
    made = made_result(seed, slow if factor != 1 else "", factor, swap)
    return replace(made, name=name, began=began, metrics=made.metrics.copy(), environment=deepcopy(made.environment))


@cache
def made_result(seed: int, slow: str, factor: float, swap: str) -> Result:
    """What many tests compare, made once."""
    manifest, tables = fixture.make_tables(tokens=12, layers=3)
    rng, op = np.random.default_rng(seed), tables["operators"]
    stretch = np.exp(rng.normal(0, 0.005, len(op))) * np.where(op["type"] == slow, factor, 1.0)
    if swap:
        op["type"] = op["type"].replace(swap, HOSTILE)
    tables = stretch_ranges(tables, op["begin_ns"].to_numpy(), op["end_ns"].to_numpy(), stretch)
    facts = RunTables(tables)
    series = rng.normal(10, 0.1, 60)
    series[30:] += 2 * (factor - 1)
    routes = [tuple(row) for row in routed_rows(tables).to_numpy().tolist()]
    return Result("", extract_metrics(facts), environment_of(manifest), series.tolist(), routes, skeleton_of(facts))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of stored results: six runs each, alternately; the candidate's attention takes 30 % longer."""
    folder = tmp_path_factory.mktemp("sides")
    for side, factor in (("base", 1.0), ("cand", 1.3)):
        (folder / side).mkdir()
        for i in range(6):
            made = result(f"{side}-{i}", i + 100 * (factor > 1), "attention", factor, began=2.0 * i + (side == "cand"))
            save_result(made, folder / side / f"{i}.parquet")
    return folder / "base", folder / "cand"


def test_charged_time_and_residual_make_up_every_token() -> None:
    tables = fixture.make_tables(tokens=6, layers=3)[1]
    time, tokens = step_time(tables), tables["tokens"]
    spent = np.bincount(tables["operators"]["token_id"], charged_ns(tables, time, "operators", "op_id"), len(tokens))
    spent += np.bincount(tables["loads"]["token_id"], charged_ns(tables, time, "loads", "load_id"), len(tokens))
    within = time[((time["op_id"] >= 0) | (time["load_id"] >= 0)).to_numpy()]
    assert spent == pytest.approx(np.bincount(within["token_id"], within["duration_ns"], len(tokens)))
    assert (spent <= tokens["duration_ns"]).all() and (spent > 0.8 * tokens["duration_ns"]).all()
    metrics = extract_metrics(RunTables(tables))
    for phase in ("prefill", "decode"):
        mine = metrics[(metrics["phase"] == phase) & metrics["family"].isin(["operator", "closure"])]
        step = mine.loc[mine["metric"] == "step", "mean"].sum()
        assert mine.loc[mine["metric"] != "step", "mean"].sum() == pytest.approx(step)


def test_what_is_usual_of_an_operator_leaves_out_the_slowest_fifth_of_each_name() -> None:
    charged = {"a": [1, 2, 3, 100, 4, 5, 6, 7, 8, 200], "b": [10, 1000]}
    rows = [(0, name, ns) for name, times in charged.items() for ns in times]
    frame = pd.DataFrame(rows, columns=["number", "name", "charged"])
    assert _undisturbed_ns(frame).to_dict() == {0: np.mean(range(1, 9)) * 10 + np.mean([10, 1000]) * 2}


def test_a_recording_of_tokens_alone_is_comparable() -> None:
    tables = fixture.make_tables(tokens=5, layers=2)[1]
    bare = {name: table.iloc[:0] if name != "tokens" else table for name, table in tables.items()}
    assert set(extract_metrics(RunTables(bare))["family"]) == {"speed", "tail", "memory"}


def test_a_recording_in_which_each_operator_ran_once_is_comparable() -> None:
    metrics = extract_metrics(RunTables(fixture.make_tables(tokens=2, layers=2)[1]))
    assert {"speed", "phase", "closure"} <= set(metrics["family"]) and "operator" not in set(metrics["family"])


def test_the_slower_operator_is_named_and_the_exit_code_follows_the_limit(sides, capsys, tmp_path: Path) -> None:
    files = ["--markdown", str(tmp_path / "s.md"), "--junit", str(tmp_path / "j.xml"), "--json"]
    assert main(["compare", *map(str, sides), *files]) == 1
    shown = json.loads(capsys.readouterr().out)
    tpot = next(m for m in shown["metrics"] if m["metric"] == "TPOT, median")
    assert tpot["verdict"] == "slower" and tpot["low"] < tpot["ratio"] < tpot["high"]
    operators = {m["type"] for m in shown["metrics"] if m["family"] == "operator" and m["verdict"] == "slower"}
    assert operators == {"attention"}
    decode = next(fall for fall in shown["waterfalls"] if fall["phase"] == "decode")
    assert decode["parts"][0]["name"].startswith("attention")
    assert sum(part["delta"] for part in decode["parts"]) == pytest.approx(decode["step"]["cand"] - decode["step"]["base"])
    assert "attention" in " ".join(one["text"] for one in shown["words"])
    assert "| TPOT, median |" in (tmp_path / "s.md").read_text()
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") not in ("0", None)
    assert main(["compare", *map(str, sides), "--fail-on", "slower:90%"]) == 0
    assert main(["compare", *map(str, sides), "--fail-on", "operator:10%"]) == 1
    assert main(["compare", str(sides[1]), str(sides[0])]) == 0


def test_sides_that_did_not_take_turns_are_judged_with_care_and_that_is_said(sides) -> None:
    base, cand = (read_results(side) for side in sides)
    assert [run.began for run in (*base, *cand)] == [*range(0, 12, 2), *range(1, 13, 2)]
    turns = compare_runs(base, cand)
    after = compare_runs(base, [replace(run, began=run.began + 100) for run in cand])
    unknown = compare_runs(base, [replace(run, began=np.nan) for run in cand])
    assert ["alternately" in " ".join(text for _, text in made.words) for made in (turns, after, unknown)] == [False, True, True]
    ends = [made.judged["log_high"] - made.judged["estimate"] for made in (turns, after)]
    assert turns.judged["paced"].equals(after.judged["paced"])
    assert ends[1].to_numpy() == pytest.approx(2**0.5 * ends[0].to_numpy(), nan_ok=True)
    for made in (turns, after, unknown):
        slower = made.judged[(made.judged["family"] == "operator") & (made.judged["verdict"] == "slower")]
        assert set(slower["type"]) == {"attention"}


def test_medians_are_shown_on_the_footing_of_their_ratio(capsys, tmp_path: Path) -> None:
    for side, factor in (("base", 1.0), ("cand", 1.1)):
        (tmp_path / side).mkdir()
        for i in range(8):
            run = result(f"{side}-{i}", i + 50 * (side == "cand"), "router", factor, began=2.0 * i + (side == "cand"))
            pace = np.exp(np.random.default_rng([i, side == "cand"]).normal(0, 0.3))
            run.metrics["value"] *= np.where(run.metrics["unit"] == "ms", pace, 1.0)
            save_result(run, tmp_path / side / f"{i}.parquet")
    files = ["--markdown", str(tmp_path / "s.md"), "--junit", str(tmp_path / "j.xml")]
    words = ["compare", str(tmp_path / "base"), str(tmp_path / "cand"), "--fail-on", "operator", *files]
    assert main([*words, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    slower = [m for m in shown["metrics"] if m["family"] == "operator" and m["verdict"] == "slower"]
    assert {m["type"] for m in slower} == {"router"} and all(m["paced"] for m in slower)
    for metric in shown["metrics"]:
        if metric["paced"]:
            assert metric["at_pace"] / metric["base"] == pytest.approx(metric["ratio"])
        else:
            assert metric["at_pace"] is None
    fair = f"at the base's pace {figure_text(slower[0]['at_pace'], 'ms')}, {percent_text(slower[0]['ratio'])}"
    cells = (
        f"| {percent_text(slower[0]['change'])} | {figure_text(slower[0]['at_pace'], 'ms')}, {percent_text(slower[0]['ratio'])} |"
    )
    markdown = (tmp_path / "s.md").read_text()
    assert fair in " ".join(one["text"] for one in shown["words"]) and fair in markdown and cells in markdown
    failed = [case.get("message") or "" for case in ElementTree.parse(tmp_path / "j.xml").getroot().iter("failure")]
    assert any(fair in message for message in failed)
    table = regression_table(shown).blocks[0]
    names = [column["name"] for column in table["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
    row = next(row for row in rows if row["family"] == "operator" and row["verdict"] == "slower")
    assert row["candidate"] / row["base"] - 1 == pytest.approx(row["change %"] / 100)
    assert row["candidate at the base's pace"] / row["base"] - 1 == pytest.approx(row["change at the base's pace %"] / 100)


def test_wrong_use_is_one_line_and_two(sides, capsys, tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_text("nothing")
    for words in (
        ["compare", str(sides[0])],
        ["compare", str(sides[0]), str(tmp_path / "gone")],
        ["compare", str(sides[0]), str(tmp_path)],
    ):
        assert main(words) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_differs_in_kind_and_in_conditions_is_said() -> None:
    base = [result(f"b{i}", i) for i in range(2)]
    cand = [result(f"c{i}", i, swap="router") for i in range(2)]
    cand[0].environment["kernel"], cand[1].environment["governor"] = "7.0", "powersave"
    made = compare_runs(base, cand)
    assert {(c.what, c.appeared) for c in made.structure if c.aspect == "operator"} == {("router", False), (HOSTILE, True)}
    unlike = environment_differences([r.environment for r in base], [r.environment for r in cand])
    assert {d.what: d.unfair for d in unlike} == {"governor": True, "kernel": True}


def test_another_model_makes_sides_unlike_and_an_unknown_one_does_not() -> None:
    def told(fingerprint: str, name: str) -> dict[str, str]:
        return environment_of({"models": [{"path": f"/models/{name}", "bytes": 12, "fingerprint": fingerprint * 64}]})

    assert environment_differences([told("a", "m.gguf")], [told("a", "m.gguf")]) == []
    assert {d.what: d.unfair for d in environment_differences([told("a", "m.gguf")], [told("a", "copy.gguf")])} == {
        "model file": False
    }
    found = environment_differences([told("a", "m.gguf")], [told("b", "m.gguf")])
    assert [(d.what, d.base, d.cand, d.unfair) for d in found] == [
        ("model", "a" * 12 + ", 12 bytes", "b" * 12 + ", 12 bytes", True)
    ]
    assert environment_differences([told("a", "m.gguf")], [environment_of({})]) == []


def test_the_graph_shows_what_changed_appeared_and_vanished() -> None:
    base = [result(f"b{i}", i) for i in range(6)]
    cand = [result(f"c{i}", i + 50, "attention", 1.3, "router") for i in range(6)]
    graph = as_document(compare_runs(base, cand))["graph"]
    verdicts = {(n["layer"], n["type"]): n["verdict"] for n in graph["nodes"]}
    assert [verdicts[layer, "attention"] for layer in range(3)] == ["slower"] * 3
    assert [verdicts[layer, "router"] for layer in range(3)] == ["vanished"] * 3
    assert [verdicts[layer, HOSTILE] for layer in range(3)] == ["appeared"] * 3
    assert verdicts[0, "rms_norm"] not in ("slower", "faster", "changed")
    number = {(n["layer"], n["type"]): i for i, n in enumerate(graph["nodes"])}
    norm, old, new, experts = (number[1, kind] for kind in ("rms_norm", "router", HOSTILE, "experts"))
    assert {(norm, old), (norm, new), (old, experts), (new, experts)} <= {tuple(edge) for edge in graph["edges"]}
    slow = next(n for n in graph["nodes"] if n["type"] == "attention")
    assert slow["cand"] / slow["base"] == pytest.approx(1.3, abs=0.02)


def test_dims_and_backend_that_changed_are_told_at_the_operator(tmp_path: Path) -> None:
    base, cand = result("b", 0), result("c", 1)
    moved = [(*node[:3], "64x1", "htp", node[5]) if node[2] == "router" else node for node in cand.graph.nodes]
    cand.graph = Skeleton(moved, cand.graph.edges)
    save_result(cand, tmp_path / "c.parquet")
    (stored,) = read_results(tmp_path / "c.parquet")
    assert stored.graph == cand.graph
    nodes = as_document(compare_runs([base], [stored]))["graph"]["nodes"]
    assert {(n["type"], n["was"]) for n in nodes if n["verdict"] == "changed"} == {("router", "2048x1")}


PLANTS: dict[str, tuple[Callable[[Tables], Tables], str, dict[str, object]]] = {
    "slower by 3 %": (lambda t: slow_operator(t, "attention", 1, 0.03), "operator", {"type": "attention", "layer": 1}),
    "slower by 10 %": (lambda t: slow_operator(t, "experts", 2, 0.1), "operator", {"type": "experts", "layer": 2}),
    "displaced": (lambda t: displace_thread(t, fixture.MAIN, 0.05), "scheduling", {"type": "generate (main)"}),
    "cold": (lambda t: make_cold(t, 0, 3, 20_000), "expert", {"metric": "load time per step", "layer": 0, "expert": 3}),
}


@pytest.fixture(scope="module")
def jittered() -> list[Tables]:
    """Ten runs of the fixture's model."""
    runs = []
    for seed in range(10):
        tables = fixture.make_tables(tokens=20, layers=3, npu=False)[1]
        op, rng = tables["operators"], np.random.default_rng(seed)
        stretch = np.exp(rng.normal(0, 0.003, len(op)) + rng.normal(0, 0.003))
        runs.append(stretch_ranges(tables, op["begin_ns"].to_numpy(), op["end_ns"].to_numpy(), stretch))
    return runs


@pytest.fixture(scope="module")
def unchanged(jittered: list[Tables]) -> list[Result]:
    """The first five of them."""
    return [Result(f"b{i}", extract_metrics(RunTables(tables)), began=2.0 * i) for i, tables in enumerate(jittered[:5])]


@pytest.mark.parametrize("name", PLANTS)
def test_a_change_planted_in_recorded_times_is_found_with_its_culprit_and_no_other(
    unchanged: list[Result], jittered: list[Tables], name: str
) -> None:
    plant, family, culprit = PLANTS[name]
    cand = [
        Result(f"c{i}", extract_metrics(RunTables(plant(tables))), began=2.0 * i + 1) for i, tables in enumerate(jittered[5:])
    ]
    made = compare_runs(unchanged, cand)
    accused = made.judged[(made.judged["family"] == family) & made.judged["verdict"].isin(["slower", "faster"])]
    assert accused[list(culprit)].drop_duplicates().to_dict("records") == [culprit]
    assert set(accused["verdict"]) == {"slower"}
    for fall in made.waterfalls:
        assert sum(part.delta for part in fall.parts) == pytest.approx(fall.step.delta, abs=1e-9)


def test_a_split_operator_is_told_as_structure(unchanged: list[Result], jittered: list[Tables]) -> None:
    cand = [Result("c", extract_metrics(RunTables(split_operator(jittered[5], "rms_norm", ("norm", "mul")))))]
    found = {(c.phase, c.what, c.appeared) for c in compare_runs(unchanged[:1], cand).structure if c.aspect == "operator"}
    assert found == {("decode", "rms_norm", False), ("decode", "norm", True), ("decode", "mul", True)}


def test_a_broken_limit_that_no_metric_stands_for_fails_in_junit_too(tmp_path: Path) -> None:
    for side, swap in (("base", ""), ("cand", "router")):
        (tmp_path / side).mkdir()
        save_result(result(side, 0, swap=swap), tmp_path / side / "0.parquet")
    words = [
        "compare",
        str(tmp_path / "base"),
        str(tmp_path / "cand"),
        "--junit",
        str(tmp_path / "j.xml"),
        "--fail-on",
        "structure",
    ]
    assert main(words) == 1
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    failed = [case.get("name") or "" for case in suite.iter("testcase") if case.find("failure") is not None]
    assert any("router" in name for name in failed)
    assert int(suite.get("failures") or 0) == len(failed) and int(suite.get("tests") or 0) == len(list(suite.iter("testcase")))


def test_only_the_metric_that_broke_its_limit_fails_in_junit(sides, tmp_path: Path) -> None:
    from analyzer.compare.verdict_text import junit

    shown = as_document(compare_runs(read_results(sides[0]), read_results(sides[1])))
    text = junit(shown, ["TPOT, p90: +30.0 %"]).split("\n", 1)[1]
    failed = [case.get("name") for case in ElementTree.fromstring(text).iter("testcase") if case.find("failure") is not None]
    assert failed == ["TPOT, p90"]


def test_hostile_names_stay_text_in_every_form(tmp_path: Path, sides) -> None:
    from analyzer.compare.verdict_text import junit, markdown

    shown = as_document(compare_runs([result("b", 0)], [result(HOSTILE, 1, swap="router")]))
    write_regression(shown, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert HOSTILE not in page and "<img" not in page
    assert "<img" not in markdown(shown)
    for metric in shown["metrics"]:
        metric["label"], metric["verdict"] = HOSTILE, "slower"
    ElementTree.fromstring(junit(shown, []).split("\n", 1)[1])


def recorded_builds(url: str, slower_from: int) -> None:
    """Eight builds of five runs; from one build on they are 10 % slower."""
    speed = result("", 0).metrics.query("family == 'speed'")
    for build in range(8):
        runs = []
        for i in range(5):
            row, noise = speed.copy(), np.random.default_rng(10 * build + i).normal(0, 0.01)
            factor = np.where(row["better"] == "lower", 1.0, -1.0) * np.log(1.1 if build >= slower_from else 1.0)
            row["value"] *= np.exp(noise + factor)
            runs.append(Result(f"run-{build}-{i}", row))
        assert len(add_runs(url, runs, f"v{build}", "board/1", recorded=1e9 + build)) == 5
        assert add_runs(url, runs, f"v{build}", "board/1", recorded=2e9) == []


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_history_finds_the_build_that_changed_in_any_store(tmp_path: Path, capsys, place: str) -> None:
    url = str(tmp_path / "results") if place == "folder" else f"memory://{tmp_path.name}/results"
    recorded_builds(url, 5)
    found = build_changes(read_runs(url, "speed"))
    tpot = found[found["metric"] == "TPOT, median"]
    assert tpot[["before", "build"]].to_numpy().tolist() == [["v4", "v5"]]
    assert tpot["ratio"].iloc[0] == pytest.approx(1.1, abs=0.03)
    assert main(["history", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["build"] for row in told["builds"]} == {f"v{i}" for i in range(8)}
    assert {row["build"] for row in told["changes"]} == {"v5"}


def test_history_is_partitioned_by_build_and_device_and_its_exit_code_says_whether_the_newest_build_is_worse(
    tmp_path: Path, capsys, sides
) -> None:
    url = tmp_path / "results"
    recorded_builds(str(url), 7)
    assert {path.parent.relative_to(url).as_posix() for path in url.rglob("*.parquet")} == {
        f"build=v{i}/device=board%2F1" for i in range(8)
    }
    assert main(["history", str(url)]) == 1
    assert "v6 to v7" in " ".join(capsys.readouterr().out.split())
    assert main(["history", str(url), "--add", str(sides[0]), "--build", "v8", "--device", "other"]) == 0
    assert "6 runs added" in capsys.readouterr().out
    assert main(["history", str(url), "--device", "other"]) == 0
    for words in (["history", str(tmp_path / "nothing")], ["history", str(url), "--add", str(sides[0])]):
        assert main(words) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises(CompareError):
        read_runs(str(tmp_path / "nothing"), "speed")


def clocked(name: str, seed: int, mhz: float, slow: str = "", factor: float = 1.0) -> Result:
    """A run whose CPUs 4-7 ran at `mhz` while it decoded."""
    made = result(name, seed, slow, factor, began=float(seed))
    return replace(made, metrics=pd.concat([made.metrics, clock_metrics(mhz)]))


@cache
def clock_metrics(mhz: float) -> pd.DataFrame:
    steps = {"ts_ns": [fixture.START - 1], "what": "frequency", "number": 4, "name": "CPUs 4-7", "value": mhz, "most": 2800.0}
    tables = {**fixture.make_tables(tokens=12, layers=3)[1], "clocks": fixture.frame("clocks", **steps)}
    metrics = extract_metrics(RunTables(tables))
    return metrics[metrics["family"] == "clocks"]


def test_sides_that_ran_at_other_clocks_are_compared_at_equal_ones_where_enough_runs_allow() -> None:
    hot, cool = 1900.0, 2800.0
    slow = {hot: 1.5, cool: 1.0}
    base = [clocked(f"b{i}", 2 * i, mhz, "attention", slow[mhz]) for i, mhz in enumerate([cool] * 7 + [hot] * 2)]
    cand = [clocked(f"c{i}", 2 * i + 1, mhz, "attention", slow[mhz]) for i, mhz in enumerate([cool] * 6 + [hot] * 8)]
    made = compare_runs(base, cand)
    assert [run.name for run in made.base] == [f"b{i}" for i in (0, 1, 2, 3, 4, 5, 7, 8)] and len(made.cand) == 8
    assert [(d.what, d.base, d.cand) for d in made.differences if d.unfair] == [("clock of CPUs 4-7", "2.80 GHz", "1.90 GHz")]
    assert not made.judged["verdict"].isin(["slower", "faster"]).any()


def test_without_such_runs_all_are_compared_and_the_clocks_are_named() -> None:
    made = compare_runs(
        [clocked(f"b{i}", 2 * i, 2800.0) for i in range(6)], [clocked(f"c{i}", 2 * i + 1, 1900.0) for i in range(6)]
    )
    assert len(made.base) == len(made.cand) == 6
    assert made.judged.set_index("metric").loc["frequency", "verdict"] == "slower"
    assert compare_runs([clocked("b", 0, 2800.0)], [clocked("c", 1, 2750.0)]).differences == []


def test_the_same_run_twice_is_refused_by_name(tmp_path: Path, capsys) -> None:
    for name in ("a", "b", "c"):
        tables = fixture.make_tables(tokens=8, layers=2)[1]
        factor = {"a": 1.0, "b": 1.01, "c": 1.02}[name]
        op = tables["operators"]
        tables = stretch_ranges(tables, op["begin_ns"].to_numpy(), op["end_ns"].to_numpy(), factor)
        write_run(tmp_path / name, Run("llama.cpp", dict(tables)), "p", ["p"], started_utc=name)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, b, c, copy, link = (str(tmp_path / name) for name in ("a", "b", "c", "copy", "link"))
    assert main(["compare", a, b, "--save", str(tmp_path / "saved")]) in (0, 1)
    (stored,) = (tmp_path / "saved" / "base").glob("*.parquet")
    capsys.readouterr()
    for words, named in (
        ([a, b, a, "::", c], (a, a)),
        ([a, b, "::", c, copy], (a, copy)),
        ([link, "::", a, c], (link, a)),
        ([a, "::", b, str(stored)], (a, str(stored))),
        ([a, copy], (a, copy)),
        ([str(tmp_path / "[al]*"), "::", b, c], (a, link)),
    ):
        assert main(["compare", *words]) == 2
        (told,) = capsys.readouterr().err.strip().splitlines()
        assert all(name in told for name in named)
    assert main(["compare", a, b, "::", c]) in (0, 1)


def test_edges_of_the_graph_of_changes_lead_from_what_is_read_to_its_reader() -> None:
    diff = {"nodes": [{"type": kind, "layer": 0} for kind in ("a", "b", "c")], "edges": [(0, 1), (2, 1)]}
    assert sorted(as_graph(diff).edges) == [("0", "1"), ("2", "1")]


def test_only_where_runs_are_left_out_of_a_list_it_says_so() -> None:
    names = [f"run-{number}" for number in range(MOST_RUNS + 1)]
    assert list_runs(names[:-1]) == f"{MOST_RUNS} runs: {', '.join(names[:-1])}"
    assert list_runs(names) == f"{MOST_RUNS + 1} runs: {', '.join(names[:-1])} …"


def test_runs_that_were_left_out_are_listed_with_the_reason() -> None:
    hot, cool = 1900.0, 2800.0
    base = [clocked(f"b{i}", 2 * i, mhz) for i, mhz in enumerate([cool] * 6 + [hot] * 3)]
    cand = [clocked(f"c{i}", 2 * i + 1, hot) for i in range(5)] + [clocked("c5", 11, cool), clocked("c6", 13, cool)]
    nothing = replace(base[0], name="empty", metrics=base[0].metrics.iloc[:0])
    told = as_document(compare_runs([*base, nothing], cand))
    left = {(row["side"], row["run"]): row["why"] for row in told["left_out"]}
    assert len(told["runs"]["base"]) == len(told["runs"]["cand"]) == 5
    assert {run for side, run in left if side == "cand"} == {"c3", "c4"} and len(left) == 7
    assert "no metric" in left["base", "empty"] and all("clocks" in why for (_, run), why in left.items() if run != "empty")


def test_speed_stands_first_in_a_fixed_order_then_causes_then_effects() -> None:
    def side(factor: float, rate: float, first: float) -> list[Result]:
        runs = [
            result(f"{factor}-{i}", int(i + 100 * factor), "attention", factor, began=2.0 * i + (factor > 1)) for i in range(5)
        ]
        for run in runs:
            metrics = run.metrics
            metrics.loc[(metrics["metric"] == "hit rate") & (metrics["phase"] == "decode"), "value"] = rate
            metrics.loc[metrics["metric"] == "first executions", "value"] *= first
        return runs

    told = as_document(compare_runs(side(1.0, 1.0, 1.0), side(1.3, 0.9567, 0.332)))
    speed = [m["metric"] for m in told["metrics"] if m["family"] == "speed"]
    assert speed == [name for name in HEADLINES if name in speed] and speed[:2] == ["TTFT", "TPOT, median"]
    changed = [m for m in told["metrics"] if m["family"] != "speed" and m["verdict"] in ("slower", "faster")]
    assert (changed[0]["metric"], changed[0]["phase"], changed[0]["ratio"]) == ("hit rate", "decode", pytest.approx(0.9567))
    families = [m["family"] for m in changed]
    assert families.index("operator") < families.index("closure")
    texts = [one["text"] for one in told["words"]]
    assert texts[0].startswith("TTFT") and texts[1].startswith("median TPOT")
    causes = [text for text in texts if text.startswith(("Worse", "Slower", "Faster"))]
    assert causes[0].startswith("Worse: ") and causes[1].startswith("Slower: ")
