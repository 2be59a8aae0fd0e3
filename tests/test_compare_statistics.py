"""Statistics of comparisons: against closed forms and another implementation, and their false alarms counted."""

from itertools import combinations
from math import comb

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.compare import statistics as statistics
from analyzer.compare.structure import js_distance
from analyzer.compare.verdicts import Rules, judge_apart, judge_metrics
from analyzer.questions import changepoints
from tests.conftest import drawn

RNG = np.random.default_rng


def dims(n: int, **given: object) -> pd.DataFrame:
    defaults = {"family": "operator", "better": "lower", "offset": 0.0, "share": np.nan}
    return pd.DataFrame({**defaults, **given}, index=[f"metric {i}" for i in range(n)])


@settings(max_examples=drawn(20))
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
    row = judge_metrics(dims(1), base, cand).iloc[0]
    assert row["verdict"] == "inconclusive" and row["p"] == pytest.approx(2 / comb(6, 3)) and row["more_runs"] == 1
    row = judge_metrics(dims(1), np.tile(base, (2, 1)), np.tile(cand, (2, 1))).iloc[0]
    assert row["verdict"] == "slower" and row["more_runs"] == 0


def test_four_runs_that_are_wholly_apart_are_a_change_whatever_the_size_of_the_family() -> None:
    for size in (1, 5, 80):
        base, cand = np.exp(RNG(1).normal(0, 0.01, (4, size))), np.exp(RNG(2).normal(0, 0.01, (4, size)))
        cand[:, 0] *= 10.4 / 2862
        for drift in (1.0, statistics.SUCCESSIVE):
            judged = judge_metrics(dims(size), base, cand, Rules(drift=drift))
            assert judged["verdict"].iloc[0] == "faster" and judged["p"].iloc[0] == pytest.approx(2 / comb(8, 4))
            assert not judged["verdict"].iloc[1:].isin(["slower", "faster"]).any()


def test_a_difference_without_spread_is_a_change_beside_noisy_metrics() -> None:
    base, cand = np.exp(RNG(3).normal(0, 0.1, (5, 40))), np.exp(RNG(4).normal(0, 0.1, (5, 40)))
    base[:, 0], cand[:, 0] = 1.0, 0.9567
    judged = judge_metrics(dims(40, offset=0.01, better="higher"), base, cand)
    assert judged["verdict"].iloc[0] == "slower" and judged["p"].iloc[0] == pytest.approx(2 / comb(10, 5))
    cand[:, 0] = 1.0
    assert judge_metrics(dims(40, offset=0.01), base, cand)["verdict"].iloc[0] == "same"


def test_a_large_change_hides_no_small_one_and_no_metric_is_lost_because_a_run_lacks_it() -> None:
    base, cand = np.exp(RNG(5).normal(0, 0.005, (6, 30))), np.exp(RNG(6).normal(0, 0.005, (6, 30)))
    cand[:, 0] *= 50
    cand[:, 1] *= 1.06
    cand[:, 2] *= 1.2
    base[0, 2] = np.nan
    judged = judge_metrics(dims(30), base, cand)
    assert judged.index[judged["verdict"] == "slower"].tolist() == ["metric 0", "metric 1", "metric 2"]
    assert (judged["n_base"].iloc[2], judged["n_cand"].iloc[2]) == (5, 6)


@pytest.mark.parametrize("runs", range(4, 8))
def test_unchanged_families_raise_an_alarm_in_five_of_a_hundred_at_most(runs: int) -> None:
    alarms = 0
    for seed in range(200):
        values = np.exp(RNG((runs, seed)).standard_t(3, (2 * runs, 20)) * 0.02)
        alarms += bool((statistics.permuted_p(values[:runs], values[runs:], np.zeros(20)) <= 0.05).any())
    assert alarms <= 17  # of 200 at 5 %: more in one of 100


