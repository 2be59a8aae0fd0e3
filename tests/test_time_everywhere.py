"""Every kind of use: `time` tiles its steps exactly, and every screen that tells a cause's time or share tells that of `time`."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analyzer.questions.causes import CAUSES
from analyzer.questions.figures import fed_sequences, itls_ms
from analyzer.questions.requests import between_tokens_ms
from analyzer.questions.step_time import counted_time, operator_times, step_time
from analyzer.tables.store import load_tables
from moescope.__main__ import main
from moescope.verbs import FORMS
from tests.conftest import made_once, rest_long
from tests.judge import Judge
from tests.test_views_pages import data_of
from tracer.recording.cost import cost_of
from tracer.recording.format import Recording as Reader
from workloads import six_kinds

VULKAN = pytest.param("vulkan-half", marks=[pytest.mark.long, pytest.mark.needs("llama.cpp on Vulkan")])
KINDS = [*rest_long(["demo-small-cache", "llama", "server", "speculative", "overloaded"], "demo-small-cache", "llama"), VULKAN]
NO_CAUSES = {
    **dict.fromkeys(("import", "predict"), "no recording"),
    **{f"predict {name}": "no recording" for name in ("ceilings", "kernels", "quantization", "device")},
    "bench prompts": "no recording",
    "query": "answers what it is asked",
    "time threads": "states of threads, some named like causes",
}
"""Verb → why it is not asked for causes; of `write` and `compare` tests of their own do."""
MORE_WORDS = {"time": [[], ["--by", "cause"], ["--by", "part"]]}
NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
Told = tuple[str, str, float, float]
"""Where it stands, the cause, the figure, and how far off its rounding may be."""


class Recording:
    """A recording with the figures that its screens may tell of causes: from `time`, by plain sums."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tables = load_tables(folder)
        self.time = step_time(self.tables)

    @cached_property
    def pieces(self) -> pd.DataFrame:
        """The pieces of the steps that count, with their phase."""
        steps, rows = counted_time(self.tables, self.time)
        return rows.assign(phase=steps["phase"].reindex(rows["token_id"]).to_numpy(), cause=rows["cause"].astype(str))

    def scopes(self) -> Iterator[tuple[pd.DataFrame, int]]:
        """(pieces, number of steps) of which screens tell: the run, its phases, what lies between operators, cells."""
        steps = counted_time(self.tables, self.time)[0]
        for phase in [None, *steps["phase"].unique()]:
            rows, count = (
                (self.pieces, len(steps))
                if phase is None
                else (self.pieces[self.pieces["phase"] == phase], int((steps["phase"] == phase).sum()))
            )
            yield rows, count
            yield rows[(rows["op_id"] < 0) & (rows["load_id"] < 0)], count
            for name in ("part", "cause"):
                yield from ((cell, count) for _, cell in rows.groupby(rows[name].astype(str)))

    def figures_by(self, name: str) -> dict[str, np.ndarray]:
        """Each value of a column of `time` → every figure of it that is true: sums and means per step in each unit, shares."""
        found: dict[str, list[float]] = {cause: [0.0] for cause in CAUSES}
        totals = [rows["duration_ns"].sum() for _, rows in self.pieces.groupby("phase")] + [self.pieces["duration_ns"].sum()]
        for rows, steps in self.scopes():
            for value, ns in rows["duration_ns"].groupby(rows[name].astype(str)).sum().items():
                figures = found.setdefault(str(value), [])
                figures += [ns / each / unit for each in (1, steps) for unit in NANOSECONDS.values()]
                figures += [ns / total * base for total in totals for base in (1, 100)]
        return {value: np.array(figures) for value, figures in found.items()}

    @cached_property
    def causes(self) -> dict[str, np.ndarray]:
        return self.figures_by("cause")

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Some have the name of a cause, and a printed table does not tell them apart."""
        return self.figures_by("part")

    def is_true(self, cause: str, figure: float, rounding: float, printed: bool = False) -> bool:
        known = np.append(self.causes[cause], self.parts[cause] if printed else [])
        return bool((np.abs(known - figure) <= np.maximum(rounding, 1e-6 * np.abs(figure))).any())


@pytest.fixture(scope="module", params=KINDS)
def recording(request: pytest.FixtureRequest) -> Recording:
    """A recording of a kind of use, with its views."""

    def make(folder: Path) -> None:
        six_kinds.record_use(folder, request.param, made_once("six kinds: models", lambda models: None))
        assert main(["write", str(folder / request.param)]) == 0

    return Recording(made_once(f"six kinds: {request.param}", make) / request.param)


pytestmark = pytest.mark.needs("probes")


def test_the_pieces_of_every_step_tile_it_and_add_up_to_it_on_both_axes(recording: Recording) -> None:
    tokens, time = recording.tables["tokens"].set_index("token_id"), recording.time
    assert len(tokens) and set(time["cause"].astype(str)) <= set(CAUSES)
    for by in ("part", "cause"):
        sums = time.groupby(["token_id", by], observed=True)["duration_ns"].sum().groupby("token_id").sum()
        assert sums.reindex(tokens.index, fill_value=0).tolist() == tokens["duration_ns"].tolist()
    rows = time.sort_values(["token_id", "begin_ns"])
    same = rows["token_id"].eq(rows["token_id"].shift())
    assert (rows["begin_ns"][same] == rows["end_ns"].shift()[same]).all()
    assert (rows["begin_ns"][~same].to_numpy() == tokens["begin_ns"].reindex(rows["token_id"][~same])).all()
    assert (rows["duration_ns"] > 0).all() and (rows["end_ns"] - rows["begin_ns"] == rows["duration_ns"]).all()


def test_the_programs_that_every_step_hits_were_timed_and_take_no_longer_than_the_steps(recording: Recording) -> None:
    manifest = Reader(recording.folder).manifest
    hit = [row for row in manifest["probes"] if row["level"] == "token" and row["hits"]]
    assert hit and all(row["bpf_ns_per_hit"] > 0 for row in hit)
    warm, cold = cost_of(manifest["cost"], recording.tables["tokens"]["duration_ns"].sum()).of_steps or (0, 0)
    assert 0 < warm <= cold <= 1


def test_operators_take_no_longer_than_their_steps(recording: Recording) -> None:
    operators = recording.tables["operators"]
    times = operator_times(recording.tables, recording.time).drop(columns="op_id").sum(axis=1)
    spent = times.groupby(operators["token_id"].to_numpy()).sum()
    steps = recording.time.groupby("token_id")["duration_ns"].sum()
    assert (spent[spent.index >= 0] <= steps.reindex(spent.index[spent.index >= 0])).all()


def test_no_finding_costs_more_than_the_steps_took(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", str(recording.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found and all(0 <= one["saving_share"] <= 1 and 0 <= one["share"] <= 1 for one in found)
    assert main(["roofline", str(recording.folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["operators"]
    assert 0 < sum(row["ms"] for row in rows) <= recording.pieces["duration_ns"].sum() / 1e6


def test_tpot_is_the_time_in_the_tokens_steps_and_what_is_told_to_be_outside(recording: Recording) -> None:
    fed, ends = fed_sequences(recording.tables), recording.tables["tokens"].set_index("token_id")["end_ns"]
    inside, tokens = 0, 0
    for _, request in fed.groupby("request"):
        rows = list(request.itertuples())
        for before, row in itertools.pairwise(rows):
            if row.itl_ms == row.itl_ms:
                tokens += row.kept
                spans = [(one.begin_ns, ends[one.token_id]) for one in (before, row)]
                inside += sum(max(0, min(end, row.end_ns) - max(begin, before.end_ns)) for begin, end in spans)
    told = between_tokens_ms(recording.tables)
    assert tokens and set(told) <= {*CAUSES, *(f"{phase} steps" for phase in recording.tables["tokens"]["phase"])}
    assert inside / tokens / 1e6 + sum(told.values()) == pytest.approx(itls_ms(fed).mean())


def numbers(value: object, where: str, names: frozenset[str]) -> Iterator[tuple[str, float]]:
    """The figures beside a cause: numbers of its row, by phase too; a chart's bars where they have names, else their sum."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, int | float) and (name in FIGURES or name in names):
                yield f"{where}.{name}", inner
            elif name in FIGURES and isinstance(inner, dict):
                yield from numbers(inner, f"{where}.{name}", frozenset(inner))
            elif name == "y" and isinstance(inner, list) and all(isinstance(label, str) for label in inner):
                yield from ((f"{where}.{label}", float(width)) for label, width in zip(inner, value["x"], strict=True) if width)
            elif name == "y" and isinstance(inner, list):
                yield f"{where}.{name}", float(sum(inner))


