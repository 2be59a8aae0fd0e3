"""Sequences and requests of engines that serve several at once are what the engines were given, row by row."""

import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.questions import figures, requests
from analyzer.questions.summary import summarize
from analyzer.tables import sequences
from analyzer.tables import store as tables_module
from analyzer.tables.sequences import PHASES, REFUSED, RowSets
from moescope.__main__ import main
from tests.conftest import ROOT, drawn, last_json, trace
from tests.truth import skip_where_stolen
from tracer.recording.format import Recording
from workloads.batch_plans import TARGET, Call, Plan
from workloads.gguf_model import Shape, write_model
from workloads.host_time import HostTime
from workloads.recordings import Writer

real = [
    pytest.mark.needs("probes"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
MODEL = Shape("qwen2moe", 3, 256, 512, 4, 4, 1024, experts=8, used=3, expert_width=256, shared_width=512)
DRAFTER = replace(MODEL, used=4)
"""The same weights and one more expert per token: about every second token that it drafts is the model's."""
COUNTED = ("sequence", "prompt", "cached", "generated", "drafted", "judged", "accepted")
Set = tuple[int, int, str, int, int, int, int]


def planned(calls: list[Call]) -> list[Set]:
    """(step, sequence, phase, rows, position, outputs, kept) of all row sets, by step and sequence."""
    answer = []
    for step, call in enumerate(calls):
        for sequence, phase, _, kept in sorted(call.sets):
            rows = [row for row in call.rows if row[0] == sequence]
            answer.append((step, sequence, phase, len(rows), rows[0][1], sum(row[2] for row in rows), kept))
    return answer


def found(rows: pd.DataFrame) -> list[Set]:
    """The same from the table `sequences`; of drafts and refused calls nothing is kept track of."""
    names = ["token_id", "sequence", "phase", "rows", "position", "outputs", "kept"]
    return [tuple(row) for row in rows.sort_values(["token_id", "sequence"])[names].itertuples(index=False)]


def without_kept_drafts(sets: list[Set]) -> list[Set]:
    """How many rows of a draft are kept is not told."""
    return [(*one[:-1], one[-1] if one[2] in ("prefill", "decode") else -1) for one in sets]


def owners(calls: list[Call], requests_of: list[int]) -> list[list[tuple[int, int]]]:
    """The (step, sequence) of each request, as lists that do not depend on the requests' numbers."""
    at = [(step, sequence) for step, call in enumerate(calls) for sequence, *_ in sorted(call.sets)]
    groups: dict[int, list[tuple[int, int]]] = {}
    for place, request in zip(at, requests_of, strict=True):
        groups.setdefault(request, []).append(place)
    return sorted(places for request, places in groups.items() if request >= 0)


def planned_owners(calls: list[Call]) -> list[list[tuple[int, int]]]:
    return owners(calls, [one[2] for call in calls for one in sorted(call.sets)])


def row_sets(calls: list[Call]) -> RowSets:
    rows = [(step, i, *row) for step, call in enumerate(calls) for i, row in enumerate(call.rows)]
    step, number, sequence, position, output = np.array(rows, np.int64).T
    return sequences.group_rows({"step": step, "number": number, "position": position, "output": output > 0}, sequence)


def answer_of(plan: Plan) -> pd.DataFrame:
    """The table `sequences` that the rules make of a plan's rows."""
    calls, zeros = plan.calls, np.zeros(len(plan.calls), np.int64)
    about = {"pid": zeros, "tid": zeros, "begin_ns": np.arange(len(calls)), "engine": zeros + sequences.LLAMACPP}
    about["context"] = np.array([call.context + 1 for call in calls])
    sets = row_sets(calls)
    told = np.array([REFUSED if call.refused else 0 for call in calls])[sets.step]
    columns = sequences.fed_rows(sets, told, about, whole=True).table()
    return pd.DataFrame({name: column.to_pylist() if name == "phase" else column for name, column in columns.items()})


@settings(max_examples=drawn(50), deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 6), drafts=st.booleans())
def test_phases_requests_and_kept_rows_follow_from_positions_and_output_flags(seed: int, slots: int, drafts: bool) -> None:
    plan = Plan(seed, slots, drafts=drafts)
    rows = answer_of(plan)
    assert without_kept_drafts(found(rows)) == without_kept_drafts(planned(plan.calls))
    assert owners(plan.calls, rows["request"].tolist()) == planned_owners(plan.calls)


def test_what_a_batch_leaves_out_is_the_engines_default_and_rows_that_were_not_read_are_counted(tmp_path: Path) -> None:
    w = Writer()
    for step, rows in enumerate((3000, 1, 1)):
        w.add("token_begin", engine=2, ts=10 * step, seq=2**64 - 1, n_tokens=rows, position=2**32 - 1)
        if rows > 1:
            w.add("batch_rows", engine=2, ts=1, n_rows=rows, first=0, count=16, given=1, position=np.arange(16))
        w.add("token_end", engine=2, ts=10 * step + 5, seq=2**64 - 1)
    recording = Recording(w.write(tmp_path))
    tables = tables_module.build_tables(recording)
    rows = tables["sequences"]
    assert rows[["sequence", "rows", "position", "outputs"]].to_numpy().tolist() == [[0, 16, 0, 0], [0, 1, 16, 1], [0, 1, 17, 1]]
    assert summarize(recording, tables)["tokens"]["unread_rows"] == 3000 - 16


def test_rows_that_several_sequences_share_belong_to_each(tmp_path: Path) -> None:
    shared = {"position": np.arange(16), "sequences": np.arange(16), "n_sequences": np.full(16, 3), "output": np.arange(16) == 3}
    w = Writer().add("token_begin", engine=2, ts=0, seq=2**64 - 1, n_tokens=4, position=0)
    w.add("batch_rows", engine=2, ts=1, n_rows=4, first=0, count=4, given=7, **shared)
    rows = tables_module.build_tables(Recording(w.add("token_end", engine=2, ts=5, seq=2**64 - 1).write(tmp_path)))["sequences"]
    assert rows[["sequence", "rows", "position", "outputs"]].to_numpy().tolist() == [[i, 4, 0, 1] for i in range(3)]


@pytest.mark.parametrize(("outputs", "sampled"), [(1, [250, 450]), (0, [200, 400])], ids=["before sampling", "behind it"])
def test_a_step_is_sampled_behind_its_draft_if_that_reads_the_same_rows_for_an_output(
    tmp_path: Path, outputs: int, sampled: list[int]
) -> None:
    """Prompt, draft's copy of it, two drafted tokens, verification, draft's copy of that, a last token."""
    w, steps = Writer(), [(1, 100, 0, 5, 1), (2, 210, 0, 5, outputs), (2, 260, 5, 1, 1), (2, 280, 6, 1, 1)]
    steps += [(1, 300, 5, 3, 3), (2, 410, 5, 3, outputs), (1, 500, 8, 1, 1)]
    for context, begin, position, rows, wanted in steps:
        w.add("token_begin", engine=2, ts=begin, seq=2**64 - 1, n_tokens=rows, position=position, context=context)
        given = {"position": position + np.arange(16), "output": np.arange(16) >= rows - wanted, "n_sequences": np.ones(16)}
        w.add("batch_rows", engine=2, ts=begin + 1, n_rows=rows, first=0, count=rows, given=7, **given)
        w.add("token_end", engine=2, ts=begin + (100 if context == 1 else 10 if rows == 1 else 40), seq=2**64 - 1)
    tables = tables_module.build_tables(Recording(w.write(tmp_path)))
    assert tables["sequences"]["phase"].tolist() == ["prefill", "draft", "draft", "draft", "decode", "draft", "decode"]
    (one,) = requests.request_table(tables).to_dict("records")
    assert one["ttft_ms"] == pytest.approx((sampled[0] - 100) / 1e6)
    assert one["tpot_ms"] == pytest.approx((600 - sampled[0]) / 4e6)
    assert figures.fed_sequences(tables)["end_ns"].tolist() == [*sampled, 600]


def test_a_rejected_append_of_genai_feeds_nothing(tmp_path: Path) -> None:
    w = Writer()
    for step, (phase, n, result) in enumerate([(1, 2000, -1), (1, 20, 0), (2, 1, 0), (2, 1, 0)]):
        w.add("token_begin", engine=8, ts=100 * step, seq=2**64 - 1, phase=phase, n_tokens=n, position=2**32 - 1, context=7)
        w.add("token_end", engine=8, ts=100 * step + 50, seq=2**64 - 1, result=result)
    recording = Recording(w.write(tmp_path))
    tables = tables_module.build_tables(recording)
    assert tables["tokens"]["phase"].tolist() == ["refused", "prefill", "decode", "decode"]
    answer = summarize(recording, tables)["tokens"]
    assert answer["apart"] == {"refused": 1} and answer["prefill_tokens"] == 20
    assert answer["ttft_ms"] == pytest.approx(50e-6) and answer["tpot_ms"]["mean"] == pytest.approx(100e-6)
    assert answer["prefill_tokens_per_s"] == pytest.approx(20 / 50e-9)


@dataclass
class Run:
    """A plan, and the recording of a llama.cpp that ran it."""

    plan: Plan
    folder: Path

    @property
    def tables(self) -> tables_module.LazyTables:
        return tables_module.load_tables(self.folder)


@pytest.fixture(scope="module", params=[(1, False), (2, True)], ids=["parallel sequences", "draft and target"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, (seed, drafts) = tmp_path_factory.mktemp("plan"), request.param
    write_model(folder / "model.gguf", MODEL, quantized=True)
    program = [str(ROOT / "workloads" / "programs" / "llama_batches.py"), str(folder / "model.gguf"), str(seed), str(int(drafts))]
    done = trace("run", "--no-views", "--levels", "token", "-o", str(folder / "run"), "--", sys.executable, *program)
    assert done.returncode == 0, done.stderr
    plan = Plan(seed, drafts=drafts)
    assert [bool(result) for result in last_json(done)] == [call.refused for call in plan.calls]
    return Run(plan, folder / "run")


class TestPlans:
    pytestmark = real

    def test_every_row_set_of_every_step_is_the_planned_one(self, run: Run) -> None:
        rows = run.tables["sequences"].sort_values(["token_id", "sequence"])
        assert without_kept_drafts(found(rows)) == without_kept_drafts(planned(run.plan.calls))
        assert owners(run.plan.calls, rows["request"].tolist()) == planned_owners(run.plan.calls)

    def test_a_step_has_its_rows_by_phase_and_the_longest_context(self, run: Run) -> None:
        tokens = run.tables["tokens"]
        for call, step in zip(run.plan.calls, tokens.to_dict("records"), strict=True):
            sets = {one[0]: one[1] for one in call.sets}
            counted = {phase: sum(sets[row[0]] == phase for row in call.rows) for phase in PHASES}
            assert (step["prefill_rows"], step["decode_rows"]) == (counted["prefill"], counted["decode"])
            assert step["phase"] == max(PHASES.tolist(), key=lambda phase, counted=counted: (counted[phase], phase == "prefill"))
            assert step["n_tokens"] == len(call.rows) and step["context"] == call.context
            firsts = {row[0]: row[1] for row in reversed(call.rows)}
            assert step["position"] == max(firsts.values())

    def test_requests_have_the_planned_tokens_and_the_times_of_their_steps(self, run: Run) -> None:
        rows, tokens = requests.request_table(run.tables), run.tables["tokens"]
        planned_rows = sorted(tuple(one[name] for name in COUNTED) for one in run.plan.requests)
        assert sorted(rows[list(COUNTED)].itertuples(index=False, name=None)) == planned_rows
        steps: dict[int, list[int]] = {one["request"]: [] for one in run.plan.requests}
        for step, call in enumerate(run.plan.calls):
            for _, phase, request, _ in call.sets:
                if phase in ("prefill", "decode"):
                    steps[request].append(step)
        spans = [(tokens["begin_ns"][mine[0]], tokens["end_ns"][mine[-1]]) for mine in steps.values()]
        assert sorted(zip(rows["begin_ns"], rows["end_ns"], strict=True)) == sorted(spans)

    def test_other_requests_prompts_hold_up_decode_for_the_steps_that_have_rows_of_them(self, run: Run) -> None:
        if any(call.context != TARGET for call in run.plan.calls):  # its tokens are sampled later than its steps end
            assert requests.request_table(run.tables)["held_ms"].sum() > 0
            return
        rows, tokens = run.tables["sequences"], run.tables["tokens"].set_index("token_id")
        prompts = tokens.loc[rows.loc[rows["phase"] == "prefill", "token_id"].unique()]
        for request in requests.request_table(run.tables).to_dict("records"):
            mine, held = rows[rows["request"] == request["request"]].sort_values("token_id"), 0
            for before, now, phase in zip(mine["token_id"], mine["token_id"].iloc[1:], mine["phase"].iloc[1:], strict=False):
                begin, end = tokens.loc[before, "end_ns"], tokens.loc[now, "end_ns"]
                if phase == "decode" and not tokens.loc[now, "disturbed"]:
                    met = np.minimum(prompts["end_ns"], end) - np.maximum(prompts["begin_ns"], begin)
                    held += int(met.clip(lower=0).sum())
            assert request["held_ms"] == pytest.approx(held / 1e6)

    def test_the_verb_prints_what_the_tables_have(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["time", "requests", str(run.folder), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["summary"]["count"] == len(answer["requests"]) == len(run.plan.requests)
        assert answer["summary"]["generated"] == sum(one["generated"] for one in run.plan.requests)
        assert main(["time", "requests", str(run.folder)]) == 0
        assert f"{len(run.plan.requests)} requests" in capsys.readouterr().out

    def test_refused_calls_are_counted_and_fed_nothing(self, run: Run) -> None:
        recording = Recording(run.folder)
        answer = summarize(recording, run.tables)["tokens"]
        assert answer["apart"] == {"refused": sum(call.refused for call in run.plan.calls)}
        assert answer["prefill_tokens"] == sum(one["prompt"] for one in run.plan.requests)

    def test_a_draft_is_apart_from_its_target(self, run: Run) -> None:
        answer = requests.request_summary(run.tables)["speculative"]
        drafts = [call for call in run.plan.calls if call.context != TARGET]
        if not drafts:
            assert answer == {}
            return
        totals = {name: sum(one[name] for one in run.plan.requests) for name in ("drafted", "judged", "accepted")}
        assert {name: answer[name] for name in totals} == totals
        assert answer["draft_steps"] == len(drafts)


MOST_NS = 2_000_000
"""How far TTFT and TPOT may be from the client's, less HTTP: what the server does around steps (slots, sampling, text)."""


@dataclass
class Answered:
    """A request by its client's clock (`told`), and its row of `requests` with its rows of `turns`."""

    told: dict[str, Any]
    row: dict[str, Any]
    fed: pd.DataFrame
    begin_ns: int
    """When the server could begin with it: sent, and a slot was free."""

    @property
    def first_ns(self) -> int:
        """When its first token could be sampled."""
        return int(self.row["begin_ns"] + round(self.row["ttft_ms"] * 1e6))

    @property
    def http_ns(self) -> float:
        return float(np.median([end - begin for begin, end in self.told["http_ns"]]))


@dataclass
class Served:
    """What a server and its clients measured, and the requests of its recording."""

    told: dict[str, Any]
    tables: tables_module.LazyTables
    stolen: float

    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each client's request with the recorded one: no two prompts are equally long."""
        rows = {row["prompt"]: row for row in requests.request_table(self.tables).to_dict("records")}
        assert len(rows) == len(self.told["requests"])
        return [(one, rows[one["timings"]["prompt_n"]]) for one in self.told["requests"]]

    def answered(self) -> list[Answered]:
        """All requests in order of their first steps."""
        fed, free, answer = figures.fed_sequences(self.tables), dict[int, int](), []
        for one, row in sorted(self.pairs(), key=lambda pair: pair[1]["begin_ns"]):
            begin = max(one["sent_ns"], free.get(one["id_slot"], 0))
            answer.append(Answered(one, row, fed[fed["request"] == row["request"]], begin))
            free[one["id_slot"]] = one["stop_ns"] - self.unready_ns(row["end_ns"], one["stop_ns"])
        return answer

    def unready_ns(self, begin: int, end: int, also: pd.DataFrame | None = None) -> int:
        """How much of the time between two moments a thread was ready without a CPU, or (`also`) one of these spans lasted."""
        states = self.tables["thread_states"]
        spans = pd.concat([states[states["state"] == "runnable"], also])[["begin_ns", "end_ns"]].clip(begin, end)
        spans = spans.sort_values("begin_ns").to_numpy(np.int64)
        until = np.maximum.accumulate(np.append(begin, spans[:, 1]))
        return int(np.clip(until[1:] - np.maximum(spans[:, 0], until[:-1]), 0, None).sum())


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "with a draft"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, host = tmp_path_factory.mktemp("served"), HostTime()
    write_model(folder / "model.gguf", MODEL, quantized=True, tokenizer=True)
    write_model(folder / "draft.gguf", DRAFTER, quantized=True, tokenizer=True)
    program = [str(ROOT / "workloads" / "programs" / "llama_clients.py"), str(folder / "model.gguf"), "3", "8"]
    program += [str(folder / "draft.gguf")] if request.param else []
    done = trace("run", "--no-views", "--levels", "token,sched", "-o", str(folder / "run"), "--", sys.executable, *program)
    assert done.returncode == 0, done.stderr
    return Served(json.loads(done.stdout.splitlines()[-1]), tables_module.load_tables(folder / "run"), host.share())


class TestServer:
    pytestmark = real

    def test_tokens_are_those_of_the_client_and_of_the_servers_counters(self, served: Served) -> None:
        pairs, counters = served.pairs(), served.told["metrics"]
        assert sum(row["prompt"] for _, row in pairs) == counters["prompt_tokens_total"]
        for one, row in pairs:
            given = one["tokens_predicted"]
            assert given == len(one["chunk_ns"])
            assert row["generated"] <= given <= row["generated"] + row["drafted"] - row["judged"]
            assert row["cached"] == 0 and row["sequence"] == one["id_slot"]

    def test_drafted_and_accepted_tokens_of_each_request_are_the_servers(self, served: Served) -> None:
        pairs, counters = served.pairs(), served.told["metrics"]
        assert sum(row["drafted"] for _, row in pairs) == counters["spec_decode_num_draft_tokens_total"]
        assert sum(row["checks"] for _, row in pairs) == counters["spec_decode_num_drafts_total"]
        for one, row in pairs:
            in_last_check = one["tokens_predicted"] - row["generated"]  # no later row shows how many it accepted
            assert row["drafted"] == one["timings"].get("draft_n", 0)
            assert row["accepted"] + in_last_check == one["timings"].get("draft_n_accepted", 0)
        if counters["spec_decode_num_draft_tokens_total"]:
            about = requests.request_summary(served.tables)["speculative"]
            sums = {name: sum(row[name] for _, row in pairs) for name in ("checks", "drafted", "judged", "accepted")}
            assert {name: about[name] for name in sums} == sums
            assert 0.2 < about["acceptance"] == sums["accepted"] / sums["judged"] < 0.9

    def test_steps_are_those_that_the_server_counts(self, served: Served) -> None:
        counted = served.tables["tokens"]["phase"].isin(("prefill", "decode")).sum()
        assert counted == served.told["metrics"]["n_decode_total"]
        assert 1 < requests.request_summary(served.tables)["concurrency"]["most"] <= 3

    def test_the_client_sees_each_token_after_the_end_of_its_step(self, served: Served) -> None:
        for one in served.answered():
            tokens = np.where(one.fed["phase"] == "prefill", one.fed["outputs"], one.fed["kept"].clip(lower=1))
            given = one.fed["end_ns"].repeat(tokens).tolist()
            assert all(end <= seen for end, seen in zip(given, one.told["chunk_ns"], strict=False))
            assert one.told["sent_ns"] <= one.row["begin_ns"]

    @pytest.mark.long
    def test_ttft_is_the_clients_less_http_and_its_wait_for_others(self, served: Served) -> None:
        """Each request's; from its first step on it is the server's own, too."""
        skip_where_stolen(served.stolen)
        steps = served.tables["tokens"]
        for one in served.answered():
            chunk = one.told["chunk_ns"][0]
            others = steps[steps["end_ns"] <= one.row["begin_ns"]]
            waited = served.unready_ns(one.begin_ns, one.row["begin_ns"], others) + served.unready_ns(one.first_ns, chunk)
            of_client = chunk - one.begin_ns - waited
            assert abs(of_client - one.http_ns - one.row["ttft_ms"] * 1e6) < MOST_NS
            around = served.unready_ns(one.begin_ns, one.row["begin_ns"]) + served.unready_ns(one.first_ns, chunk)
            assert 0 <= one.told["timings"]["prompt_ms"] * 1e6 - one.row["ttft_ms"] * 1e6 < MOST_NS + around

    @pytest.mark.long
    def test_tpot_is_the_clients(self, served: Served) -> None:
        """Up to each request's last verification, of which nothing shows how many tokens it gave."""
        skip_where_stolen(served.stolen)
        for one in served.answered():
            last = one.fed[one.fed["itl_ms"].notna()]
            tokens, chunks = int(last["kept"].sum()), one.told["chunk_ns"]
            seen = [
                chunk - served.unready_ns(end, chunk)
                for end, chunk in ((one.first_ns, chunks[0]), (int(last["end_ns"].iloc[-1]), chunks[tokens]))
            ]
            assert abs((seen[1] - seen[0]) / tokens - one.row["tpot_ms"] * 1e6) < MOST_NS
