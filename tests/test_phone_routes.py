"""Replay and simulation against a phone: its own hits, bytes and times, and the hit rates that its authors replayed."""

import csv
import json
import lzma
from pathlib import Path

import pytest

from analyzer.errors import PredictError
from analyzer.imports.routes import tables_of
from analyzer.predict import measured
from analyzer.predict.trace import from_tables
from analyzer.questions import cache_curves
from analyzer.records.schema import Tables
from moescope.__main__ import main
from tests.conftest import rest_long

DATA = Path(__file__).parent / "data" / "bigmoeonedge"
MIB = 2**20
PHONE = {"qwen": (0.8029, 20023.9, 176.77), "gemma": (0.8191, 15785.2, 201.15)}
"""The phone's hits in decode (its own states in the routes), MiB read in decode, mean ms of a decode step."""


@pytest.fixture(scope="module", params=rest_long(PHONE, "gemma"))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def routes(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routes") / f"{model}.route.csv"
    path.write_bytes(lzma.decompress((DATA / f"{model}.route.csv.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def tables(routes: Path) -> Tables:
    return tables_of(routes)


def test_every_step_is_used_with_the_bytes_of_its_layers(model: str, tables: Tables) -> None:
    trace = from_tables(tables)
    assert (len(trace.steps), trace.dropped, trace.top_k) == (129, 0, 6)
    assert trace.steps[0].rows > 1 and trace.steps[0].phase == "prefill"
    assert len(set(trace.expert_bytes)) == 2, "Q4_K_M stores some layers wider"


def test_lfru_reads_less_than_lru_where_a_tenth_or_a_fifth_of_the_experts_fits(tables: Tables) -> None:
    trace = from_tables(tables)
    budgets = [int(share * sum(trace.expert_bytes) * trace.experts) for share in (0.1, 0.2)]
    rates = cache_curves.hit_rate_curves(tables, budgets, "decode", ("lru", "lfru"))
    assert (1 - rates["lfru"] < 0.92 * (1 - rates["lru"])).all()


def test_replayed_hit_rates_are_those_that_the_phones_authors_published(model: str, tables: Tables) -> None:
    published: dict[str, dict[int, tuple[float, float]]] = {}
    with (DATA / f"{model}-curve.csv").open() as lines:
        for row in csv.DictReader(lines):
            figures = float(row["hit_pct_decode"]), float(row["read_mib"])
            published.setdefault(row["policy"], {})[int(row["budget_mib"])] = figures
    budgets = [*published["lru"]]
    names = ("lru", "lfu", "belady_without_bypass")
    decode = cache_curves.hit_rate_curves(tables, [mib * MIB for mib in budgets], "decode", names)
    whole = cache_curves.hit_rate_curves(tables, [mib * MIB for mib in budgets], None, names)
    for i, mib in enumerate(budgets):
        hits, read = published["lru"][mib]
        assert 100 * decode["lru"][i] == pytest.approx(hits, abs=0.05)
        assert whole["lru_read_mib"][i] == pytest.approx(read, rel=0.002)
        hits, read = published["belady"][mib]
        assert 100 * decode["belady_without_bypass"][i] == pytest.approx(hits, abs=0.3)
        assert whole["belady_without_bypass_read_mib"][i] == pytest.approx(read, rel=0.02)


def test_a_cache_below_one_tokens_experts_hits_nothing(tables: Tables) -> None:
    cliff = cache_curves.lru_cliff(tables)
    assert cliff
    token, expert = cliff.bytes, max(from_tables(tables).expert_bytes)
    assert cliff.experts == 6 * tables["routes"]["layer"].nunique()
    assert token - 6 * expert <= cliff.nothing_below <= token, "of its own layer, the last token's experts need not be held"
    rows = cache_curves.hit_rate_curves(tables, [cliff.nothing_below, cliff.nothing_below + expert], "decode", ("lru", "belady"))
    assert rows["lru"].iloc[0] == 0 < rows["lru"].iloc[1]
    assert rows["belady"].iloc[0] > 0.4


def test_the_simulator_gives_the_phones_hits_bytes_and_wall_time(
    model: str, routes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(routes), "--measured", str(DATA / f"{model}.metrics"), "--cache", "2000MiB,4000MiB,6000MiB"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    hits, mib, wall = PHONE[model]
    assert answer["dropped_steps"] == 0
    assert answer["recorded"]["recorded_hit_rate"] == pytest.approx(hits, abs=1e-3)
    assert answer["runs"][1]["decode_hit_rate"] == pytest.approx(hits, abs=0.005)
    assert answer["runs"][1]["decode_loaded_bytes"] / MIB == pytest.approx(mib, rel=0.01)
    assert answer["runs"][1]["tpot_ms"] == pytest.approx(wall, rel=0.15)
    times = [run["tpot_ms"] for run in answer["runs"]]
    assert times == sorted(times, reverse=True)


def test_costs_of_half_of_the_steps_predict_the_other_half(model: str, routes: Path, tmp_path: Path) -> None:
    from analyzer.predict.simulator import Settings, simulate_trace

    lines = (DATA / f"{model}.metrics").read_text().splitlines()
    wall = measured.read_steps(DATA / f"{model}.metrics").steps["wall_ms"].to_numpy()
    trace = from_tables(tables_of(routes))
    for fitted, judged in ((slice(0, 64), slice(64, 128)), (slice(64, 128), slice(0, 64))):
        (tmp_path / "half.metrics").write_text("\n".join([lines[0], *lines[1:129][fitted]]))
        costs = measured.read_steps(tmp_path / "half.metrics").costs(trace, 0)
        ours = simulate_trace(trace, costs, Settings(4000 * MIB)).durations("decode")[judged] * 1e3
        assert ours.mean() == pytest.approx(wall[judged].mean(), rel=0.15)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "wall_ms,compute_ms,stall_ms,mgmt_ms,read_bytes\n1,2,3\n" * 9])
def test_a_damaged_file_of_times_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.metrics").write_text(text)
    with pytest.raises(PredictError):
        measured.read_steps(tmp_path / "x.metrics")
