"""A recording simulated with its own settings: which they were, and how near the simulation comes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from analyzer.errors import PredictError
from analyzer.predict import recorded
from analyzer.predict.simulator import RECORDED, Settings
from analyzer.predict.sizes import byte_count
from analyzer.predict.trace import Step, Trace
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from tests.conftest import DemoRun
from tests.test_analyzer_savings import SIZE, ran
from workloads.recordings import runtime


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


@pytest.mark.parametrize(
    ("ahead", "sizes", "warned"),
    [
        (1, [8 * SIZE], []),
        (1, [8 * SIZE + 1, None], []),
        (1, [9 * SIZE], ["tune predictor"]),
        (1, [4 * SIZE], ["tune predictor"]),
        (2, [8 * SIZE, 9 * SIZE], []),
        (2, [4 * SIZE, 8 * SIZE], ["smallest cache"]),
    ],
)
def test_prefetches_that_another_cache_would_not_make_are_named(ahead: int, sizes: list[int | None], warned: list[str]) -> None:
    step = Step("decode", 0, (np.array([[0, 1]]),) * 3, {0: [(0, 1), (ahead, 0)]})
    trace, own = Trace((step,), 4), Settings(8 * SIZE, prefetch=RECORDED)
    known = recorded.RecordedRun(own, None, None, None, ())

    def warnings(prefetch: str | None, run: recorded.RecordedRun | None) -> list[str]:
        return recorded.prefetch_warnings(trace, run, [Settings(size, prefetch=prefetch) for size in sizes], SIZE)

    found = warnings(RECORDED, known)
    assert len(found) == len(warned) and all(word in text for word, text in zip(warned, found, strict=True))
    assert warnings(None, known) == []
    assert len(warnings(RECORDED, None)) == (ahead == 1)


def test_a_replay_of_requests_without_a_trained_predictor_says_so_in_json_and_in_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = runtime(3)
    for step in (1, 2):
        chosen = {"n_tokens": 1, "k": 2, "first": 0, "count": 2, "experts": [[5, 1] + [0] * 30]}
        writer.add("route", ts=10_420 + 2000 * step, layer=0, **chosen)
        load = {"layer": 0, "expert": 1, "bytes": 64, "backend": 1}
        writer.add("load_begin", ts=10_020 + 2000 * step, reason=2, **load)
        writer.add("load_end", ts=10_040 + 2000 * step, resident=700, **{key: load[key] for key in ("layer", "expert", "bytes")})
    words = ["simulate", str(writer.write_sealed(tmp_path / "run")), "--cache", "128"]
    assert main([*words, "--json"]) == 0
    (warning,) = [text for text in json.loads(capsys.readouterr().out)["warnings"] if "tune predictor" in text]
    assert main(words) == 0
    assert warning in capsys.readouterr().out
    assert main([*words, "--prefetch", "off", "--json"]) == 0
    assert "tune predictor" not in capsys.readouterr().out
