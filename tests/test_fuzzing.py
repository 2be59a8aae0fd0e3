"""Damaged input of every kind: no verb answers it with a traceback, a hang, or silently with other figures."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.conftest import rest_long
from workloads.fuzzing import FAULTS, KINDS, OF_A_RECORDING, Bench, damage, run_verb
from workloads.recordings import Writer

QUICK = set(KINDS) - {"package"}
"""Kinds that are made in no time."""


@pytest.mark.parametrize(
    "kind", rest_long(sorted(QUICK), *QUICK - {"recording without checksums", "Parquet tables", "comparison"})
)
def test_damaged_input_is_no_cause_of_a_fault(tmp_path: Path, kind: str) -> None:
    bench = Bench(KINDS[kind], tmp_path / "in")
    for seed in range(8):
        rng = Random(seed)
        verb, name = rng.choice(KINDS[kind].verbs), rng.choice(bench.names)
        outcome, answer = bench.judge(verb, name, damage(rng, bench.sound[name], name))
        assert outcome not in FAULTS, f"{seed}, {verb}, {name}: {outcome} {answer.where} {answer.out} {answer.err}"


@pytest.mark.parametrize(
    "keys", [("files", "config.json", "sha256"), ("experts", "bytes"), ("experts", "stride"), ("precisions", "experts", "bits")]
)
@pytest.mark.parametrize("value", [None, []])
def test_a_package_whose_manifest_lost_a_number_is_refused_in_words(tmp_path: Path, keys: tuple[str, ...], value: object) -> None:
    bench = Bench(replace(KINDS["package"], verbs=("inspect {}/package --json",)), tmp_path / "in")
    manifest = holder = json.loads(bench.sound["package/manifest.json"])
    for key in keys[:-1]:
        holder = holder[key]
    for gone in (False, True):
        holder[keys[-1]] = value
        if gone:
            del holder[keys[-1]]
        outcome, answer = bench.judge(bench.kind.verbs[0], "package/manifest.json", json.dumps(manifest).encode())
        assert outcome == "refused" and "manifest.json" in answer.err


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 1e308), ("num_hidden_layers", 1 << 70)])
def test_a_config_of_an_absurd_size_is_refused_in_words(tmp_path: Path, field: str, value: float) -> None:
    bench = Bench(KINDS["TOML"], tmp_path / "in")
    config = json.loads(bench.sound["qwen3-8B_config.json"]) | {field: value}
    outcome, answer = bench.judge(bench.kind.verbs[0], "qwen3-8B_config.json", json.dumps(config).encode())
    assert outcome == "refused" and field in answer.err


def test_a_kind_whose_sound_files_are_refused_is_no_kind_to_damage(tmp_path: Path) -> None:
    kind = KINDS["TOML"]
    with pytest.raises(AssertionError, match="inspect"):
        Bench(replace(kind, verbs=("inspect {}/device.toml",)), tmp_path / "in")


@pytest.mark.parametrize("verb", OF_A_RECORDING)
def test_a_recording_without_steps_is_answered_in_words(tmp_path: Path, verb: str) -> None:
    answer = run_verb(verb, Writer().add("sched_switch", ts=1, engine=0).write_sealed(tmp_path / "run"))
    assert not answer.ending and answer.code in (0, 1, 2), answer.where
