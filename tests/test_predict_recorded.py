"""A recording simulated with its own settings: which they were, and how near the simulation comes."""

import json
import re

import pytest

from analyzer.errors import PredictError
from analyzer.predict import recorded
from analyzer.predict.sizes import byte_count
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import DemoRun
from tests.test_analyzer_savings import SIZE, ran


@pytest.mark.needs("probes")
def test_the_settings_of_the_demo_are_read_from_its_recording(demo: DemoRun) -> None:
    words = demo.manifest["command"]
    found = recorded.recorded_settings(load_tables(demo.folder), words)
    assert found.cache_bytes == byte_count(words[words.index("--expert-cache") + 1])
    assert found.chunk == int(words[words.index("--chunk") + 1])
    assert found.decode_unit == "cpu" and found.prefetch is None
    assert found.prefill_unit == ("npu" if "HTP" in demo.output else "cpu")


@pytest.mark.needs("probes")
def test_the_demo_simulated_with_its_own_settings_takes_as_long_as_recorded(
    demo: DemoRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(demo.folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    beside, (only,) = answer["recorded"], answer["runs"]
    assert abs(beside["error_tpot_ms"]) < 0.1 and abs(beside["error_ttft_ms"]) < 0.3
    assert abs(beside["simulated_hit_rate"] - beside["recorded_hit_rate"]) < 0.03
    assert only["tpot_ms"] == beside["simulated_tpot_ms"] and only["chunk"] == 16


@pytest.mark.needs("probes")
def test_one_setting_that_is_named_leaves_the_others_as_recorded(demo: DemoRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(demo.folder), "--cache", "3MiB,100%", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["chunk"] == second["chunk"] == 16
    assert second["cache_bytes"] is None and second["tpot_ms"] < first["tpot_ms"]


def test_without_a_command_the_budget_is_what_the_cache_held_at_most() -> None:
    thrashing, resident = ran([[(0, 1)], [(2, 3)]] * 4, 3), ran([[(0, 1)]] * 4, 3)
    assert recorded.recorded_budget(thrashing, None) == 3 * SIZE
    assert recorded.recorded_budget(thrashing, "350") == 350
    assert recorded.recorded_budget(thrashing, "50%") == 3 * SIZE
    assert recorded.recorded_budget(resident, "350") is None


@pytest.mark.parametrize("words", (["--cache-policy", "lfru"], ["--cache-policy=lfru"]))
def test_an_option_is_found_in_both_ways_of_writing_it(words: list[str]) -> None:
    assert recorded.option_value(["generate", *words, "--json"], "--cache-policy") == "lfru"
    assert recorded.option_value(words, "--cache") is None


@pytest.mark.parametrize("word", ("much", "", "3.2.1MiB", "5 parsecs"))
def test_a_size_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(PredictError, match=re.escape(repr(word))):
        byte_count(word)