FIGURES = ("ms", "share", "base", "cand", "phases", "duration_ns", "ns")


def told_in(data: object, where: str = "") -> Iterator[Told]:
    """Every figure of a cause in JSON: a key that is a cause, or a row that names one."""
    if isinstance(data, list):
        for row in data:
            yield from told_in(row, where)
    if not isinstance(data, dict):
        return
    if {"columns", "rows"} <= data.keys() and any(column.get("name") == "cause" for column in data["columns"]):
        yield from told_in_rows(data, where)
    named = next((data[key] for key in ("cause", "type", "rule") if data.get(key) in CAUSES), None)
    if named is not None:
        yield from ((place, str(named), figure, 1e-9) for place, figure in numbers(data, where, frozenset()))
    for name, inner in data.items():
        if name in ("part_ms", "between_tokens_ms"):
            continue  # a part has the name of a cause; the other is not of the steps, and has a test of its own
        if name in CAUSES and isinstance(inner, int | float):
            yield f"{where}.{name}", name, float(inner), 1e-9
        yield from told_in(inner, f"{where}.{name}")


def told_in_rows(table: dict[str, Any], where: str) -> Iterator[Told]:
    """Sums by cause, and by phase where it is a column, of a report's table in milliseconds."""
    frame = pd.DataFrame(table["rows"], columns=[column["name"] for column in table["columns"]])
    by = [name for name in ("phase", "cause") if name in frame]
    for key, ms in frame.groupby(by)["total ms"].sum().items() if len(frame) == table.get("total", len(frame)) else ():
        yield f"{where}.{table.get('title')}", str(key[-1] if isinstance(key, tuple) else key), float(ms), 1e-6


