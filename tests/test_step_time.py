"""The time of steps: every moment has one part and one cause, planted causes are found, and both add up to the step."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.questions import accelerators, requests, step_time
from analyzer.questions.causes import CAUSES
from analyzer.questions.deciders import waker_of
from analyzer.questions.findings import findings
from analyzer.records.intervals import Intervals, by_precedence, merge_intervals
from analyzer.records.schema import TABLES, empty_table
from analyzer.tables import store
from moescope.__main__ import main
from tests.test_analyzer_qnn import Program
from tests.test_analyzer_tables import llama
from tests.test_analyzer_waiting import SPANS, intervals, moments, step
from tracer.recording.format import Recording, kinds_of
from workloads.recordings import Writer, runtime
from workloads.tables_fixture import MAIN, PID, WORKER, frame, make_tables

AT, LENGTH = 10_000, 1_000
Span = tuple[int, int]


def spans(*ends: Span, tid: int = MAIN) -> dict[str, object]:
    """Span columns of rows on a thread; moments count from the token's begin."""
    begin, end = (np.array(side, np.int64) + AT for side in zip(*ends, strict=True))
    return {"engine": "llamacpp", "pid": PID, "tid": tid, "token_id": 0, "begin_ns": begin, "end_ns": end}


def states(*rows: tuple[str, int, int], tid: int = MAIN) -> pd.DataFrame:
    """thread_states of one thread."""
    names, begin, end = zip(*rows, strict=True)
    ends = np.array(begin) + AT, np.array(end) + AT
    return frame("thread_states", tid=tid, pid=PID, state=list(names), begin_ns=ends[0], end_ns=ends[1])


def shares(*ends: Span) -> pd.DataFrame:
    """op_threads of operators on the step's thread, which wait for nobody."""
    begin, end = (np.array(side) + AT for side in zip(*ends, strict=True))
    return frame("op_threads", op_id=list(range(len(ends))), tid=MAIN, begin_ns=begin, wait_ns=end, end_ns=end)


