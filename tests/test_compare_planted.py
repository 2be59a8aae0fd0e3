"""Changes planted in a real program, recorded by the real tracer: each is found, with the right culprit, and nothing else is."""

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest

from analyzer.compare.document import Comparison, compare_runs
from analyzer.compare.results import Result
from analyzer.compare.verdicts import Rules
from analyzer.tables.store import load_tables
from tests.conftest import trace
from tests.truth import skip_where_stolen
from tracer.recording.format import Recording
from workloads.compiling import WITH_SITES, compile_c
from workloads.host_time import HostTime
from workloads.planting import by_variant

VARIANTS = ("base", "again", "slow20", "cold", "displaced", "split", "halved")
ROUNDS, STEPS = 9, 20
SURE = 0.005  # by the usual rules one comparison in 20 may blame something by chance: see benchmarks/comparing
pytestmark = [pytest.mark.long, pytest.mark.needs("probes")]


@dataclass
class Planted:
    """Results of every variant's runs."""

    results: dict[str, list[Result]]
    stolen: float  # of the CPUs' time, by the host
    made: dict[str, Comparison] = field(default_factory=dict)

    def against_base(self, variant: str) -> Comparison:
        if variant not in self.made:
            self.made[variant] = compare_runs(self.results["base"], self.results[variant])
        return self.made[variant]

    def changed(self, variant: str, **culprit: object) -> pd.DataFrame:
        """What was called slower or faster: the culprit (columns, values) by the usual rules, others only where that is sure."""
        skip_where_stolen(self.stolen)
        judged = self.against_base(variant).judged
        planted = (judged[list(culprit)] == pd.Series(culprit)).all(axis=1)
        return judged[judged["verdict"].isin(["slower", "faster"]) & (planted | (judged["p"] < SURE))]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """The folder of all variants' runs, what the program printed, and what the host took of the CPUs' time meanwhile."""
    folder = tmp_path_factory.mktemp("planted")
    program, host = compile_c(folder / "planted", "planted.c", flags=WITH_SITES), HostTime()
    command = ["--", str(program), str(ROUNDS), str(STEPS), *VARIANTS]
    done = trace("run", "--no-views", "--levels", "token,operator,expert,sched", "-o", str(folder / "run"), *command)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout, host.share()


@pytest.mark.alone
def test_every_run_is_recorded_while_nothing_else_runs(recorded: tuple[Path, str, float]) -> None:
    assert Recording(recorded[0]).manifest["lost"] == {}


@pytest.fixture(scope="module")
def planted(recorded: tuple[Path, str, float]) -> Planted:
    run, printed, stolen = recorded
    results = by_variant(load_tables(run), printed)
    assert {name: len(runs) for name, runs in results.items()} == dict.fromkeys(VARIANTS, ROUNDS)
    return Planted(results, stolen)


def test_an_unchanged_program_raises_no_alarm(planted: Planted) -> None:
    strict = Rules(alpha=0.002)
    judged = compare_runs(planted.results["base"], planted.results["again"], strict).judged
    assert set(judged["verdict"]) <= {"same", "inconclusive", "minor"}


def test_a_slowed_operator_is_the_culprit(planted: Planted) -> None:
    found = planted.changed("slow20", type="attention", layer=1, phase="decode")
    found = found[(found["family"] == "operator") & (found["phase"] == "decode")]
    assert found[["type", "layer", "verdict"]].to_numpy().tolist() == [["attention", 1, "slower"]]
    assert 1.1 < found["ratio"].iloc[0] < 1.3


def test_a_cold_expert_is_the_culprit(planted: Planted) -> None:
    found = planted.changed("cold", metric="load time per step", layer=2, expert=5)
    loads = found[found["metric"] == "load time per step"]
    assert loads[["layer", "expert", "verdict"]].to_numpy().tolist() == [[2, 5, "slower"]]


def test_a_displaced_thread_is_the_culprit(planted: Planted) -> None:
    found = planted.changed("displaced", family="scheduling", type="planted (main)")
    waited = found[found["family"] == "scheduling"]
    assert waited[["type", "verdict"]].to_numpy().tolist() == [["planted (main)", "slower"]]


def test_a_split_operator_shows_as_structure(planted: Planted) -> None:
    result = planted.against_base("split")
    new = {(c.phase, c.what, c.appeared) for c in result.structure if c.aspect == "operator"}
    assert ("decode", "dispatch", True) in new and not any(not appeared for _, _, appeared in new)
    skip_where_stolen(planted.stolen)
    fall = next(f for f in result.waterfalls if f.phase == "decode")
    parts = {part.name: part for part in fall.parts}
    assert parts["dispatch"].base == 0 and parts["dispatch"].delta > 0
    shorter = planted.changed("split", type="combine", phase="decode", family="operator").query(
        "family == 'operator' and type == 'combine'"
    )
    assert set(shorter["layer"]) == {0, 1, 2} and set(shorter["verdict"]) == {"faster"}


def test_half_a_cache_shows_in_the_hit_rate(planted: Planted) -> None:
    found = planted.changed("halved", metric="hit rate", phase="decode")
    rate = found[(found["metric"] == "hit rate") & (found["phase"] == "decode")]
    assert rate["verdict"].tolist() == ["slower"] and rate["ratio"].iloc[0] < 0.9


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_parts_add_up_to_the_step(planted: Planted, variant: str) -> None:
    for fall in planted.against_base(variant).waterfalls:
        assert sum(part.delta for part in fall.parts) == pytest.approx(fall.step.delta, abs=1e-9)
        assert sum(part.base for part in fall.parts) == pytest.approx(fall.step.base, rel=1e-9)