NUMBER = r"([\d,]+\.?\d*(?:e-\d+)?)"


def told_in_text(text: str, where: str) -> Iterator[Told]:
    """`cause 12 %` in sentences, and the rows and columns of printed tables."""
    for cause in CAUSES:
        for found in re.finditer(rf"(?:^|[:,(] ?){cause} {NUMBER} ?(?:%|ms\b)", text):
            yield where, cause, *value_of(found[1])
        for line in re.findall(rf"^{cause}  .*$", text, re.MULTILINE):
            yield from ((where, cause, *value_of(cell)) for cell in re.findall(rf"(?<= ){NUMBER}", line))
    heads: list[str] = []
    for line in text.splitlines():
        words = [word.strip() for word in re.split(r"\s{2,}", line)]
        if words and re.search(r", ms$|^$", words[0]) and set(words) & set(CAUSES):
            heads = words
        elif heads and words[0] in ("all", "share"):
            pairs = zip(heads[1:], words[1:], strict=False)
            yield from (
                (where, name, *value_of(cell.rstrip("%"))) for name, cell in pairs if name in CAUSES and cell[:1].isdigit()
            )


def value_of(text: str) -> tuple[float, float]:
    """(a printed number, half a unit of its last digit)."""
    digits, _, power = text.replace(",", "").partition("e")
    places = len(digits.partition(".")[2]) - int(power or 0)
    return float(text.replace(",", "")), 0.501 * 10.0**-places


def wrong(recording: Recording, told: Iterable[Told], printed: bool = False) -> list[Told]:
    return [one for one in told if not recording.is_true(*one[1:], printed)]


def commands(folder: Path) -> Iterator[list[str]]:
    """Every verb of the analyzer that a recording can be given."""
    for name, verb in FORMS.items():
        asked = verb.module.startswith("analyzer.") and name not in NO_CAUSES
        for more in MORE_WORDS.get(name, [[]]) if asked else []:
            yield [*name.split(), str(folder), *more]


