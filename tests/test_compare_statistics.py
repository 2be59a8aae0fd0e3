"""Statistics of comparisons: against closed forms and another implementation, and their false alarms counted."""

from itertools import combinations
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.compare import statistics as statistics
from analyzer.compare.structure import distance
from analyzer.compare.verdicts import Rules, judge, judge_apart
from analyzer.questions import changepoints

RNG = np.random.default_rng


def dims(n: int, **given: object) -> pd.DataFrame:
    defaults = {"family": "operator", "better": "lower", "offset": 0.0, "share": np.nan}
    return pd.DataFrame({**defaults, **given}, index=[f"metric {i}" for i in range(n)])


def enumerated_p(a: np.ndarray, b: np.ndarray) -> float:
    """Mann-Whitney by its definition: U over every way to deal the values out."""
    both = np.concatenate((a, b))

    def u(chosen: tuple[int, ...]) -> int:
        x, y = both[list(chosen)], np.delete(both, list(chosen))
        return int((x[:, None] > y[None, :]).sum())

    dealt = np.array([u(chosen) for chosen in combinations(range(len(both)), len(a))])
    own = u(tuple(range(len(a))))
    return min(1.0, 2 * min((dealt <= own).mean(), (dealt >= own).mean()))


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(2, 5), st.integers(0, 10**6))
def test_mann_whitney_is_that_of_its_definition(n: int, m: int, seed: int) -> None:
    a, b = RNG(seed).normal(size=(n, 2)), RNG(seed + 1).normal(size=(m, 2))
    expected = [enumerated_p(a[:, i], b[:, i]) for i in range(2)]
    assert statistics.mann_whitney(a, b) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_a_p_and_keeps_their_order(p: list[float]) -> None:
    adjusted = statistics.holm(np.array(p))
    order = np.argsort(p, kind="stable")
    assert (adjusted >= np.array(p)).all() and (adjusted <= 1).all() and (np.diff(adjusted[order]) >= 0).all()
    assert adjusted[order[0]] == min(1.0, min(p) * len(p))


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(1, 7), st.floats(0.2, 5), st.integers(0, 10**6))
def test_an_interval_scales_with_the_candidate_and_holds_its_estimate(n: int, m: int, factor: float, seed: int) -> None:
    a, b = np.exp(RNG(seed).normal(0, 0.1, (n, 3))), np.exp(RNG(seed + 1).normal(0, 0.1, (m, 3)))
    one, scaled = (statistics.bootstrap(a, x, np.zeros(3)) for x in (b, b * factor))
    assert (one.low <= one.estimate + 1e-12).all() and (one.estimate <= one.high + 1e-12).all()
    for name in ("estimate", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(getattr(one, name) + np.log(factor), abs=1e-9)


def test_bootstrap_of_ranks_is_the_ordinary_bootstrap_of_medians() -> None:
    values = RNG(3).exponential(size=9)
    picks = RNG(4).integers(0, 9, (4000, 9))
    ours = statistics._medians(np.sort(values)[:, None], picks)[:, 0]
    assert ours == pytest.approx(np.median(np.sort(values)[picks], axis=1))


def test_few_runs_never_alarm_and_are_told_how_many_more() -> None:
    base, cand = np.full((3, 1), 1.0) + RNG(0).normal(0, 0.001, (3, 1)), np.full((3, 1), 2.0) + RNG(1).normal(0, 0.001, (3, 1))
    row = judge(dims(1), base, cand).iloc[0]
    assert row["verdict"] == "inconclusive" and row["p"] == pytest.approx(2 / comb(6, 3)) and row["more_runs"] == 2
    row = judge(dims(1), np.tile(base, (2, 1)), np.tile(cand, (2, 1))).iloc[0]
    assert row["verdict"] == "slower" and row["more_runs"] == 0


def test_five_runs_tell_one_slower_operator_of_thousands() -> None:
    base, cand = np.exp(RNG(8).normal(0, 0.005, (5, 2000))), np.exp(RNG(9).normal(0, 0.005, (5, 2000)))
    cand[:, 7] *= 1.1
    judged = judge(dims(2000), base, cand)
    assert judged.index[judged["verdict"].isin(["slower", "faster"])].tolist() == ["metric 7"]


@settings(max_examples=15)
@given(st.integers(3, 5), st.integers(3, 5), st.integers(0, 10**6))
def test_permutations_say_how_often_the_greatest_statistic_of_any_deal_is_as_great(n: int, m: int, seed: int) -> None:
    values = RNG(seed).normal(size=(n + m, 4))
    usual = np.median(np.abs(values - np.median(values, axis=0)))

    def apart(chosen: list[int]) -> np.ndarray:
        a, b = values[chosen], np.delete(values, chosen, axis=0)
        return np.abs(b.mean(axis=0) - a.mean(axis=0)) / (np.sqrt((a.var(axis=0) + b.var(axis=0)) / 2) + usual)

    greatest = np.array([apart(list(chosen)).max() for chosen in combinations(range(n + m), n)])
    for factor in (1.0, 1.5):
        share = [(greatest >= own / factor * (1 - 1e-9)).mean() for own in apart(list(range(n)))]
        expected = np.maximum(share, statistics.smallest_p(n, m))
        found = statistics.largest_of_all(np.exp(values[:n]), np.exp(values[n:]), np.zeros(4), factor)
        assert found == pytest.approx(expected)


def test_permutations_of_many_runs_are_sampled() -> None:
    values = np.exp(RNG(4).normal(0, 0.03, (40, 300)))
    values[20:, 7] *= 1.1
    p = statistics.largest_of_all(values[:20], values[20:], np.zeros(300), statistics.SUCCESSIVE)
    assert p.argmin() == 7 and p[7] < 0.002 and (np.delete(p, 7) > 0.05).all()


@pytest.mark.parametrize(
    "base, cand, turns",
    [
        ([0, 3, 4, 7, 8], [1, 2, 5, 6, 9], True),
        ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9], True),
        ([0, 3, 4, 7, 8], [1, 2, 6, 9], True),
        ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], False),
        ([0, 1, 2, 8, 9], [3, 4, 5, 6, 7], False),
        ([0, 3, 4, 7, 8], [1, 2, 5, 6, np.nan], False),
    ],
    ids=["A B B A", "A B A B", "one failed", "one after the other", "in the middle", "one not known"],
)
def test_sides_that_took_turns_are_known_by_when_runs_began(base: list[float], cand: list[float], turns: bool) -> None:
    factor = statistics.wander(np.array(base, float), np.array(cand, float))
    assert factor == (1.0 if turns else statistics.SUCCESSIVE)