def token(**tables: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """A recording of one decode step of 1000 ns on MAIN."""
    one = frame("tokens", phase="decode", position=[7], **spans((0, LENGTH)))
    return {**{name: empty_table(name) for name in TABLES}, "tokens": one, **tables}


def times(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The table `time`; that its pieces tile each step is checked."""
    rows = step_time.step_time(tables)
    inside = rows["token_id"].eq(rows["token_id"].shift())
    assert (rows["begin_ns"][inside] == rows["end_ns"].shift()[inside]).all() and (rows["duration_ns"] > 0).all()
    of_step, tokens = rows.groupby("token_id"), tables["tokens"]
    assert of_step["begin_ns"].min().tolist() == tokens["begin_ns"].tolist()
    assert of_step["end_ns"].max().tolist() == tokens["end_ns"].tolist()
    return rows


def causes(tables: dict[str, pd.DataFrame], length: int = LENGTH) -> dict[str, int]:
    """ns of each cause that occurs; computing is "operators", or "host code" outside of them. The sum is checked."""
    rows = times(tables)
    assert rows["duration_ns"].sum() == length
    computing = np.where(rows["part"] == "host code", "host code", "operators")
    name = np.where(rows["cause"] == "computing", computing, rows["cause"].astype(object))
    return {str(key): int(ns) for key, ns in rows["duration_ns"].groupby(name).sum().items()}


def by_step(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """ns of each of CAUSES by step; that they add up to each step is checked."""
    rows = step_time.per_step(tables, times(tables), "cause").reindex(columns=list(CAUSES), fill_value=0)
    assert rows.sum(axis=1).tolist() == tables["tokens"]["duration_ns"].tolist()
    return rows


def parts(tables: dict[str, pd.DataFrame]) -> dict[str, int]:
    """ns of each part that occurs."""
    rows = times(tables)
    return {str(part): int(ns) for part, ns in rows["duration_ns"].groupby(rows["part"].astype(str)).sum().items()}


RUNNING = states(("running", -100, 2000))


def test_without_any_record_all_is_residual_and_without_operators_the_host_runs():
    assert causes(token()) == {"residual": 1000}
    assert causes(token(thread_states=RUNNING)) == {"host code": 1000}
    assert causes(token(thread_states=states(("running", 0, 400), ("stopped", 400, 900)))) == {
        "host code": 400,
        "stopped": 500,
        "residual": 100,
    }


def stopped(by: int) -> dict[str, pd.DataFrame]:
    """A step of MAIN in which it loads an expert and stops, until thread `by` wakes it up; then it lacks a CPU."""
    return {
        "thread_states": states(("running", 0, 300), ("stopped", 300, 700), ("runnable", 700, 800), ("running", 800, 1000)),
        "loads": frame("loads", action="load", **spans((200, 500))),
        "sched": frame("sched", ts_ns=[700 + AT], event="waking", prev_tid=by, next_tid=MAIN, cpu=0, target_cpu=0),
        "threads": frame("threads", tid=[MAIN, WORKER, 70], pid=[PID, PID, 69], name="the tracer", target=[True, True, False]),
    }


def test_a_stop_that_the_tracer_ends_is_tracing_itself_and_any_other_one_is_told_as_a_stop():
    rest = {"host code": 400, "expert load": 100, "run queue": 100}
    assert causes(token(**stopped(by=70))) == rest | {"tracing itself": 400}
    for other in (71, WORKER, 0):
        assert causes(token(**stopped(by=other))) == rest | {"stopped": 400}


def test_without_scheduling_operators_compute_also_those_that_move_data():
    rows = frame("operators", op_id=[0, 1], layer=[3, 3], type=["CPY", "MUL_MAT"], **spans((100, 300), (300, 700)))
    tables = token(operators=rows, op_threads=shares((100, 300), (300, 700)))
    assert causes(tables) == {"operators": 600, "residual": 400}
    assert parts(tables) == {"copy": 200, "other operators": 400, "host code": 400}


def test_a_thread_without_a_cpu_waits_in_the_run_queue_whatever_it_was_about_to_do():
    tables = token(
        operators=frame("operators", op_id=[0], graph_id=-1, layer=0, **spans((100, 600))),
        op_threads=shares((100, 600)),
        thread_states=states(("running", 0, 200), ("runnable", 200, 500), ("running", 500, 1000)),
    )
    assert causes(tables) == {"operators": 200, "host code": 500, "run queue": 300}


def test_faults_and_reads_of_the_step_are_taken_out_of_operators_and_loads_take_their_own():
    tables = token(
        op_threads=shares((0, 600)),
        operators=frame("operators", op_id=[0], graph_id=-1, layer=0, **spans((0, 600))),
        faults=frame("faults", kind="major", **spans((100, 150))),
        reads=frame("reads", **spans((200, 230), (700, 720))),
        loads=frame("loads", action="load", **spans((650, 800))),
        thread_states=RUNNING,
    )
    assert causes(tables) == {"operators": 520, "disk and faults": 80, "expert load": 150, "host code": 250}


def execution(tid: int = MAIN, **told: float) -> pd.DataFrame:
    """An execution from 300 to 700."""
    return frame("qnn_executes", execute_id=[0], graph_id=-1, asynchronous=False, **told, **spans((300, 700), tid=tid))


def test_an_execution_is_cut_by_its_profile_and_the_rest_is_rpc():
    asleep = states(("running", 0, 310), ("sleeping", 310, 690), ("running", 690, 1000))
    told = execution(queue_us=0.05, accel_us=0.25)
    assert causes(token(qnn_executes=told, thread_states=asleep)) == {
        "host code": 600,
        "queue": 50,
        "accelerator": 250,
        "transport": 100,
    }
    assert causes(token(qnn_executes=execution(), thread_states=asleep)) == {"host code": 600, "accelerator": 400}


def test_a_slow_wake_up_behind_an_execution_is_its_completion_and_a_displaced_thread_stands_in_the_queue():
    late = states(("running", 0, 310), ("sleeping", 310, 600), ("runnable", 600, 690), ("running", 690, 1000))
    assert causes(token(qnn_executes=execution(), thread_states=late)) == {
        "host code": 600,
        "accelerator": 310,
        "completion": 90,
    }
    displaced = states(("running", 0, 310), ("runnable", 310, 500), ("running", 500, 1000))
    another = states(("sleeping", 0, 310), tid=WORKER)  # whose sleep ends at the same time
    for every in ([displaced], [another, displaced], [displaced, another]):
        tables = token(qnn_executes=execution(), thread_states=pd.concat(every, ignore_index=True))
        assert causes(tables)["run queue"] == 190


def test_a_batch_that_is_done_before_its_answer_is_asked_for_leaves_the_rest_of_the_wait_to_others():
    late = states(("running", 0, 500), ("sleeping", 500, 620), ("runnable", 620, 690), ("running", 690, 1000))
    batch = {"queue": 1, "submit_ns": 20, **spans((300, 700))}
    told = frame("npu_batches", batch_id=[0], wait_ns=[220], npu_us=[0.25], layout=3, **batch)
    answer = causes(token(npu_batches=told, thread_states=late))
    assert answer == {"host code": 760, "submission": 20, "accelerator": 90, "transport": 60, "completion": 70}
    first = frame(
        "npu_batches", batch_id=[0, 1], wait_ns=[-1, 220], npu_us=[0.2, 0.25], layout=3, **batch | spans((200, 700), (300, 700))
    )
    behind = causes(token(npu_batches=first, thread_states=late))
    assert behind["accelerator"] == 190  # from 420, when the NPU is done with the batch before it


def test_an_execution_of_another_thread_counts_while_the_steps_own_sleeps():
    own = states(("running", 0, 400), ("sleeping", 400, 1000))
    tables = token(qnn_executes=execution(WORKER, accel_us=0.4), thread_states=own)
    assert causes(tables) == {"host code": 400, "accelerator": 300, "asleep": 300}
    of_no_step = execution().assign(asynchronous=True, returned_ns=AT + 320, token_id=-1)
    assert causes(token(qnn_executes=of_no_step, thread_states=own)) == {"host code": 400, "asleep": 600}


def graph(backend: str, begin: int, end: int) -> pd.DataFrame:
    """A graph without a layer of its own."""
    return frame("graphs", graph_id=[0], backend=backend, **spans((begin, end)))


def test_a_graph_of_an_accelerator_is_submitted_waited_for_and_completed():
    asleep = states(("running", 0, 300), ("sleeping", 300, 500), ("runnable", 500, 520), ("running", 520, 1000))
    tables = token(graphs=graph("vulkan", 100, 600), thread_states=asleep)
    assert causes(tables) == {"host code": 500, "submission": 280, "accelerator": 200, "completion": 20}
    inside = token(graphs=graph("htp", 200, 800), qnn_executes=execution(), thread_states=RUNNING)
    assert causes(inside) == {"host code": 400, "submission": 100, "accelerator": 400, "completion": 100}


def split(layers: list[int]) -> dict[str, pd.DataFrame]:
    """Operators of these layers: the first and the last on an accelerator, the second on the CPU."""
    ends = [(100, 200), (300, 700), (810, 850)]
    graphs = spans((50, 250), (280, 720), (800, 900))
    return {
        "graphs": frame("graphs", graph_id=[0, 1, 2], backend=["vulkan", "cpu", "vulkan"], kind="ggml", **graphs),
        "operators": frame("operators", op_id=[0, 1, 2], graph_id=[0, 1, 2], layer=layers, type="MUL_MAT", **spans(*ends)),
        "op_threads": shares(*ends),
        "thread_states": RUNNING,
    }


def test_what_the_cpu_computes_amid_a_layer_of_the_accelerator_is_fallback():
    for layers, fell in (([3, 3, 3], [False, True, False]), ([3, 4, 4], [False, False, False])):
        tables = token(**split(layers))
        assert causes(tables) == {"submission": 300, "operators": 400, "host code": 300}
        assert accelerators.fallen_back(tables).tolist() == fell


def beside(*rows: tuple[str, str, int, int]) -> dict[str, pd.DataFrame]:
    """Graphs of kinds and backends, with the step's thread running but for 950 to 1100."""
    kind, backend, begin, end = zip(*rows, strict=True)
    named = {"graph_id": list(range(len(rows))), "kind": list(kind), "backend": list(backend)}
    asleep = states(("running", 0, 950), ("sleeping", 950, 1100), ("runnable", 1100, 1130), ("running", 1130, 2000))
    return {"graphs": frame("graphs", **named, **spans(*zip(begin, end, strict=True))), "thread_states": asleep}


def test_the_wait_for_what_a_step_submitted_is_the_accelerators_and_copies_stand_alone():
    tables = token(**beside(("copy", "", 50, 90), ("ggml", "vulkan", 100, 300), ("wait", "vulkan", 940, 1150)))
    tables["tokens"] = frame("tokens", phase="decode", position=[7], **spans((0, LENGTH + 150)))
    spent = {"host code": 700, "submission": 200, "transport": 40, "accelerator": 180, "completion": 30}
    assert causes(tables, LENGTH + 150) == spent
    assert parts(tables) == {"host code": 700, "copy": 40, "offloaded graph": 410}
    (given,) = accelerators.submissions(tables).to_dict("records")
    assert [given[name] - AT for name in ("begin_ns", "submitted_ns", "wait_ns", "done_ns")] == [100, 300, 940, 1150]
    won = accelerators.accelerator_saving(tables, step_time.step_time(tables), 0.5)
    assert won["works_ms"] == pytest.approx(0.00105) and won["won_ms"] == won["waited_ms"] == pytest.approx(0.00018)


def test_a_faster_accelerator_wins_no_more_than_was_waited_for():
    asleep = states(("running", 0, 310), ("sleeping", 310, 690), ("running", 690, 1000))
    alone = token(qnn_executes=execution(accel_us=0.4), thread_states=asleep)
    won = accelerators.accelerator_saving(alone, step_time.step_time(alone), 0.1)
    assert won["works_ms"] == won["waited_ms"] == pytest.approx(0.0004) and won["won_ms"] == pytest.approx(0.00004)
    assert won["won_share"] == pytest.approx(0.04)
    busy = states(("running", 0, 690), ("sleeping", 690, 1000))
    covered = token(qnn_executes=execution(WORKER, accel_us=0.4), thread_states=busy)
    hidden = accelerators.accelerator_saving(covered, step_time.step_time(covered), 0.1)
    assert hidden["waited_ms"] == hidden["won_ms"] == pytest.approx(0.00001)
    assert accelerators.accelerator_saving(token(), step_time.step_time(token())) == {}


def test_parts_and_causes_of_a_recorded_step_add_up_to_it(tmp_path):
    tables = step(tmp_path, 3)
    answer = step_time.time_summary(tables, step_time.step_time(tables))
    decode = answer["phases"]["decode"]
    ns = {f"{cell['part']}: {cell['cause']}": round(cell["ms"] * 1e6, 6) for cell in decode["cells"]}
    assert ns == {
        "experts: computing": 300,
        "host code: computing": 270,
        "attention: computing": 200,
        "expert load: expert load": 100,
        "host code: asleep": 80,
        "host code: run queue": 50,
    }
    assert decode["steps"] == 3 and decode["ms"] == pytest.approx(0.001) and answer["run"]["ms"] == pytest.approx(0.003)
    for by in ("part_ms", "cause_ms"):
        assert sum(decode[by].values()) == pytest.approx(decode["ms"])


@given(SPANS, st.lists(SPANS, max_size=4))
def test_the_first_cause_that_covers_a_moment_has_it(some, layers):
    windows = merge_intervals(intervals(some))
    every, names = by_precedence(windows, [(str(i), intervals(rows)) for i, rows in enumerate(layers)], "rest")
    taken = np.asarray(names != "rest")
    pieces, names, left = every.where(taken), names[taken], every.where(~taken)
    seen = {m: name for i, name in enumerate(names) for m in moments(pieces.where(np.arange(len(pieces)) == i))}
    expected = {}
    for i, rows in reversed(list(enumerate(layers))):
        expected |= {m: str(i) for m in moments(intervals(rows)) if m in set(moments(windows))}
    assert seen == expected and len(moments(pieces)) == len(seen)
    assert moments(left) == [m for m in moments(windows) if m not in expected]


@pytest.mark.parametrize(("lasting", "lacking"), [(20_000, 0), (20_001, 20_001)])
def test_a_thread_lacks_a_cpu_once_it_stands_in_a_run_queue_for_longer_than_a_switch_takes(lasting, lacking):
    woken, queued = 300, 350
    run = queued + lasting
    slept = states(("running", 0, 100), ("sleeping", 100, woken), ("runnable", woken, run), ("running", run, run + 10))
    moments = [woken + AT, queued + AT, run + AT]
    events = {
        "event": ["waking", "wakeup", "switch"],
        "next_tid": MAIN,
        "prev_tid": [7, 7, 8],
        "target_cpu": [0, 0, -1],
        "cpu": 0,
    }
    one = frame("tokens", phase="decode", position=[7], **spans((0, run + 10)))
    tables = token(thread_states=slept, sched=frame("sched", ts_ns=moments, **events)) | {"tokens": one}
    spent = causes(tables, run + 10)
    assert spent.get("run queue", 0) == lacking and spent["asleep"] == run - 100 - lacking


def test_threads_that_are_woken_in_the_same_moment_have_their_own_wakers():
    sched = frame("sched", event="waking", ts_ns=[500, 500, 500], next_tid=[1, 2, 3], prev_tid=[7, 8, 9])
    ended = Intervals(np.array([3, 1, 4]), np.array([0, 0, 0]), np.array([500, 500, 500]))
    assert waker_of(sched, ended).tolist() == [9, 7, -1]


def test_pieces_tile_their_steps_and_neighbours_differ():
    _, tables = make_tables()
    pieces = times(tables)
    tokens = tables["tokens"].set_index("token_id")
    assert (pieces.groupby("token_id")["duration_ns"].sum() == tokens["duration_ns"]).all()
    named = ["token_id", "tid", "op_id", "load_id", "part", "cause"]
    assert (pieces[named].astype(str) != pieces[named].astype(str).shift()).any(axis=1).all()


def test_json_has_every_piece_of_a_step(tmp_path, capsys):
    step(tmp_path, 3)
    assert main(["time", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["run"]["ms"] == pytest.approx(0.003) and answer["accelerator"] == {}
    assert answer["span_ms"]["total"] == pytest.approx(0.005) and answer["span_ms"]["between steps"] == pytest.approx(0.002)
    assert main(["time", str(tmp_path), "--step", "1", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["run"]["ms"] == pytest.approx(0.001) and sum(row["duration_ns"] for row in one["pieces"]) == 1000
    assert main(["time", str(tmp_path), "--step", "3"]) == 2


def test_the_saving_of_a_fallback_is_what_the_accelerator_would_not_take_and_one_submission_less():
    tables = token(**split([3, 3, 3]))
    tables["operators"] = tables["operators"].assign(shape="64x1")
    (unknown,) = (found for found in findings(tables) if found.rule == "fallback")
    assert unknown.saving_ms == pytest.approx(550e-6) and unknown.evidence["untimed"] == 1
    equal = frame("npu_operators", type=["MUL_MAT"] * 3, shape="64x1", us=[0, 0, -1])
    (known,) = (found for found in findings(tables | {"npu_operators": equal}) if found.rule == "fallback")
    assert known.saving_ms == pytest.approx(550e-6) and known.evidence["untimed"] == 0
    slow = frame("npu_operators", type=["MUL_MAT"], shape="64x1", us=[1])
    assert not [found for found in findings(tables | {"npu_operators": slow}) if found.rule == "fallback"]
    other = frame("npu_operators", type=["MUL_MAT"], shape="8x1", us=[1])
    assert [found.saving_ms for found in findings(tables | {"npu_operators": other}) if found.rule == "fallback"] == [
        pytest.approx(550e-6)
    ]


def test_what_the_cpu_computes_between_batches_of_a_layer_is_fallback():
    tables = token(**split([3, 3, 3]))
    on_cpu = tables["operators"].iloc[[1]].reset_index(drop=True).assign(op_id=0)
    batches = frame("npu_batches", batch_id=[0, 1], **spans((50, 250), (800, 900)))
    given = frame("npu_operators", batch_id=[0, 1], token_id=0, layer=[3, 3], type="MUL_MAT", shape="8x1", us=10)
    queued = tables | {"operators": on_cpu, "op_threads": shares((300, 700)), "npu_batches": batches, "npu_operators": given}
    assert accelerators.fallen_back(queued).tolist() == [True]
    (found,) = (each for each in findings(queued) if each.rule == "fallback")
    assert found.saving_ms == pytest.approx(400e-6 + 300e-6 / 4)  # of four submissions one less
    assert found.evidence["operators"] == found.evidence["untimed"] == 1
    elsewhere = queued | {"npu_operators": given.assign(layer=[3, 4])}
    assert accelerators.fallen_back(elsewhere).tolist() == [False]


def test_a_wait_for_a_page_that_is_being_read_ahead_is_the_disks_though_its_fault_is_minor():
    read = frame("faults", kind=["major", "minor", "minor"], op_id=0, **spans((110, 150), (200, 300), (350, 352)))
    waits = states(
        ("running", 0, 120), ("waiting", 120, 140), ("running", 140, 210), ("waiting", 210, 290), ("running", 290, 1000)
    )
    operators = frame("operators", op_id=[0], layer=[3], type="MUL_MAT", **spans((100, 900)))
    tables = token(faults=read, thread_states=waits, operators=operators, op_threads=shares((100, 900)))
    assert causes(tables) == {"disk and faults": 40 + 80, "operators": 680, "host code": 200}
    (found,) = (each for each in findings(tables) if each.rule == "disk")
    assert found.saving_ms == pytest.approx(120e-6) and found.evidence["faults"] == 2


def test_sleep_behind_a_submission_is_not_the_threads_own():
    asleep = states(("running", 0, 310), ("sleeping", 310, 690), ("running", 690, 1000))
    batch = frame("npu_batches", batch_id=[0], wait_ns=[400], npu_us=[0.3], layout=3, **spans((300, 700)))
    assert not [found for found in findings(token(npu_batches=batch, thread_states=asleep)) if found.rule == "asleep"]
    (alone,) = (found for found in findings(token(thread_states=asleep)) if found.rule == "asleep")
    assert alone.saving_ms == pytest.approx(380e-6)


def found(rule: str, tables: dict[str, pd.DataFrame]) -> list[tuple[float, dict]]:
    """(ns to win, evidence) of a rule's findings."""
    return [(round(each.saving_ms * 1e6), each.evidence) for each in findings(tables) if each.rule == rule]


def test_what_many_submissions_cost_is_found_and_grows_with_their_number():
    def batches(*ends: Span) -> dict[str, pd.DataFrame]:
        row = {"graph_id": list(range(len(ends))), "kind": "ggml", "backend": "vulkan"}
        return token(graphs=frame("graphs", **row, **spans(*ends)), thread_states=RUNNING)

    one = found("submissions", batches((100, 130)))
    assert [ns for ns, _ in one] == [30] and one[0][1] == {"submissions": 1, "us_each": pytest.approx(0.03)}
    many = found("submissions", batches(*((100 + 80 * i, 130 + 80 * i) for i in range(10))))
    assert [ns for ns, _ in many] == [300] and many[0][1] == {"submissions": 10, "us_each": pytest.approx(0.03)}
    assert found("submissions", token(thread_states=RUNNING)) == []


def test_an_accelerator_that_idles_while_the_engines_code_prepares_is_found_with_that_time():
    tables = token(qnn_executes=execution(accel_us=0.4), thread_states=RUNNING)
    prepared = causes(tables)["host code"]
    assert [ns for ns, _ in found("starved", tables)] == [prepared] and prepared > 300
    assert found("starved", token(thread_states=RUNNING)) == []


def test_a_thread_that_spins_for_the_accelerator_is_found_with_the_time_that_it_spun():
    spins = found("spinning", token(qnn_executes=execution(accel_us=0.4), thread_states=RUNNING))
    assert [ns for ns, _ in spins] == [400]
    asleep = states(("running", 0, 310), ("sleeping", 310, 690), ("running", 690, 1000))
    assert [ns for ns, _ in found("spinning", token(qnn_executes=execution(accel_us=0.4), thread_states=asleep))] == [20]
    assert found("spinning", token(thread_states=RUNNING)) == []


def older(writer: Writer, folder: Path) -> Recording:
    """A recording of a release that knew the kinds of these records alone, and none that came since."""
    writer.write(folder)
    recording = Recording(folder)
    used = {kind for stream in writer.slots.values() for slots in stream for kind in kinds_of(slots).tolist()}
    layouts = {name: row for name, row in recording.manifest["layouts"].items() if row["kind"] in used}
    (folder / "manifest.json").write_text(json.dumps({**recording.manifest, "layouts": layouts}))
    return Recording(folder)


def of_qnn() -> Writer:
    """Two executions and their profile, within a step."""
    program = Program()
    program.w.add("token_begin", engine=3, ts=program.tick(), seq=0, phase=2, n_tokens=1)
    for graph in (1, 2):
        program.execute(graph, 5)
    program.harvest(5, [(400, 7, [(404, 3, [])])], (0, -1))
    program.w.add("token_end", engine=3, ts=program.tick(), seq=0)
    return program.w


@pytest.mark.parametrize("make", [llama, runtime, of_qnn])
def test_an_older_recording_gives_the_tables_that_it_gave_and_times_besides(tmp_path: Path, make: Callable[[], Writer]) -> None:
    now = store.build_tables(Recording(make().write(tmp_path / "now")))
    then = store.build_tables(older(make(), tmp_path / "then"))
    assert then.keys() == now.keys()
    for name in now:
        pd.testing.assert_frame_equal(then[name], now[name])
    spent = times(then).groupby("token_id")["duration_ns"].sum()
    assert len(spent) and (spent == then["tokens"].set_index("token_id")["duration_ns"]).all()


def test_tpot_outside_its_step_is_told_by_other_steps_and_by_what_the_thread_did():
    ends = ((0, 100), (200, 312), (320, 400), (420, 500))
    steps = spans(*ends) | {"token_id": [0, 1, 2, 3], "context": [0, 0, 1, 0]}
    tables = token(
        tokens=frame("tokens", phase=["prefill", "decode", "draft", "decode"], n_tokens=[4, 1, 2, 1], **steps),
        thread_states=states(("running", 0, 110), ("sleeping", 110, 150), ("runnable", 150, 170), ("running", 170, 410)),
    )
    told = requests.between_tokens_ms(tables)
    ns = {"draft steps": 80, "computing": 10 + 30 + 8 + 10, "asleep": 40, "run queue": 20, "between steps": 10}
    assert told == pytest.approx({name: spent / 2e6 for name, spent in ns.items()}) and next(iter(told)) == "draft steps"
    assert requests.between_tokens_ms(token(tokens=frame("tokens", phase="prefill", **spans((0, 9))))) == {}


def test_only_loads_are_expert_loads_and_only_waits_for_executions_are_the_accelerators():
    loads = frame("loads", load_id=[0, 1], action=["load", "evict"], **spans((100, 200), (300, 400)))
    assert causes(token(loads=loads, thread_states=RUNNING)) == {"expert load": 100, "host code": 900}
    returned = execution().assign(asynchronous=True, returned_ns=AT + 320)
    assert causes(token(qnn_executes=returned, thread_states=RUNNING)) == {"submission": 20, "host code": 980}


def test_a_submission_waits_in_its_own_process_and_from_its_end_on():
    rows = {"graph_id": [0, 1, 2], "kind": ["", "wait", "wait"], "backend": "vulkan", "pid": [PID, PID + 1, PID]}
    graphs = frame("graphs", **(spans((100, 300), (300, 310), (300, 400)) | rows))
    given = accelerators.submissions(token(graphs=graphs)).iloc[0]
    assert [given[name] - AT for name in ("submitted_ns", "wait_ns", "done_ns")] == [300, 300, 400]
    both = {"batch_id": [0, 1], "queue": 1, "pid": [PID, PID + 1], "submit_ns": 10, "npu_us": [0.2, 0.1], "wait_ns": 5}
    batches = frame("npu_batches", **(spans((120, 300), (100, 300)) | both))
    assert (accelerators.batch_executions({"npu_batches": batches})["worked_ns"] - AT).tolist() == [130, 110]


def test_incomplete_steps_are_left_out_and_steps_at_the_same_time_are_told():
    ends, threads = ((0, 500), (300, 800), (900, 1000)), {"token_id": [0, 1, 2], "tid": [MAIN, WORKER, MAIN]}
    steps = frame("tokens", phase="decode", **(spans(*ends) | threads)).assign(complete=[True, False, True])
    assert step_time.counted_steps(token(tokens=steps))["token_id"].tolist() == [0, 2]
    run = step_time.whole_run(token(tokens=steps))
    expected = {"total": 1000, "decode": 1100, "between steps": 100, "concurrent": 200}
    assert {name: round(ms * 1e6) for name, ms in run.items()} == expected


def test_another_thread_that_works_for_the_step_decides_while_the_own_one_sleeps():
    share = frame("op_threads", op_id=[0], tid=WORKER, begin_ns=[AT + 350], wait_ns=[AT + 600], end_ns=[AT + 600])
    own = states(("running", 0, 300), ("sleeping", 300, 700), ("running", 700, 1000))
    tables = token(
        operators=frame("operators", op_id=[0], name="ffn_gate-0", **spans((350, 600), tid=WORKER)),
        op_threads=share,
        thread_states=pd.concat([own, states(("running", 0, 1000), tid=WORKER)], ignore_index=True),
    )
    assert causes(tables) == {"host code": 600, "operators": 250, "asleep": 150}


def test_the_last_thread_to_arrive_at_a_barrier_decides():
    ends = {"begin_ns": AT + 100, "wait_ns": [AT + 200, AT + 500], "end_ns": AT + 500}
    late = states(("running", 0, 200), ("runnable", 200, 400), ("running", 400, 1000), tid=WORKER)
    tables = token(
        operators=frame("operators", op_id=[0], name="ffn_gate-0", n_threads=2, **spans((100, 500))),
        op_threads=frame("op_threads", op_id=0, tid=[MAIN, WORKER], **ends),
        thread_states=pd.concat([RUNNING, late], ignore_index=True),
    )
    assert causes(tables) == {"host code": 600, "operators": 100, "run queue": 200, "lock or other thread": 100}


@pytest.mark.parametrize(("waker", "cause"), [(WORKER, "expert load"), (WORKER + 1, "lock or other thread")])
def test_a_load_of_another_thread_decides_if_no_third_one_ends_the_sleep(waker: int, cause: str):
    own = states(("running", 0, 300), ("sleeping", 300, 700), ("running", 700, 1000))
    tids = [MAIN, WORKER, WORKER + 1]
    tables = token(
        loads=frame("loads", load_id=[0], action="load", **spans((300, 700), tid=WORKER)),
        thread_states=pd.concat([own, *(states(("running", 0, 1000), tid=tid) for tid in tids[1:])], ignore_index=True),
        sched=frame("sched", ts_ns=[AT + 700], event="waking", prev_tid=waker, next_tid=MAIN, cpu=0, target_cpu=0),
        threads=frame("threads", tid=tids, pid=PID, name="python", target=True),
    )
    assert causes(tables) == {"host code": 600, cause: 400}


def test_disturbed_steps_count_only_in_phases_without_others():
    ends = spans((0, 100), (200, 300), (400, 500)) | {"token_id": [0, 1, 2]}
    steps = frame("tokens", phase=["prefill", "decode", "decode"], **ends).assign(disturbed=[True, True, False])
    assert step_time.counted_steps(token(tokens=steps))["token_id"].tolist() == [0, 2]