@pytest.mark.parametrize("form", ["json", "text"])
def test_every_verb_tells_the_causes_of_time(
    recording: Recording, form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    count: dict[str, int] = {}
    off: list[Told] = []
    for words in commands(recording.folder):
        code = main([*words, *(["--json"] if form == "json" else [])])
        printed = capsys.readouterr().out
        if code == 2:
            continue  # lacks what the verb is about
        told = list(told_in(json.loads(printed), words[0]) if form == "json" else told_in_text(printed, words[0]))
        count[words[0]] = count.get(words[0], 0) + len(told)
        off += wrong(recording, told, printed=form == "text")
    assert off == []
    assert all(count[verb] > 0 for verb in ("summary", "time", *(("findings",) if form == "json" else ())))


def test_the_report_tells_the_causes_of_time(recording: Recording) -> None:
    data = data_of(recording.folder / "report.html")
    sections = [section for section in data["sections"] if section["name"] != "threads"]  # states of threads, in causes' colours
    told = [(*one[:3], max(one[3], 1e-4 * len(recording.tables["tokens"]))) for one in told_in(sections, "report")]
    assert len({cause for _, cause, _, _ in told}) == recording.pieces["cause"].nunique()
    assert wrong(recording, told) == []
    texts = re.sub(r"<[^>]*>", " ", json.dumps(data))
    assert wrong(recording, told_in_text(texts, "report's texts"), printed=True) == []


def test_the_timeline_has_as_much_of_each_cause_as_time(recording: Recording) -> None:
    judge = Judge(recording.folder / "trace.pftrace")
    drawn = dict(judge.rows("select name, sum(dur) as ns from slice where category = 'time' group by name"))
    assert drawn == recording.time.groupby(recording.time["cause"].astype(str))["duration_ns"].sum().to_dict()


def of_operators(recording: Recording, token_ids: list[int]) -> dict[str, float]:
    """Cause → ns within operators of a mean step of these."""
    rows = recording.time[(recording.time["op_id"] >= 0) & recording.time["token_id"].isin(token_ids)]
    return {
        str(cause): float(ns) / len(token_ids)
        for cause, ns in rows.groupby(rows["cause"].astype(str))["duration_ns"].sum().items()
    }


def sum_of_nodes(nodes: list[dict[str, Any]]) -> dict[str, float]:
    spent: dict[str, float] = {}
    for node in nodes:
        for cause, ns in (node.get("causes") or {}).items():
            spent[cause] = spent.get(cause, 0.0) + ns
    return spent


def test_the_nodes_of_a_profdag_add_up_to_the_causes_within_its_operators(
    recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    page = data_of(recording.folder / "profdag.html")
    assert sum_of_nodes(page["nodes"]) == pytest.approx(of_operators(recording, [page["token"]["token_id"]]))
    words = ["--format", "json", "--token", str(page["token"]["token_id"]), "--out", "-"]
    assert main(["write", str(recording.folder), *words]) == 0
    graph = json.loads(capsys.readouterr().out)
    assert sum_of_nodes(graph["nodes"]) == pytest.approx(of_operators(recording, [page["token"]["token_id"]]))


def test_a_step_that_is_asked_for_tells_its_own_pieces(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    step = int(recording.pieces["token_id"].iloc[len(recording.pieces) // 2])
    mine = recording.time[recording.time["token_id"] == step]
    assert main(["time", str(recording.folder), "--step", str(step), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    told = {cause: ms for part in answer["phases"].values() for cause, ms in part["cause_ms"].items()}
    expected = mine.groupby(mine["cause"].astype(str))["duration_ns"].sum() / 1e6
    assert told == pytest.approx(expected.to_dict())
    assert [row["duration_ns"] for row in answer["pieces"]] == mine["duration_ns"].tolist()


def test_the_query_that_a_finding_names_gives_its_figure(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", str(recording.folder), "--json"]) == 0
    found = [one for one in json.loads(capsys.readouterr().out)["findings"] if "cause" in one["evidence"]]
    for one in found:
        assert main(["query", str(recording.folder), one["query"], "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert sum(row["ms"] for row in rows) == pytest.approx(one["evidence"]["ms"]), one["rule"]
    others = [one["evidence"]["ms"] for one in found if one["evidence"]["cause"] != "computing"]
    assert found[0]["evidence"]["ms"] >= max(others, default=0)  # on a quiet machine computing may be all that costs 1 %


def test_a_comparison_tells_the_mean_step_of_each_cause(
    recording: Recording, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("views.commands.compare.refuse_repeats", lambda *sides: None)  # both sides are one run
    assert main(["compare", str(recording.folder), str(recording.folder), "--json"]) == 0
    told = [row for row in json.loads(capsys.readouterr().out)["metrics"] if row["metric"] == "time by cause"]
    steps = counted_time(recording.tables, recording.time)[0]["phase"]
    rows = recording.pieces
    for row in told:
        mine = rows[(rows["phase"] == row["phase"]) & (rows["cause"] == row["type"])].groupby("token_id")["duration_ns"].sum()
        mean = mine.sum() / (steps == row["phase"]).sum() / 1e6
        assert row["base"] == row["cand"] == pytest.approx(mean), row["type"]
    assert told
