"""Damaged input of every kind: no verb answers it with a traceback, a hang, or silently with other figures."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workloads.fuzzing import FAULTS, KINDS, Bench, damage

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
