"""Series of steps taken apart: what was planted is found, plain noise holds nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions.changepoints import take_apart
from workloads.drawn_series import draw, invented, missed, noise, surplus


def test_first_execution_step_drift_period_and_burst_are_found_and_nothing_else() -> None:
    wrong = [missed(take_apart(drawn.ms), drawn) for drawn in map(draw, range(30))]
    assert sum(not each for each in wrong) >= 27
    assert not {"first", "period", "burst"} & set().union(*wrong)


@pytest.mark.parametrize("slope", [-0.5, 0.02, 0.5])
def test_a_steep_drift_is_no_burst_at_its_ends(slope: float) -> None:
    for seed in range(10):
        parts = take_apart(40 + slope * np.arange(60) + np.random.default_rng(seed).normal(0, 0.2, 60))
        assert len(parts.drifts) == 1 and not (parts.bursts or parts.shifts or parts.period)


def test_noise_that_follows_itself_hides_a_small_drift_but_adds_nothing() -> None:
    series = [draw(seed, 0.5) for seed in range(30)]
    parts = [take_apart(drawn.ms) for drawn in series]
    assert sum(map(surplus, parts)) == 0
    assert sum(not missed(found, drawn) for found, drawn in zip(parts, series, strict=True)) >= 24


@pytest.mark.parametrize(("n", "rho"), [(30, 0.0), (100, 0.3), (600, 0.5)])
def test_plain_noise_holds_nothing(n: int, rho: float) -> None:
    assert sum(bool(invented(take_apart(noise(np.random.default_rng(seed), n, rho)))) for seed in range(40)) <= 2


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_any_series_is_taken_apart_within_its_bounds(values: list[float]) -> None:
    parts = take_apart(np.array(values))
    assert len(parts.rest) == len(values) and np.isfinite(parts.rest).all()
    assert all(0 < shift.at < len(values) for shift in parts.shifts)
    assert all(0 <= drift.at < drift.until < len(values) for drift in parts.drifts)
