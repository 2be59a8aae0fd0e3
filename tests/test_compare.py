"""Comparing runs: the verb, its files and its exit codes, on results made from tables whose numbers are known."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.__main__ import main
from analyzer.compare import compare, document
from analyzer.compare_attribution import charge
from analyzer.compare_environment import differences, environment
from analyzer.compare_history import add, changes, read
from analyzer.compare_metrics import extract, routing
from analyzer.compare_results import CompareError, Result, save
from tests import tables_fixture as fixture
from views.regression import write_regression

HOSTILE = '</script><img src=x onerror="document.pwned=1">|\u0001`'


def result(name: str, seed: int, slow: str = "", factor: float = 1.0, swap: str = "") -> Result:
    """A run of the fixture's model, its operators' times jittered by 0.5 %; those of type `slow` take `factor` as long."""
    manifest, tables = fixture.make(tokens=12, layers=3)
    rng, op = np.random.default_rng(seed), tables["operators"]
    stretch = np.exp(rng.normal(0, 0.005, len(op))) * np.where(op["type"] == slow, factor, 1.0)
    if swap:
        op["type"] = op["type"].replace(swap, HOSTILE)
    metrics = extract(stretched(tables, stretch))
    series = rng.normal(10, 0.1, 60)
    series[30:] += 2 * (factor - 1)
    return Result(
        name, metrics, environment(manifest), series.tolist(), [tuple(row) for row in routing(tables).to_numpy().tolist()]
    )


def stretched(tables: dict[str, pd.DataFrame], stretch: np.ndarray) -> dict[str, pd.DataFrame]:
    """The tables with every operator so many times as long, and all that follows later."""
    old = tables["operators"]["begin_ns"].to_numpy()
    length = tables["operators"]["duration_ns"].to_numpy()
    longer = np.concatenate(([0.0], np.cumsum(length * (stretch - 1))))

    def moved(times: pd.Series) -> np.ndarray:
        at = np.searchsorted(old, times.to_numpy(), "right") - 1
        inside = np.clip((times.to_numpy() - old[at]) / length[at], 0, 1) * (longer[at + 1] - longer[at])
        return np.where(at >= 0, times + longer[np.maximum(at, 0)] + inside, times).astype(np.int64)

    out = dict(tables)
    for name, table in tables.items():
        times = [c for c in ("begin_ns", "end_ns", "ts_ns") if c in table]
        times += ["wait_ns"] if name == "op_threads" else []
        new = table.assign(**{c: moved(table[c]) for c in times})
        out[name] = new.assign(duration_ns=new["end_ns"] - new["begin_ns"]) if "duration_ns" in new else new
    return out


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of stored results: six runs each; the candidate's attention takes 30 % longer."""
    folder = tmp_path_factory.mktemp("sides")
    for side, factor in (("base", 1.0), ("cand", 1.3)):
        (folder / side).mkdir()
        for i in range(6):
            save(result(f"{side}-{i}", i + 100 * (factor > 1), "attention", factor), folder / side / f"{i}.parquet")
    return folder / "base", folder / "cand"


def test_charged_time_and_residual_make_up_every_token() -> None:
    tables = fixture.make(tokens=6, layers=3)[1]
    charges, tokens = charge(tables), tables["tokens"]
    spent = np.bincount(tables["operators"]["token_id"], charges.operators, len(tokens))
    loads = tables["loads"]
    spent += np.bincount(loads["token_id"], charges.loads, len(tokens))
    assert (spent <= tokens["duration_ns"]).all() and (spent > 0.8 * tokens["duration_ns"]).all()
    metrics = extract(tables)
    for phase in ("prefill", "decode"):
        mine = metrics[(metrics["phase"] == phase) & metrics["family"].isin(["operator", "closure"])]
        step = mine.loc[mine["metric"] == "step", "mean"].sum()
        assert mine.loc[mine["metric"] != "step", "mean"].sum() == pytest.approx(step)


