"""The cost table: what `tune` measures, what follows from it, and that the engine does it."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.__main__ import main
from runtime import MoE
from runtime.backends import htp
from runtime.cache_rules.forms import BACKENDS, CPU, HTP
from runtime.errors import RequestError
from runtime.package.convert import PackageFormat, convert
from runtime.package.demo_model import DemoSizes, write_demo_model
from runtime.package.layout import Package
from runtime.placement.costs import Cost, CostTable, FlushByCost
from runtime.placement.options import Options
from runtime.telemetry.probes import Kind
from tests.runtime_models import PROMPT

htp_only = pytest.mark.skipif(bool(htp.why_unavailable()), reason=htp.why_unavailable() or "HTP at hand")
SIZES = DemoSizes(hidden=64, layers=2, experts=4, intermediate=64, vocabulary=400, context=256)
TIERS, CHUNK = (1, 8), 16
SHAPES = ["--tiers", "1,8", "--chunk", "16"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny package with a table measured here."""
    folder = tmp_path_factory.mktemp("tuned")
    package = convert(write_demo_model(folder / "model", sizes=SIZES), folder / "package").folder
    assert main(["tune", str(package), *SHAPES, "--runs", "3"]) == 0
    return package


def cell(kind: str, backend: int, rows: int, ns: int, tier: int = 0, what: str = "run", form: str = "") -> Cost:
    return Cost(kind, BACKENDS[backend], form, what, tier, rows, ns, ns, ns, 1)


def table(attention: dict[int, int], cpu: dict[int, int], npu: dict[int, int], loads: dict[int, int]) -> CostTable:
    """attention: ns by backend; cpu: ns by rows; npu: ns by tier; loads: ns by tier, 0 for the CPU's."""
    cells = [cell("attention", CPU, rows, attention[CPU]) for rows in (1, CHUNK)]
    cells += [cell("attention", HTP, rows, attention[HTP], rows) for rows in (1, CHUNK)]
    cells += [cell("expert", CPU, rows, ns) for rows, ns in cpu.items()]
    cells += [cell("expert", HTP, tier, ns, tier, form="context") for tier, ns in npu.items()]
    cells += [cell("expert", HTP if tier else CPU, 0, ns, tier, "load", "read") for tier, ns in loads.items()]
    return CostTable("", {}, CHUNK, 2, tuple(cells))


times = st.integers(1, 1000)


