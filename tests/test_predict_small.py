"""Step latency online, quantization score and prompt subsets: against closed forms."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import PredictError
from analyzer.predict.prompts import length_divergence, matched_subset
from analyzer.predict.quantization import QuantizedResult, from_perplexity, harmonic_score
from analyzer.predict.step_latency import CONTEXT_SCALE, SLOPE, WIDE, StepLatency
from analyzer.predict.steps import replay_steps
from moescope.__main__ import main
from tests.conftest import drawn
from workloads import tables_fixture


def steps(n: int, seed: int, noise: float = 0.0) -> list[tuple[int, int, float]]:
    random = np.random.default_rng(seed)
    missed = random.integers(0, 9, n)
    return [
        (100 + i, int(m), (0.02 + 0.03 * (100 + i) / 1000 + 0.004 * m) * (1 + noise * random.standard_normal()))
        for i, m in enumerate(missed)
    ]


@settings(max_examples=drawn(25))
@given(st.integers(0, 1000), st.integers(4, 60), st.floats(0.9, 1.0))
def test_recursive_least_squares_is_weighted_least_squares(seed: int, n: int, forget: float) -> None:
    learner, told = StepLatency(forget), steps(n, seed, 0.05)
    for context, missed, seconds in told:
        learner.update(context, missed, seconds)
    x = np.array([[1, context / CONTEXT_SCALE, missed] for context, missed, _ in told])
    y = np.array([seconds for *_, seconds in told])
    weights = forget ** np.arange(n - 1, -1, -1)
    prior = np.diag([1 / WIDE, 1 / SLOPE, 1 / SLOPE]) * forget**n
    expected = np.linalg.solve(x.T @ (x * weights[:, None]) + prior, x.T @ (y * weights))
    assert np.abs(x @ (learner.coefficients - expected)).max() < 1e-4 * y.mean()


def test_a_linear_law_is_learnt_and_a_change_is_followed() -> None:
    learner = StepLatency()
    for context, missed, seconds in steps(300, 1, 0.02):
        learner.update(context, missed, seconds)
    assert learner.predict(500, 4) == pytest.approx(0.02 + 0.015 + 0.016, rel=0.05)
    assert learner.error()["median"] < 0.03
    for context, missed, seconds in steps(200, 2):
        learner.update(context, missed, 2 * seconds)
    assert learner.predict(200, 4) == pytest.approx(2 * (0.02 + 0.006 + 0.016), rel=0.1)


def test_nothing_is_claimed_before_enough_steps() -> None:
    learner = StepLatency()
    assert learner.predict(100, 1) == 0


def test_a_recording_is_replayed_step_by_step() -> None:
    _, tables = tables_fixture.make_tables(tokens=12)
    rows, learner = replay_steps(tables)
    decode = tables["tokens"][tables["tokens"]["phase"] == "decode"]
    assert len(rows) == learner.steps == len(decode)
    assert rows["ms"].sum() == pytest.approx(decode["duration_ns"].sum() / 1e6)
    relative = (rows["predicted_ms"] / rows["ms"] - 1).abs()[3:]
    assert relative.median() == pytest.approx(learner.error()["median"])


def test_the_score_is_the_harmonic_mean_of_what_was_kept_and_gained() -> None:
    original = QuantizedResult(0.8, {"prefill": 0.2, "decode": 0.1})
    assert harmonic_score(original, original)["score"] == 1
    faster = QuantizedResult(0.72, {"prefill": 0.1, "decode": 0.05})
    assert harmonic_score(faster, original)["score"] == pytest.approx(3 / (1 / 0.9 + 1 / 2 + 1 / 2))
    useless = QuantizedResult(0.008, {"prefill": 0.01, "decode": 0.005})
    assert harmonic_score(useless, original)["score"] < 0.04
    assert from_perplexity(20, {}).accuracy == 0.05
    with pytest.raises(PredictError, match="decode"):
        harmonic_score(QuantizedResult(1, {"prefill": 1}), original)


@settings(max_examples=drawn(15))
@given(st.integers(0, 1000), st.integers(20, 60))
def test_a_matched_subset_is_nearer_than_random_ones(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.round(random.lognormal(3.5, 0.8, 600)).astype(int)
    rows, found = matched_subset(lengths, size, seed)
    assert len(set(rows.tolist())) == size
    assert found == pytest.approx(length_divergence(lengths[rows], lengths))
    assert found <= np.median([length_divergence(random.choice(lengths, size), lengths) for _ in range(20)])


def test_prompts_are_chosen_from_lines_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = np.random.default_rng(0).integers(1, 40, 200)
    lines = [json.dumps({"prompt": "word " * int(n)}) if i % 2 else "word " * int(n) for i, n in enumerate(words)]
    (tmp_path / "all").write_text("\n".join(lines))
    assert main(["bench", "prompts", str(tmp_path / "all"), "--size", "10%", "--out", str(tmp_path / "some"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (tmp_path / "some").read_text().splitlines() == [lines[row] for row in told["rows"]]
    assert len(told["rows"]) == 20
    assert told["kl_nats"] < 0.1
    assert main(["bench", "prompts", str(tmp_path / "all"), "--size", "900"]) == 2