def test_five_runs_tell_one_slower_operator_of_thousands() -> None:
    base, cand = np.exp(RNG(8).normal(0, 0.005, (5, 2000))), np.exp(RNG(9).normal(0, 0.005, (5, 2000)))
    cand[:, 7] *= 1.1
    judged = judge_metrics(dims(2000), base, cand)
    assert judged.index[judged["verdict"].isin(["slower", "faster"])].tolist() == ["metric 7"]


@settings(max_examples=drawn(15))
@given(st.integers(3, 5), st.integers(3, 5), st.integers(0, 10**6))
def test_permutations_say_how_often_the_greatest_statistic_of_any_deal_is_as_great(n: int, m: int, seed: int) -> None:
    logs = RNG(seed).normal(size=(n + m, 4))
    values = statistics.within_reach(logs)
    centred = values - values.mean(axis=0)
    usual = np.median(np.abs(centred - np.median(centred, axis=0)))

    def apart(chosen: list[int]) -> np.ndarray:
        a, b = values[chosen], np.delete(values, chosen, axis=0)
        return np.abs(b.mean(axis=0) - a.mean(axis=0)) / (np.sqrt((a.var(axis=0) + b.var(axis=0)) / 2) + usual)

    dealt, own = np.array([apart(list(chosen)) for chosen in combinations(range(n + m), n)]), apart(list(range(n)))
    for factor in (1.0, 1.5):
        found, least = statistics.permuted_p(np.exp(logs[:n]), np.exp(logs[n:]), np.zeros(4), factor), 0.0
        for metric in np.argsort(-own):
            mine = dealt[:, own <= own[metric]].max(axis=1)
            least = max(least, float((mine >= own[metric] / factor * (1 - 1e-9)).mean()), statistics.smallest_p(n, m))
            assert found[metric] == pytest.approx(least)


@pytest.mark.parametrize("change", [1.1, 1.5, 300.0])
def test_one_disturbed_run_hides_no_change_and_makes_none(change: float) -> None:
    values = np.exp(RNG(3).normal(0, 0.01, (20, 5)))
    values[4, 0] *= 3
    assert (statistics.permuted_p(values[:10], values[10:], np.zeros(5)) > 0.05).all()
    values[10:, 0] *= change
    p = statistics.permuted_p(values[:10], values[10:], np.zeros(5))
    assert p[0] <= 0.01 and (p[1:] > 0.05).all()


@given(st.integers(2, 12), st.integers(2, 12), st.floats(0, 100), st.integers(0, 10**6))
def test_limits_keep_the_order_and_half_of_the_runs_as_they_are(n: int, m: int, apart: float, seed: int) -> None:
    values = RNG(seed).normal(size=(n + m, 1))
    values[n:] += apart
    limited = statistics.within_reach(values)
    order = np.argsort(values[:, 0])
    assert (np.diff(limited[order, 0]) >= 0).all() and np.count_nonzero(limited != values) <= (n + m) // 2


@given(st.floats(0.01, 1.0), st.integers(2, 40))
def test_a_spread_is_said_to_be_larger_than_it_is_in_eighty_of_a_hundred_cases(spread: float, degrees: int) -> None:
    drawn = RNG(degrees).normal(0, spread, (4000, degrees))
    limits = [statistics.largest_spread(float(each), degrees) for each in np.sqrt((drawn**2).mean(axis=1))]
    assert np.mean(np.array(limits) > spread) == pytest.approx(0.8, abs=0.03)


def test_permutations_of_many_runs_are_sampled() -> None:
    values = np.exp(RNG(4).normal(0, 0.03, (40, 300)))
    values[20:, 7] *= 1.1
    p = statistics.permuted_p(values[:20], values[20:], np.zeros(300), statistics.SUCCESSIVE)
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
    factor = statistics.drift_factor(np.array(base, float), np.array(cand, float))
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
    alarms, rules = 0, Rules(drift=statistics.SUCCESSIVE)
    for seed in range(60):
        values = wandering(seed, 2 * runs)
        alarms += bool(judge_metrics(dims(30), values[:runs], values[runs:], rules)["verdict"].isin(["slower", "faster"]).any())
    assert alarms <= 3
    values[runs:, 7] *= 1.3
    judged = judge_metrics(dims(30), values[:runs], values[runs:], rules)
    assert judged.index[judged["verdict"].isin(["slower", "faster"])].tolist() == ["metric 7"]