@given(times, times, times, times, times, times)
def test_prefill_takes_the_pair_that_ends_first_when_two_backends_overlap(a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    known = table({CPU: a, HTP: b}, {1: c, 8: d}, {1: e, 8: f}, {})
    batches = CHUNK * 2 / 8
    spent = {}
    for attention, expert in product((CPU, HTP), repeat=2):
        parts = {CPU: a, HTP: b}[attention], batches * {CPU: d, HTP: f}[expert]
        spent[attention, expert] = sum(parts) if attention == expert else max(parts)
    chosen = known.prefill(TIERS)
    by_name = {name: backend for backend, name in BACKENDS.items()}
    assert spent[by_name[chosen["attention"]], by_name[chosen["expert"]]] == min(spent.values())
    single = {(p, q): {CPU: a, HTP: b}[p] + 2 * {CPU: c, HTP: e}[q] for p, q in product((CPU, HTP), repeat=2)}
    chosen = known.decode(TIERS)
    assert single[by_name[chosen["attention"]], by_name[chosen["expert"]]] == min(single.values())


@given(
    st.integers(1, 7), times, times, times, times, st.dictionaries(st.sampled_from([0, 1, 8]), times, min_size=3), st.booleans()
)
def test_a_partial_buffer_goes_where_it_ends_first(
    rows: int, c: int, d: int, e: int, f: int, loads: dict[int, int], limited: bool
) -> None:
    known = table({CPU: 1, HTP: 1}, {1: c, 8: d}, {1: e, 8: f}, loads)
    for ran in ({(HTP, 8)}, set()):
        spent = {(CPU, 0): c + (d - c) * (rows - 1) / 7, (HTP, 8): f} | ({(HTP, 1): e} if rows == 1 else {})
        for place in spent:
            spent[place] += loads[place[1]] if limited and place not in ran else 0
        assert spent[FlushByCost(known, TIERS, limited).place(rows, ran)] == pytest.approx(min(spent.values()))
    assert FlushByCost(known, TIERS, limited).place(8, ()) == (HTP, 8), "a full tier is the NPU's"


@htp_only
def test_every_kind_is_measured_on_every_backend_in_every_tier_and_form(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads((tuned / "costs.json").read_text())
    cells = {(c["kind"], c["backend"], c["form"], c["what"], c["tier"], c["rows"]) for c in found["cells"]}
    assert {("attention", "cpu", "", "run", 0, rows) for rows in (1, CHUNK)} <= cells
    assert {("attention", "htp", "", "run", rows, rows) for rows in (1, CHUNK)} <= cells
    assert {(kind, "cpu", "", "run", 0, rows) for kind in ("router", "head") for rows in (1, CHUNK)} <= cells
    for form in ("mapped", "read"):
        assert {("expert", "cpu", form, "load", 0, 0), *(("expert", "cpu", form, "run", 0, n) for n in (1, 2, 4, 8))} <= cells
    for tier in TIERS:
        assert {("expert", "htp", "context", "load", tier, 0), ("expert", "htp", "context", "run", tier, tier)} <= cells
    assert all(0 < c["least_ns"] <= c["median_ns"] <= c["most_ns"] and c["count"] == 3 for c in found["cells"])
    assert found["machine"]["npu"] == htp.LABEL and found["machine"]["emulated"] == htp.EMULATED
    assert Package(tuned).damaged() == [], "the table is no part of what is hashed"
    assert main(["tune", str(tuned), *SHAPES, "--show"]) == 0
    shown = capsys.readouterr().out
    assert htp.LABEL in shown and "| expert |" in shown.replace("  ", " ") and "prefill: " in shown


@htp_only
def test_auto_follows_the_table_and_partial_buffers_run_on_the_cpu_where_it_says_so(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = CostTable.stored(Package(tuned))
    assert measured
    cheap = {("expert", "htp", 8): 10, ("expert", "cpu", 1): 1, ("expert", "cpu", 2): 2}
    cells = [
        replace(c, median_ns=cheap.get((c.kind, c.backend, c.tier or c.rows), 1000) if c.what == "run" else 0)
        for c in measured.cells
    ]
    changed = replace(measured, cells=tuple(cells))
    changed.save(Package(tuned))
    options = {"chunk": CHUNK, "tiers": TIERS}
    try:
        expected = [t.id for t in MoE.load(tuned).generate(PROMPT, 4)]
        model = MoE.load(tuned, prefill_backend="auto", decode_backend="auto", **options)
        assert [t.id for t in model.generate(PROMPT, 4)] == expected
        model.close()
    finally:
        measured.save(Package(tuned))
    assert "table" in capsys.readouterr().err
    chosen = Counter((layer, e) for seq, layer, experts, _ in model.log.routing if seq == 0 for e in experts.ravel().tolist())
    rests = [count % 8 for count in chosen.values()]
    decoded = 3 * SIZES.layers * SIZES.top_k
    assert model.log.graphs[Kind.EXPERT, HTP] == sum(n // 8 for n in chosen.values()) + sum(rest > 2 for rest in rests)
    assert model.log.graphs[Kind.EXPERT, CPU] == sum(0 < rest <= 2 for rest in rests) + decoded


@htp_only
def test_a_table_from_elsewhere_is_left_alone_and_said(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = CostTable.stored(Package(tuned))
    assert measured
    for changed, told in (
        (replace(measured, machine=measured.machine | {"cpu": "another"}), "another cpu"),
        (replace(measured, package="of another model"), "converted"),
        (replace(measured, chunk=17), "another chunk"),
    ):
        changed.save(Package(tuned))
        try:
            model = MoE.load(tuned, prefill_backend="auto", decode_backend="auto", chunk=CHUNK, tiers=TIERS)
            model.close()
        finally:
            measured.save(Package(tuned))
        told_here = capsys.readouterr().err
        assert told in told_here and htp.LABEL in told_here


@htp_only
def test_each_kind_can_be_placed_by_hand(tuned: Path) -> None:
    expected = [t.id for t in MoE.load(tuned).generate(PROMPT, 2)]
    model = MoE.load(tuned, prefill_backend="attention=cpu,expert=htp", chunk=CHUNK, tiers=TIERS)
    assert [t.id for t in model.generate(PROMPT, 2)] == expected
    model.close()
    assert model.log.graphs[Kind.ATTENTION, HTP] == 0 < model.log.graphs[Kind.EXPERT, HTP]
    with pytest.raises(RequestError, match="attention=cpu,expert=htp"):
        Options(prefill_backend="attention=gpu,expert=htp")


def test_a_package_for_the_cpu_alone_is_tuned_without_the_npu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_demo_model(tmp_path / "model", sizes=SIZES)
    package = convert(model, tmp_path / "package", None, PackageFormat(backend="cpu", bits=4)).folder
    assert main(["tune", str(package), "--show"]) == 2
    assert "table" in capsys.readouterr().err
    assert main(["tune", str(package), *SHAPES, "--runs", "1", "--json"]) == 0
    assert {c["backend"] for c in json.loads(capsys.readouterr().out)["cells"]} == {"cpu"}
    arguments = ["generate", str(package), "--prompt", "A cache", "--max-new-tokens", "1", "--prefill-backend", "auto"]
    assert main(arguments) == 0
    assert "CPU" in capsys.readouterr().err
