"""Damaged input of every kind: no verb answers it with a traceback, a hang, or silently with other figures."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from workloads.fuzzing import FAULTS, KINDS, OF_A_RECORDING, Bench, call, damage
from workloads.recordings import Writer

QUICK = tuple(set(KINDS) - {"package"})
"""Kinds that are made in no time."""


@pytest.mark.parametrize("kind", sorted(QUICK))
def test_damaged_input_is_no_cause_of_a_fault(tmp_path: Path, kind: str) -> None:
    bench = Bench(KINDS[kind], tmp_path / "in")
    for seed in range(12):
        rng = Random(seed)
        verb, name = rng.choice(KINDS[kind].verbs), rng.choice(bench.names)
        outcome, answer = bench.judge(verb, name, damage(rng, bench.sound[name], name))
        assert outcome not in FAULTS, f"{seed}, {verb}, {name}: {outcome} {answer.where} {answer.out} {answer.err}"


def test_a_kind_whose_sound_files_are_refused_is_no_kind_to_damage(tmp_path: Path) -> None:
    kind = KINDS["TOML"]
    with pytest.raises(AssertionError, match="inspect"):
        Bench(replace(kind, verbs=("runtime inspect {}/device.toml",)), tmp_path / "in")


@pytest.mark.parametrize("verb", OF_A_RECORDING)
def test_a_recording_without_steps_is_answered_in_words(tmp_path: Path, verb: str) -> None:
    answer = call(verb, Writer().add("sched_switch", ts=1, engine=0).write_sealed(tmp_path / "run"))
    assert not answer.ending and answer.code in (0, 1, 2), answer.where
