"""Damaged input of every kind: no verb answers it with a traceback, a hang, or silently with other figures."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workloads.fuzzing import FAULTS, KINDS, OF_A_RECORDING, Bench, call, damage
from workloads.recordings import Writer

QUICK = tuple(set(KINDS) - {"package"})
"""Kinds that are made in no time."""


@pytest.mark.parametrize("kind", sorted(QUICK))
def test_damaged_input_is_no_cause_of_a_fault(tmp_path: Path, kind: str) -> None:
    bench = Bench(KINDS[kind], tmp_path / "in")

    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def case(data: st.DataObject) -> None:
        verb, name = data.draw(st.sampled_from(KINDS[kind].verbs)), data.draw(st.sampled_from(bench.names))
        outcome, answer = bench.judge(verb, name, data.draw(damage(bench.sound[name], name)))
        assert outcome not in FAULTS, f"{verb}, {name}: {outcome} {answer.where} {answer.out} {answer.err}"

    case()


@pytest.mark.parametrize("verb", OF_A_RECORDING)
def test_a_recording_without_steps_is_answered_in_words(tmp_path: Path, verb: str) -> None:
    answer = call(verb, Writer().add("sched_switch", ts=1, engine=0).write_sealed(tmp_path / "run"))
    assert not answer.ending and answer.code in (0, 1, 2), answer.where
