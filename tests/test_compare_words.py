"""What a word of a comparison means: "same" only inside the practical threshold, figures that follow from each other."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.compare.document import as_document, compare_runs
from analyzer.compare.metrics import METRICS
from analyzer.compare.results import Result, save_result
from analyzer.compare.verdict_text import (
    direction,
    figure_text,
    interval_text,
    metric_cells,
    percent_text,
    runs_needed,
    verdict_sentence,
)
from analyzer.compare.verdicts import FASTER, FEASIBLE, FEWEST, SAME, SLOWER, UNKNOWN, Rules, judge_metrics
from moescope.__main__ import main
from tests.conftest import drawn
from tests.golden import Golden
from tests.test_compare_statistics import RNG, dims

DEFAULT = {"object": "", "int64": -1, "float64": np.nan}


def run_of(name: str, began: float, **figures: tuple[str, str, str, float, float]) -> Result:
    """A run of metrics: name → (family, unit, better, offset, value)."""
    rows = []
    for metric, (family, unit, better, offset, value) in figures.items():
        row = {c.name: DEFAULT[c.dtype] for c in METRICS}
        rows.append(row | {"family": family, "metric": metric, "unit": unit, "better": better, "offset": offset, "value": value})
    frame = pd.DataFrame(rows)
    frame.index = pd.Index([f"{row['family']}|{row['metric']}" for row in rows], name="key")
    return Result(name, frame, began=began)


def sides(values: dict[str, tuple[str, str, str, float]], base: dict[str, list[float]], cand: dict[str, list[float]]) -> list:
    """Two groups of runs that took turns."""
    return [
        [
            run_of(f"{side}{i}", 2.0 * i + turn, **{m: (*values[m], figures[m][i]) for m in values})
            for i in range(len(next(iter(figures.values()))))
        ]
        for turn, (side, figures) in enumerate((("base", base), ("cand", cand)))
    ]


@settings(max_examples=drawn(20), deadline=None)
@given(st.integers(2, 14), st.integers(2, 14), st.floats(0.0005, 0.6), st.floats(-0.1, 0.1), st.integers(0, 10**6))
def test_same_is_said_only_of_an_interval_inside_the_practical_threshold(
    n: int, m: int, noise: float, shift: float, seed: int
) -> None:
    base, cand = np.exp(RNG(seed).normal(0, noise, (n, 4))), np.exp(shift + RNG(seed + 1).normal(0, noise, (m, 4)))
    for row in judge_metrics(dims(4), base, cand).to_dict("records"):
        inside = row["log_low"] >= -np.log1p(0.02) and row["log_high"] <= np.log1p(0.02)
        if row["verdict"] == "same":
            assert inside
        if not inside and row["verdict"] not in ("slower", "faster"):
            assert row["verdict"] == "inconclusive"


def test_a_noisy_machine_cannot_tell_and_the_limit_sees_it(tmp_path: Path, capsys) -> None:
    speed = {"decode_speed": ("speed", "tok/s", "higher", 0.0)}
    noisy = [np.exp(RNG(i).normal(5, 0.5, 8)).tolist() for i in (1, 2)]
    for side, runs in zip(("base", "cand"), sides(speed, {"decode_speed": noisy[0]}, {"decode_speed": noisy[1]}), strict=True):
        (tmp_path / side).mkdir()
        for run in runs:
            save_result(run, tmp_path / side / f"{run.name}.parquet")
    folders = [str(tmp_path / "base"), str(tmp_path / "cand")]
    assert main(["compare", *folders, "--fail-on", "inconclusive", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    (metric,) = shown["metrics"]
    assert metric["verdict"] == "inconclusive" and metric["threshold"] > 0.3
    assert "the same" not in " ".join(one["text"] for one in shown["words"])


@settings(max_examples=drawn(20), deadline=None)
@given(st.lists(st.integers(0, 500), min_size=5, max_size=8), st.floats(0.0, 20.0), st.floats(0.5, 6.0), st.integers(0, 10**6))
def test_a_printed_change_follows_from_the_figures_beside_it(base: list[int], offset: float, factor: float, seed: int) -> None:
    values = {"faults": ("memory", "count", "lower", offset)}
    cand = (np.array(base) * factor * np.exp(RNG(seed).normal(0, 0.05, len(base)))).tolist()
    shown = as_document(compare_runs(*sides(values, {"faults": [float(count) for count in base]}, {"faults": cand})))
    (metric,) = shown["metrics"]
    _, left, right, change, interval, _ = metric_cells(metric, paced=False)
    low, high = np.median(base), np.median(cand)
    assert (left, right) == (figure_text(low, "count"), figure_text(high, "count"))
    if low == 0:
        assert change == "from 0" and metric["ratio"] is None
        return
    assert change == percent_text(high / low)
    assert metric["ratio"] == pytest.approx(high / low, rel=1e-9, abs=1e-9)
    if interval == "unknown":  # a resample's median was 0
        return
    bounds = [float(end.replace(",", "")) for end in re.findall(r"([-+][\d.,]+) %", interval)]
    assert bounds[0] - 0.05 <= 100 * (metric["ratio"] - 1) <= bounds[1] + 0.05


def test_words_of_direction_fit_what_is_measured() -> None:
    def row(unit: str, better: str, verdict: str) -> dict[str, str]:
        return {"unit": unit, "better": better, "verdict": verdict}

    assert direction(row("ms", "lower", "slower")) == "slower" and direction(row("tok/s", "higher", "faster")) == "faster"
    assert direction(row("bytes", "lower", "faster")) == "less" and direction(row("bytes", "lower", "slower")) == "more"
    assert direction(row("share", "higher", "slower")) == "worse" and direction(row("share", "higher", "faster")) == "better"
    assert direction(row("share", "higher", "inconclusive")) == "inconclusive"


def test_from_nothing_to_something_breaks_a_limit_and_prints_no_percentage() -> None:
    from analyzer.compare.limits import parse_limit, violations

    faults = {"major faults": ("memory", "count", "lower", 1.0)}
    noise = RNG(0).normal(400, 1, 8).tolist()
    shown = as_document(compare_runs(*sides(faults, {"major faults": [0.0] * 8}, {"major faults": noise})))
    (metric,) = shown["metrics"]
    assert metric["verdict"] == "slower" and metric["direction"] == "more" and metric["change"] is None
    assert violations(shown, [parse_limit("operator:50%")]) != []


@settings(max_examples=drawn(40), deadline=None)
@given(st.integers(1, 2), st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_too_few_runs_are_never_called_enough_to_know(n: int, noise: float, seed: int) -> None:
    base, cand = np.exp(RNG(seed).normal(0, noise, (n, 1))), np.exp(0.3 + RNG(seed + 1).normal(0, noise, (n, 1)))
    row = judge_metrics(dims(1), base, cand).iloc[0].to_dict()
    if row["verdict"] == "inconclusive":
        assert not row["more_runs_known"] and n + row["more_runs"] >= FEWEST
        assert f"{min(row['more_runs'], FEASIBLE)} more run" in runs_needed(row)


def test_the_runs_that_are_asked_for_tell_as_often_as_they_are_said_to() -> None:
    said, told = 0, 0
    for seed in range(150):
        rng = RNG(seed)
        base, cand = np.exp(rng.normal(0, 0.06, (6, 1))), np.exp(0.08 + rng.normal(0, 0.06, (6, 1)))
        row = judge_metrics(dims(1), base, cand).iloc[0].to_dict()
        if row["verdict"] == "inconclusive" and row["more_runs_known"] and row["estimate"] > 0.05:
            n, effect = 6 + row["more_runs"], row["estimate"]
            again = [np.exp(shift + rng.normal(0, 0.06, (n, 1))) for shift in (0.0, effect)]
            said, told = said + 1, told + (judge_metrics(dims(1), *again).iloc[0]["verdict"] == "slower")
    assert said >= 20 and 0.5 <= told / said <= 0.99


def test_a_threshold_of_ones_own_is_what_same_means() -> None:
    base, cand = np.exp(RNG(0).normal(0, 0.02, (12, 1))), np.exp(RNG(1).normal(0, 0.02, (12, 1)))
    verdicts = {
        practical: judge_metrics(dims(1), base, cand, Rules(practical=practical)).iloc[0]["verdict"] for practical in (0.001, 0.2)
    }
    assert verdicts == {0.001: "inconclusive", 0.2: "same"}


def test_history_says_of_two_builds_what_a_comparison_of_their_runs_says(tmp_path: Path, capsys) -> None:
    from analyzer.compare.history import add_runs, build_changes, read_runs

    speed = {"TPOT, median": ("speed", "ms", "lower", 0.0), "TTFT": ("speed", "ms", "lower", 0.0)}
    rng = RNG(7)
    figures = {
        "TPOT, median": (3.7 * np.exp(rng.normal(0, 0.03, 5)), 6.95 * np.exp(rng.normal(0, 0.03, 5))),
        "TTFT": (40 + rng.normal(0, 1, 5),) * 2,
    }
    base, cand = sides(speed, *({m: pair[side].tolist() for m, pair in figures.items()} for side in (0, 1)))
    for build, runs in (("v1", base), ("v2", cand)):
        add_runs(str(tmp_path), runs, build, "board", recorded=1e9 if build == "v1" else 2e9)
    judged = compare_runs(base, [Result(run.name, run.metrics, began=run.began + 1000) for run in cand]).judged
    expected = judged[judged["verdict"].isin(["slower", "faster"])]
    said = build_changes(read_runs(str(tmp_path), "speed"))
    assert said["metric"].tolist() == expected["metric"].tolist() == ["TPOT, median"]
    assert said["ratio"].tolist() == pytest.approx(expected["ratio"].tolist()) and said["build"].tolist() == ["v2"]
    assert main(["history", str(tmp_path)]) == 1
    assert "v1 to v2" in " ".join(capsys.readouterr().out.split())


def test_a_metric_of_older_results_goes_by_its_present_name(tmp_path: Path) -> None:
    from analyzer.compare.history import add_runs, read_runs
    from analyzer.compare.results import read_runs as read_results

    old = run_of("old", 1.0, TPOT=("speed", "ms", "lower", 0.0, 3.0))
    save_result(old, tmp_path / "old.parquet")
    (kept,) = read_results(tmp_path / "old.parquet")
    assert kept.metrics["metric"].tolist() == ["TPOT, median"]
    add_runs(str(tmp_path / "history"), [old], "v1", "board")
    add_runs(str(tmp_path / "history"), [kept], "v2", "board")
    rows = read_runs(str(tmp_path / "history"), "speed")
    assert set(rows["metric"]) == {"TPOT, median"} and rows["key"].nunique() == 1


@pytest.mark.parametrize("width", [80, 200])
def test_no_column_of_a_comparison_is_cut_off(width: int, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    values = {"load time per step layer 2 expert 7": ("expert", "bytes", "lower", 0.0), "TTFT": ("speed", "ms", "lower", 0.0)}
    base, cand = (
        {"TTFT": [x, x + 1, x - 1, x, x], next(iter(values)): [y + i for i in range(5)]} for x, y in ((34, 10**7), (30, 10**8))
    )
    for folder, runs in zip(("base", "cand"), sides(values, base, cand), strict=True):
        (tmp_path / folder).mkdir()
        for run in runs:
            save_result(run, tmp_path / folder / f"{run.name}.parquet")
    main(["compare", str(tmp_path / "base"), str(tmp_path / "cand")])
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if line.rstrip().endswith("verdict"))
    assert head.startswith("metric") and max(map(len, lines)) <= width
    assert sum(line.rstrip().endswith(("more", "slower", "less", "faster")) for line in lines) >= 2


def test_history_says_at_once_which_builds_it_cannot_judge(tmp_path: Path, capsys, golden: Golden) -> None:
    from analyzer.compare.history import add_runs

    speed = {"TPOT": ("speed", "ms", "lower", 0.0)}
    for build, runs in enumerate(sides(speed, {"TPOT": [3.0, 3.1]}, {"TPOT": [6.0, 6.1]})):
        add_runs(str(tmp_path), runs, f"v{build}", "board", recorded=1e9 + build)
    assert main(["history", str(tmp_path)]) == 0
    golden("history", capsys.readouterr().out)


@pytest.mark.parametrize(("n_base", "n_cand", "said"), [(1, 1, "unknown"), (1, 5, "unknown"), (2, 2, "-20.0 % to -10.0 %")])
def test_a_side_of_one_run_shows_no_interval(n_base: int, n_cand: int, said: str) -> None:
    assert interval_text({"n_base": n_base, "n_cand": n_cand, "low": 0.8, "high": 0.9}) == said


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        ({"TTFT": UNKNOWN, "TPOT": UNKNOWN}, "TTFT, TPOT are inconclusive; about 7 more runs per side would decide."),
        ({"TTFT": SLOWER, "TPOT": SAME}, "The candidate is slower in TTFT; the same in TPOT."),
        ({"TTFT": FASTER, "TPOT": UNKNOWN}, "The candidate is faster in TTFT; TPOT is inconclusive."),
        ({}, "No run has steps, so speed was not compared."),
    ],
)
def test_the_page_begins_with_every_metric_of_speed_by_its_verdict(verdicts: dict[str, str], sentence: str) -> None:
    rows = [
        {"family": "speed", "metric": metric, "unit": "ms", "better": "lower", "verdict": word, "more_runs": 5 + n}
        for n, (metric, word) in enumerate(verdicts.items(), 1)
    ]
    columns = ["family", "metric", "unit", "better", "verdict", "more_runs"]
    assert verdict_sentence(pd.DataFrame(rows, columns=columns).assign(more_runs_known=True)) == sentence