def wandering(seed: int, runs: int, metrics: int = 30) -> np.ndarray:
    """Runs in order of an unchanged program on a machine that wanders: each metric follows itself (AR(1), a third)."""
    rng = RNG(seed)
    values = rng.normal(0, 0.03, (runs, metrics))
    for i in range(1, runs):
        values[i] += values[i - 1] / 3
    return np.exp(values)


@pytest.mark.parametrize("runs", [5, 10])
def test_a_machine_that_wanders_raises_no_more_alarms_where_one_side_came_after_the_other(runs: int) -> None:
    alarms, rules = 0, Rules(wander=statistics.SUCCESSIVE)
    for seed in range(60):
        values = wandering(seed, 2 * runs)
        alarms += bool(judge(dims(30), values[:runs], values[runs:], rules)["verdict"].isin(["slower", "faster"]).any())
    assert alarms <= 3
    values[runs:, 7] *= 1.3
    judged = judge(dims(30), values[:runs], values[runs:], rules)
    assert judged.index[judged["verdict"].isin(["slower", "faster"])].tolist() == ["metric 7"]


def test_a_change_too_small_to_matter_is_the_same() -> None:
    noise = RNG(5).normal(0, 0.0005, (20, 2))
    cand = np.exp(noise[10:] + np.array([0.008, 0.1]))
    judged = judge(dims(2, better=["lower", "higher"]), np.exp(noise[:10]), cand)
    assert judged["verdict"].tolist() == ["same", "faster"] and judged["p"].max() < 0.05


def test_a_metric_that_one_side_lacks_vanished_or_appeared() -> None:
    values = 1 + RNG(6).random((5, 3)) / 100
    base, cand = values.copy(), values.copy()
    base[:, 0], cand[:, 1], cand[:2, 2] = np.nan, np.nan, np.nan
    assert judge(dims(3), base, cand)["verdict"].tolist()[:2] == ["appeared", "vanished"]
    assert judge(dims(3), base, cand)["n_cand"].tolist() == [5, 0, 3]


def test_the_noise_of_a_noisy_machine_becomes_the_threshold() -> None:
    noisy = np.exp(RNG(7).normal(0, 0.2, (12, 1)))
    assert judge(dims(1), noisy, noisy)["threshold"].iloc[0] > 0.05
    quiet = np.exp(RNG(7).normal(0, 0.0002, (12, 1)))
    assert judge(dims(1), quiet, quiet)["threshold"].iloc[0] == 0.02


@pytest.mark.parametrize("runs, metrics", [(5, 5), (5, 40)])
def test_unchanged_runs_raise_family_wise_alarms_in_at_most_one_of_twenty_pairs(runs: int, metrics: int) -> None:
    """100 pairs, with what real runs have: a common drift of the machine, noise per metric, and rare disturbances."""
    rng, alarms = RNG(runs), 0
    for _ in range(100):
        shape = (2 * runs, metrics)
        spikes = (rng.random(shape) < 0.05) * rng.exponential(0.5, shape)
        values = np.exp(rng.normal(0, 0.05, (2 * runs, 1)) + rng.normal(0, 0.03, shape) + spikes)
        verdicts = judge(dims(metrics), values[:runs], values[runs:], Rules())["verdict"]
        alarms += bool(verdicts.isin(["slower", "faster"]).any())
    assert alarms <= 5