def test_a_recording_of_tokens_alone_is_comparable() -> None:
    tables = fixture.make(tokens=5, layers=2)[1]
    bare = {name: table.iloc[:0] if name != "tokens" else table for name, table in tables.items()}
    assert set(extract(bare)["family"]) == {"speed", "tail", "memory"}


def test_the_slower_operator_is_named_and_the_exit_code_follows_the_limit(sides, capsys, tmp_path: Path) -> None:
    files = ["--markdown", str(tmp_path / "s.md"), "--junit", str(tmp_path / "j.xml"), "--json"]
    assert main(["compare", *map(str, sides), *files]) == 1
    shown = json.loads(capsys.readouterr().out)
    tpot = next(m for m in shown["metrics"] if m["metric"] == "TPOT")
    assert tpot["verdict"] == "slower" and tpot["low"] < tpot["ratio"] < tpot["high"]
    operators = {m["type"] for m in shown["metrics"] if m["family"] == "operator" and m["verdict"] == "slower"}
    assert operators == {"attention"}
    decode = next(fall for fall in shown["waterfalls"] if fall["phase"] == "decode")
    assert decode["parts"][0]["name"].startswith("attention")
    assert sum(part["delta"] for part in decode["parts"]) == pytest.approx(decode["step"]["cand"] - decode["step"]["base"])
    assert "attention" in " ".join(one["text"] for one in shown["words"])
    assert "| TPOT |" in (tmp_path / "s.md").read_text()
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") not in ("0", None)
    assert main(["compare", *map(str, sides), "--fail-on", "slower:90%"]) == 0
    assert main(["compare", *map(str, sides), "--fail-on", "operator:10%"]) == 1
    assert main(["compare", str(sides[1]), str(sides[0])]) == 0


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
    made = compare(base, cand)
    assert {(c.what, c.appeared) for c in made.structure if c.aspect == "operator"} == {("router", False), (HOSTILE, True)}
    unlike = differences([r.environment for r in base], [r.environment for r in cand])
    assert {d.what: d.unfair for d in unlike} == {"governor": True, "kernel": False}
    assert any("Not like for like" in text for _, text in made.words)


def test_hostile_names_stay_text_in_every_form(tmp_path: Path, sides) -> None:
    from analyzer.compare_words import junit, markdown

    shown = document(compare([result("b", 0)], [result(HOSTILE, 1, swap="router")]))
    write_regression(shown, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert HOSTILE not in page and "<img" not in page
    assert "<img" not in markdown(shown)
    for metric in shown["metrics"]:
        metric["label"], metric["verdict"] = HOSTILE, "slower"
    ElementTree.fromstring(junit(shown, []).split("\n", 1)[1])


def test_history_finds_the_build_that_changed_by_either_engine(tmp_path: Path) -> None:
    speed = result("", 0).metrics.query("family == 'speed'")

    def run(seed: int, factor: float) -> Result:
        row = speed.copy()
        row["value"] *= np.exp(np.random.default_rng(seed).normal(0, 0.01)) * factor
        return Result(f"run-{seed}", row)

    url = str(tmp_path / "results")
    for build in range(8):
        runs = [run(10 * build + i, 1.1 if build >= 5 else 1.0) for i in range(5)]
        assert len(add(url, runs, f"v{build}", "board/1", recorded=1e9 + build)) == 5
        assert add(url, runs, f"v{build}", "board/1", recorded=2e9) == []
    frame = read(url, "speed")
    found = changes(frame)
    tpot = found[found["metric"] == "TPOT"]
    assert tpot[["before", "build"]].to_numpy().tolist() == [["v4", "v5"]] and tpot["ratio"].iloc[0] == pytest.approx(
        1.1, abs=0.03
    )
    pytest.importorskip("dask.dataframe")
    other = read(url, "speed", "dask")
    pd.testing.assert_frame_equal(frame.sort_index(axis=1), other.sort_index(axis=1), check_dtype=False)
    with pytest.raises(CompareError):
        read(str(tmp_path / "nothing"), "speed")