def test_a_change_too_small_to_matter_is_the_same() -> None:
    noise = RNG(5).normal(0, 0.0005, (20, 2))
    cand = np.exp(noise[10:] + np.array([0.008, 0.1]))
    judged = judge_metrics(dims(2, better=["lower", "higher"]), np.exp(noise[:10]), cand)
    assert judged["verdict"].tolist() == ["same", "faster"] and judged["p"].max() < 0.05


def test_a_metric_that_one_side_lacks_vanished_or_appeared() -> None:
    values = 1 + RNG(6).random((5, 3)) / 100
    base, cand = values.copy(), values.copy()
    base[:, 0], cand[:, 1], cand[:2, 2] = np.nan, np.nan, np.nan
    assert judge_metrics(dims(3), base, cand)["verdict"].tolist()[:2] == ["appeared", "vanished"]
    assert judge_metrics(dims(3), base, cand)["n_cand"].tolist() == [5, 0, 3]


def test_the_noise_of_a_noisy_machine_becomes_the_threshold() -> None:
    noisy = np.exp(RNG(7).normal(0, 0.2, (12, 1)))
    assert judge_metrics(dims(1), noisy, noisy)["threshold"].iloc[0] > 0.05
    quiet = np.exp(RNG(7).normal(0, 0.0002, (12, 1)))
    assert judge_metrics(dims(1), quiet, quiet)["threshold"].iloc[0] == 0.02


@pytest.mark.parametrize("runs, metrics", [(5, 5), (5, 40)])
def test_unchanged_runs_raise_family_wise_alarms_in_at_most_one_of_twenty_pairs(runs: int, metrics: int) -> None:
    """100 pairs, with what real runs have: a common drift of the machine, noise per metric, and rare disturbances."""
    rng, alarms = RNG(runs), 0
    for _ in range(100):
        shape = (2 * runs, metrics)
        spikes = (rng.random(shape) < 0.05) * rng.exponential(0.5, shape)
        values = np.exp(rng.normal(0, 0.05, (2 * runs, 1)) + rng.normal(0, 0.03, shape) + spikes)
        verdicts = judge_metrics(dims(metrics), values[:runs], values[runs:], Rules())["verdict"]
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
    alone = judge_metrics(paced_dims(30), values[:10], values[10:])
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
    assert js_distance(p, p) == 0 and js_distance(p, q) == pytest.approx(1)
    assert js_distance(p, np.array([0.25, 0.75, 0.0])) == pytest.approx(np.sqrt(entropy(0.375) - (1 + entropy(0.25)) / 2))


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
        found = [s.at for s in changepoints.level_shifts(steps(seed, at, 6)[0])]
        near += len(found) == 2 and all(abs(a - b) <= 2 for a, b in zip(found, at, strict=True))
    assert near >= 0.95 * len(SEEDS)


def test_drift_autocorrelation_and_spikes_are_no_shifts() -> None:
    assert sum(bool(changepoints.level_shifts(steps(seed)[0])) for seed in SEEDS) <= 0.05 * len(SEEDS)


@pytest.mark.long
def test_a_periodic_disturbance_is_found_within_two_steps_and_none_invented() -> None:
    near = 0
    for seed in SEEDS:
        series, spikes = steps(seed, (150,), 6)
        found = changepoints.periodic_spikes(series)
        near += found is not None and abs(found.steps - 25) <= 2 and min(abs(spikes - found.first)) <= 2
    assert near >= 0.95 * len(SEEDS)
    assert sum(changepoints.periodic_spikes(steps(seed, every=0)[0]) is not None for seed in SEEDS) <= 0.05 * len(SEEDS)