def paced_dims(n: int) -> pd.DataFrame:
    """Operators of decode, large enough to be tested."""
    where = {"metric": "time", "phase": "decode", "graph": "", "layer": 0, "type": "", "shape": "", "backend": "", "expert": -1}
    return dims(n, unit="ms", label="", **where).assign(share=1 / n)


def varying(seed: int, runs: int, pace: float, metrics: int = 30) -> np.ndarray:
    """Runs of an unchanged program on a machine whose speed varies by `pace`, its operators by 1 % more."""
    rng = RNG(seed)
    return np.exp(rng.normal(0, pace, (runs, 1)) + rng.normal(0, 0.01, (runs, metrics)))


def test_an_operator_that_changed_stands_out_of_a_machine_whose_speed_varies() -> None:
    values = varying(1, 20, 0.15)
    values[10:, 7] *= 1.05
    judged = judge_apart(paced_dims(30), values[:10], values[10:])[0]
    accused = judged[judged["verdict"].isin(["slower", "faster"])]
    assert accused.index.tolist() == ["metric 7"] and accused["paced"].all() and 1.03 < accused["ratio"].iloc[0] < 1.07
    alone = judge(paced_dims(30), values[:10], values[10:])
    assert not alone["verdict"].isin(["slower", "faster"]).any()


def test_what_slows_all_operators_alike_is_told_of_the_pace_and_of_each_in_plain_times() -> None:
    values = varying(2, 20, 0.005)
    values[10:] *= 1.1
    judged = judge_apart(paced_dims(30), values[:10], values[10:])[0]
    assert set(judged["verdict"]) == {"slower"} and not judged["paced"].any() and (judged["family"] == "pace").sum() == 1


def test_operators_that_stayed_are_not_accused_where_many_others_changed() -> None:
    values = varying(3, 20, 0.02)
    values[10:, :12] *= 1.1
    judged = judge_apart(paced_dims(30), values[:10], values[10:])[0]
    accused = judged[(judged["family"] == "operator") & judged["verdict"].isin(["slower", "faster"])]
    assert set(accused.index) == {f"metric {i}" for i in range(12)} and set(accused["verdict"]) == {"slower"}


def test_taking_out_the_pace_raises_no_more_alarms() -> None:
    alarms = 0
    for seed in range(60):
        values = varying(seed, 10, 0.1)
        judged = judge_apart(paced_dims(30), values[:5], values[5:])[0]
        alarms += bool(judged.loc[judged["family"] == "operator", "verdict"].isin(["slower", "faster"]).any())
    assert alarms <= 3


def entropy(p: float) -> float:
    return float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def test_distance_of_distributions_is_zero_for_same_and_one_for_disjoint() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])
    assert distance(p, p) == 0 and distance(p, q) == pytest.approx(1)
    assert distance(p, np.array([0.25, 0.75, 0.0])) == pytest.approx(np.sqrt(entropy(0.375) - (1 + entropy(0.25)) / 2))


def steps(seed: int, at: tuple[int, ...] = (), size: float = 0.0, every: int = 25, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """(ms per step, where its spikes are): drift, noise that follows itself (AR(1), 0.5, innovations of 1), a spike every 23 to
    27 steps, planted shifts up and down."""
    rng = RNG(seed)
    noise = rng.normal(size=n)
    for i in range(1, n):
        noise[i] += 0.5 * noise[i - 1]
    series = 20 + noise + 3 * np.arange(n) / n
    for i, place in enumerate(at):
        series[place:] += size * (-1) ** i
    turns = np.arange(rng.integers(0, every), n, every) if every else np.empty(0, int)
    spikes = turns + rng.integers(-2, 3, len(turns))
    spikes = spikes[(spikes >= 0) & (spikes < n)]
    series[spikes] += 15 * (1 + 0.3 * rng.random(len(spikes)))
    return series, spikes


SEEDS = range(100)


def test_shifts_are_found_within_two_steps() -> None:
    near = 0
    for seed in SEEDS:
        at = tuple(sorted(RNG(1000 + seed).choice(np.arange(60, 340, 40), 2, replace=False).tolist()))
        found = [s.at for s in changepoints.shifts(steps(seed, at, 6)[0])]
        near += len(found) == 2 and all(abs(a - b) <= 2 for a, b in zip(found, at, strict=True))
    assert near >= 0.95 * len(SEEDS)


def test_drift_autocorrelation_and_spikes_are_no_shifts() -> None:
    assert sum(bool(changepoints.shifts(steps(seed)[0])) for seed in SEEDS) <= 0.05 * len(SEEDS)


def test_a_periodic_disturbance_is_found_within_two_steps_and_none_invented() -> None:
    near = 0
    for seed in SEEDS:
        series, spikes = steps(seed, (150,), 6)
        found = changepoints.period(series)
        near += found is not None and abs(found.steps - 25) <= 2 and min(abs(spikes - found.first)) <= 2
    assert near >= 0.95 * len(SEEDS)
    assert sum(changepoints.period(steps(seed, every=0)[0]) is not None for seed in SEEDS) <= 0.05 * len(SEEDS)
