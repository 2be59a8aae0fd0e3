"""Series of steps taken apart: what was planted is found, plain noise holds nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions import periods
from analyzer.questions.changepoints import take_apart
from analyzer.questions.periods import Period, spikes_and_steps
from analyzer.questions.trends import periodic_disturbance
from moescope.__main__ import main
from workloads.drawn_series import (
    EVERY,
    MISSED,
    MS,
    NOISE,
    RIGHT,
    STRUCTURELESS,
    WRONG,
    draw_series,
    faint_burst,
    faint_spikes,
    found_in_noise,
    has_clear_drift,
    in_ms,
    judged_burst,
    judged_spikes,
    missed_in,
    names_found,
    noise,
    onnxruntime_profile,
    qnn_profile,
    structureless,
    surplus_in,
    unit_noise,
)


def test_first_execution_step_drift_period_and_burst_are_found_and_nothing_else() -> None:
    wrong = [missed_in(take_apart(drawn.ms), drawn) for drawn in map(draw_series, range(30))]
    assert sum(not each for each in wrong) >= 27
    assert not {"first", "period", "burst"} & set().union(*wrong)


def test_a_burst_may_begin_far_below_half_its_height() -> None:
    steps = np.random.default_rng(0).normal(20, 1, 120)
    steps[60:66] = [29, 60, 60, 60, 60, 60]
    (burst,) = take_apart(steps).bursts
    assert (burst.at, burst.steps) == (60, 6)


def test_a_burst_of_half_the_median_s_width_is_no_change_of_level_as_well() -> None:
    right = 0
    for seed in range(20):
        ms = in_ms(unit_noise(np.random.default_rng(seed), 0.0))
        ms[200:215] += 5 * MS * NOISE
        parts = take_apart(ms)
        right += names_found(parts) == {"burst"} and [(b.at, b.steps) for b in parts.bursts] == [(200, 15)]
        assert not parts.bursts or parts.bursts[0].height == pytest.approx(5 * MS * NOISE, rel=0.25)
    assert right >= 17


@pytest.mark.parametrize("slope", [-0.5, 0.02, 0.5])
def test_a_steep_drift_is_no_burst_at_its_ends(slope: float) -> None:
    for seed in range(10):
        parts = take_apart(40 + slope * np.arange(60) + np.random.default_rng(seed).normal(0, 0.2, 60))
        assert len(parts.drifts) == 1 and not (parts.bursts or parts.shifts or parts.period)


def test_noise_that_follows_itself_hides_a_small_drift_but_adds_nothing() -> None:
    series = [draw_series(seed, 0.5) for seed in range(30)]
    parts = [take_apart(drawn.ms) for drawn in series]
    assert sum(map(surplus_in, parts)) == 0
    known = sum(has_clear_drift(seed, 0.5) for seed in range(30))
    assert known >= 18 and sum(not missed_in(found, drawn) for found, drawn in zip(parts, series, strict=True)) >= known - 2


@pytest.mark.parametrize(("n", "rho"), [(30, 0.0), (100, 0.3), pytest.param(600, 0.5, marks=pytest.mark.long)])
def test_plain_noise_holds_nothing(n: int, rho: float) -> None:
    assert sum(bool(found_in_noise(take_apart(noise(np.random.default_rng(seed), n, rho)))) for seed in range(40)) <= 2


@pytest.mark.parametrize(
    ("sigmas", "rho"),
    [(4.0, 0.0), pytest.param(0.0, 0.0, marks=pytest.mark.long), pytest.param(4.0, 0.5, marks=pytest.mark.long)],
)
def test_spikes_too_faint_for_one_alone_are_found_by_their_period(sigmas: float, rho: float) -> None:
    verdicts = []
    for seed in range(40):
        parts = take_apart(faint_spikes(seed, sigmas, rho))
        verdicts.append(judged_spikes(parts, periodic_disturbance(parts)))
    assert verdicts.count(RIGHT) >= 36 and verdicts.count(WRONG) <= 2


@pytest.mark.long
def test_a_burst_too_faint_for_one_step_alone_is_found_with_its_ends() -> None:
    verdicts = []
    for seed in range(40):
        ms, at = faint_burst(seed, 4.0)
        parts = take_apart(ms)
        verdicts.append(judged_burst(parts, periodic_disturbance(parts), at))
    assert verdicts.count(RIGHT) >= 36 and verdicts.count(WRONG) <= 1


def test_a_part_of_a_series_gives_its_period_or_none() -> None:
    verdicts = []
    for seed in range(40):
        parts = take_apart(faint_spikes(seed, 0.0)[100 : 100 + 10 * (seed + 5)])
        verdicts.append(judged_spikes(parts, periodic_disturbance(parts), max(0.3, 1.5 / (seed + 5) * EVERY / 10)))
    assert verdicts.count(WRONG) <= 1 and verdicts.count(MISSED) < 20


def test_spikes_of_which_some_are_missing_keep_their_period_and_a_longer_one_is_not_halved() -> None:
    found: dict[float, list[Period | None]] = {12.8: [], 25.6: []}
    for seed in range(20):
        rng = np.random.default_rng((seed, 7))
        for every, periods_of in found.items():
            series = rng.normal(size=300)
            places = np.floor(rng.uniform(0, every) + every * np.arange(int(300 / every))).astype(int)
            kept = np.append(places[1::2][:-2], places[::2])
            series[kept] += 7
            periods_of.append(take_apart(series).period)
    for every, periods_of in found.items():
        assert sum(each is not None and abs(each.steps - every) < 0.3 for each in periods_of) >= 18


@pytest.mark.long
@pytest.mark.parametrize("name", STRUCTURELESS)
def test_noise_of_any_distribution_holds_nothing(name: str) -> None:
    found = []
    for seed in range(40):
        parts = take_apart(structureless(name, seed))
        found.append(names_found(parts, periodic_disturbance(parts)))
    assert sum(map(bool, found)) <= 1, found


def test_every_comb_that_is_tried_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[np.ndarray] = []
    best_of = periods.best_of
    monkeypatch.setattr(periods, "best_of", lambda marks, n, tried: asked.append(tried) or best_of(marks, n, tried))
    signal = np.random.default_rng(1).standard_normal(200)
    assert periods.best_comb(signal)[1] == sum(2 * int(np.ceil(one).sum()) for one in asked)
    assert len(asked) == len(periods.WIDTHS) * len(periods.LEVELS)


@pytest.mark.parametrize("every", [3.7, 16.0, 25.6, 60.3])
def test_a_period_need_not_be_whole(every: float) -> None:
    series = np.random.default_rng(7).normal(size=600)
    places = np.floor(1.3 + every * np.arange(int(598 / every))).astype(int)
    series[places] += 8
    found, at = spikes_and_steps(series, 0.0)
    assert found is not None and found.steps == pytest.approx(every, abs=0.5 * every / len(places) + 0.02)
    assert set(at) <= set(places) and found.count >= 0.95 * len(places) and found.height == pytest.approx(8, abs=0.7)


def test_a_sinusoid_is_no_spike() -> None:
    wave = 5 * np.sin(2 * np.pi * np.arange(256) / 16.3)
    parts = take_apart(MS * (1 + NOISE * (wave + np.random.default_rng(3).normal(size=256))))
    found = periodic_disturbance(parts)
    assert parts.period is None and found is not None and found["period"] == pytest.approx(16.3, abs=0.2)


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_any_series_is_taken_apart_within_its_bounds(values: list[float]) -> None:
    parts = take_apart(np.array(values))
    assert len(parts.rest) == len(values) and np.isfinite(parts.rest).all()
    assert all(0 < shift.at < len(values) for shift in parts.shifts)
    assert all(0 <= drift.at < drift.until < len(values) for drift in parts.drifts)


def test_runs_of_a_profile_without_phases_have_trends_and_the_summary_names_a_slow_first_one(tmp_path: Path, capsys) -> None:
    drawn = draw_series(3)
    (tmp_path / "profile.json").write_text(onnxruntime_profile(np.append(2780.0, drawn.ms[1:])))
    run = str(tmp_path / "run")
    assert main(["import", str(tmp_path / "profile.json"), "--out", run]) == 0
    capsys.readouterr()
    assert main(["trends", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["of"], found["step_ms"]["n"], found["first"]["ms"]) == ("step", 600, 2780.0)
    assert found["periodic"]["period"] == pytest.approx(EVERY, abs=0.3) and found["model"] == {}
    assert [abs(jump["token_id"] - drawn.step) <= 2 for jump in found["change_points"]] == [True]
    assert main(["summary", run, "--json"]) == 0
    findings = {finding["rule"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["first step"]["evidence"]["ms"] == 2780.0 and 2700 < findings["first step"]["saving_ms"] < 2780


def test_executions_of_a_qnn_profile_have_trends(tmp_path: Path, capsys) -> None:
    ms, at = faint_burst(1, 4.0)
    (tmp_path / "profile.csv").write_text(qnn_profile(ms))
    assert main(["trends", str(tmp_path / "profile.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["of"], found["step_ms"]["n"]) == ("execution", 600)
    assert found["step_ms"]["p50"] == pytest.approx(np.median(ms), abs=2e-3)
    assert [abs(burst["execute_id"] - at) <= 2 for burst in found["bursts"]] == [True]
    head = qnn_profile(ms[:0])
    (tmp_path / "profile.csv").write_text(head + "0,NODE,7,CYCLES,BACKEND,SUB-EVENT,a\n")
    assert main(["trends", str(tmp_path / "profile.csv")]) == 2
