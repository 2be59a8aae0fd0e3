"""The trial that decides whether prefetching pays, on simulated costs of tokens."""

from itertools import chain, repeat

import numpy as np
import pytest

from runtime.experts.trial import LONGEST_REST, LOOKS, WINDOW, Sample, Trial
from tests.golden import Golden

PROBE = 4 * WINDOW


def decode(trial: Trial, costs: list[tuple[int, int]]) -> tuple[list[bool], int]:
    """Which tokens were prefetched, and their summed time. costs: ns of a token (without, with) prefetching."""
    ways, spent = [], 0
    for pair in costs:
        ways.append(trial.on)
        cost = pair[trial.on]
        spent += cost
        trial.took(Sample(cost, cost // 2, cost // 10 if trial.on else 0))
    return ways, spent


def noisy(without: float, with_it: float, tokens: int, noise: float, seed: int = 0) -> list[tuple[int, int]]:
    """Costs that vary from token to token, with rare disturbances of either way."""
    rng = np.random.default_rng(seed)
    disturbed = (rng.random((tokens, 2)) < 0.05) * rng.exponential(1, (tokens, 2))
    factors = np.exp(rng.normal(0, noise, (tokens, 2))) + disturbed
    return [(int(a), int(b)) for a, b in factors * [without, with_it]]


def test_it_begins_without_and_gives_both_ways_as_many_tokens() -> None:
    ways, _ = decode(Trial(), [(1000, 1000)] * PROBE)
    assert ways == [False] * WINDOW + [True] * 2 * WINDOW + [False] * WINDOW


def first_verdict(without: float, with_it: float, noise: float, seed: int) -> tuple[bool, int]:
    """What the first trial finds, and after how many tokens."""
    trial = Trial()
    for tokens, pair in enumerate(noisy(without, with_it, LOOKS * PROBE + 1, noise, seed)):
        if trial.pays is not None:
            return trial.pays, tokens
        trial.took(Sample(pair[trial.on]))
    raise AssertionError("a trial has an end")


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2, 0.3])
def test_a_trial_is_wrong_once_in_twenty_at_most_where_prefetching_saves_nothing(noise: float) -> None:
    found = [first_verdict(1e6, 1e6, noise, seed)[0] for seed in range(300)]
    assert sum(found) <= 0.05 * len(found) + 2 * (0.05 * 0.95 * len(found)) ** 0.5


@pytest.mark.parametrize(("with_it", "noise", "pays"), [(0.86e6, 0.1, True), (0.7e6, 0.2, True), (1.28e6, 0.2, False)])
def test_what_is_larger_than_the_noise_is_found_within_some_tens_of_tokens(with_it: float, noise: float, pays: bool) -> None:
    found = [first_verdict(1e6, with_it, noise, seed) for seed in range(100)]
    right = [tokens for verdict, tokens in found if verdict is pays]
    assert len(right) >= 75
    assert np.median(right) <= 48


def test_it_gives_up_where_noise_hides_whether_prefetching_pays() -> None:
    trial = Trial()
    # Every fifth token is five times as slow in either way, so that the error stays as large as the mean.
    decode(trial, [(5000, 5200) if i % 5 == 0 else (1000, 1040) for i in range(3 * PROBE)])
    assert trial.pays is False


@pytest.mark.parametrize(("with_it", "pays"), [(500, True), (970, True), (990, False), (1000, False), (1080, False)])
def test_it_keeps_to_prefetching_only_where_that_saves_time(with_it: int, pays: bool) -> None:
    trial = Trial()
    ways, _ = decode(trial, [(1000, with_it)] * (PROBE + 50))
    assert trial.pays is pays
    assert ways[PROBE:] == [pays] * 50
    assert trial.reason.startswith("on: " if pays else "off: ")


@pytest.mark.parametrize("seed", range(5))
def test_where_prefetching_costs_eight_percent_probes_cost_less_than_one(seed: int) -> None:
    costs = noisy(1e6, 1.08e6, 4000, 0.1, seed)
    _, spent = decode(Trial(), costs)
    assert spent < 1.01 * sum(without for without, _ in costs)


@pytest.mark.parametrize("seed", range(5))
def test_where_prefetching_saves_a_third_nearly_all_of_it_is_got(seed: int) -> None:
    costs = noisy(3e6, 2e6, 4000, 0.1, seed)
    _, spent = decode(Trial(), costs)
    assert spent < 1.03 * sum(with_it for _, with_it in costs)


@pytest.mark.parametrize("seed", range(5))
def test_where_prefetching_quickens_most_tokens_and_rare_ones_take_all_of_it_back_it_keeps_still(seed: int) -> None:
    costs = [(1_000_000, 900_000 if i % 10 else 3_000_000) for i in np.random.default_rng(seed).permutation(4000)]
    trial = Trial()
    _, spent = decode(trial, costs)
    assert trial.pays is False
    assert spent < 1.02 * sum(without for without, _ in costs)


@pytest.mark.parametrize(("with_it", "least"), [(1.05e6, 0.98), (0.95e6, 1.02)])
def test_where_predicting_is_cheap_what_saves_a_little_is_kept_and_what_costs_is_not(with_it: float, least: float) -> None:
    costs = noisy(1e6, with_it, 2000, 0.1)
    _, spent = decode(Trial(cheap=True), costs)
    assert sum(without for without, _ in costs) / spent >= least


def test_it_changes_its_mind_when_the_disk_gets_busy() -> None:
    trial = Trial()
    ways, _ = decode(trial, list(chain(repeat((3000, 2000), 300), repeat((3000, 4000), 100))))
    assert ways[299]
    assert trial.pays is False
    assert not ways[-1]


def test_rests_get_longer_while_the_verdict_stays() -> None:
    ways, _ = decode(Trial(), [(1000, 2000)] * 10_000)
    probes = np.flatnonzero(np.diff(np.array(ways, int)) == 1)
    gaps = np.diff(probes)
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] == LONGEST_REST + PROBE


def test_the_reason_names_times_waits_and_the_price_of_predicting(golden: Golden) -> None:
    trial = Trial()
    decode(trial, [(1_200_000, 1_300_000)] * PROBE)
    golden("generate", f"{trial.reason}\n{Trial().reason}")
