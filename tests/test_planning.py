"""The planner's pipe: a recorder without a plan file records what a planner answers, and lives without one that fails."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analyzer.tables import store
from tests.conftest import RECORDER, ROOT, trace
from tests.test_recorder import SITES, STEPS, facts, llama
from tracer.engines import choose_engines
from tracer.errors import FAILED
from tracer.kernel.plan_file import FileRoot
from tracer.planning.answers import Answers, Message
from tracer.planning.loops import KeptLoops
from tracer.probes.functions import step_function
from tracer.probes.learning import LearntLoop
from tracer.probes.planner import Planner
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "recorder")
LEVELS = {"token", "graph", "operator", "expert"}
Reply = Callable[[Message], str | None]


def record(folder: Path, command: list[str], reply: Reply) -> subprocess.CompletedProcess[str]:
    """A recording by a recorder whose lines `reply` answers; None ends the pipe."""
    questions, out = os.pipe()
    into, answers = os.pipe()
    words = [str(RECORDER), "--planner", f"{out},{into}", "-o", str(folder), "--", *command]
    with subprocess.Popen(words, pass_fds=(out, into), cwd=ROOT, stdout=-1, stderr=-1, text=True) as recorder:
        os.close(out)
        os.close(into)
        with open(questions) as asked, open(answers, "w", buffering=1) as told:
            for line in asked:
                answer = reply(json.loads(line))
                if answer is None:
                    break
                told.write(answer)
        printed, said = recorder.communicate(timeout=60)
    return subprocess.CompletedProcess(words, recorder.returncode, printed, said)


class Told:
    """A planner; `after` so many answers it says something else, or ends."""

    def __init__(self, loops: list[LearntLoop], after: int = 1 << 30, then: str | None = None):
        self.loops, self.learnt, self.after, self.then = loops, list[LearntLoop](), after, then
        self.kept = KeptLoops(Path(os.environ["MOESCOPE_CACHE"]) / "loops")
        self.asked: list[Message] = []

    def learn(self, loop: LearntLoop) -> None:
        self.learnt.append(loop)
        self.kept.keep(loop)

    def __call__(self, message: Message) -> str | None:
        if "machine" in message:
            planner = Planner(choose_engines(["auto"]), LEVELS, [], lambda: bool(message["machine"]["fast_nop"]), everywhere=True)
            self.answers = Answers(planner, FileRoot("", message["machine"]["arch"]), self.loops, self.learn)
            return json.dumps(self.answers.plan()) + "\n"
        self.asked.append(message)
        if len(self.asked) > self.after:
            return self.then
        answer = {"answer": message["ask"]} if "end" in message else self.answers.answer(message)
        return json.dumps(answer) + "\n" if answer else ""


def test_a_planner_at_the_pipe_gives_the_same_tables_while_a_loop_is_learnt_and_once_it_is_known(tmp_path: Path) -> None:
    command, library = llama(tmp_path)
    command = ["env", f"LLAMA_LEARNT={os.environ['MOESCOPE_CACHE']}/loops", *command]
    runs, loops = [], list[LearntLoop]()
    for name in ("first", "second"):
        planner = Told(loops)
        done = record(tmp_path / name, command, planner)
        assert done.returncode == 0, done.stderr
        runs.append(RawRecording(tmp_path / name))
        loops += planner.learnt
        assert str(library) in [message["path"] for message in planner.asked if "path" in message]
    assert [len(loops), loops[0].id] == [1, next(row["build_id"] for row in runs[0].manifest["engines"]["llamacpp"]["libraries"])]
    assert [run.manifest["records"].get("site", 0) > 0 for run in runs] == [True, False]
    assert facts(store.build_tables(runs[0])) == facts(store.build_tables(runs[1]))
    retired = [{row["program"] for row in run.manifest["probes"] if row["retired_ns"]} for run in runs]
    assert retired == [{"ggml_op_wait", "ggml_op_begin", "ggml_fused_begin"}, set()]
    assert all(run.is_whole and run.manifest["warnings"] == [] and run.manifest["lost"] == {} for run in runs)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_program_in_which_nothing_is_probed_is_not_held_for_a_question(tmp_path: Path, is_known: bool) -> None:
    class Ahead(Told):
        def __call__(self, message: Message) -> str | None:
            plan = super().__call__(message)
            if "machine" not in message or not is_known:
                return plan
            return f"{plan}{json.dumps(self.answers.without_probes(sys.executable))}\n"

    planner = Ahead([])
    done = record(tmp_path / "run", [sys.executable, "-c", "print(7)"], planner)
    assert done.stdout == "7\n", done.stderr
    asked = [message["path"] for message in planner.asked if message.get("executable")]
    assert asked == ([] if is_known else [os.path.realpath(sys.executable)])
    assert RawRecording(tmp_path / "run").manifest["cost"]["held_stops"] > 0


def test_a_program_with_something_to_probe_is_planned_when_it_starts() -> None:
    for function, is_probed in ((step_function("main"), True), (step_function("libsites:main"), False)):
        planner = Planner(choose_engines(["auto"]), LEVELS, [function], lambda: False)
        answers = Answers(planner, FileRoot("", os.uname().machine), [])
        answers.plan()
        assert answers.is_probed(sys.executable) == is_probed
    order = answers.without_probes(sys.executable)
    assert [(file["rows"], file["engines"], "rows" in order) for file in order["files"]] == [([], [], False)]


def test_a_library_that_the_command_names_is_probed_when_it_is_opened(tmp_path: Path) -> None:
    command = ["sh", "-c", 'shift; exec "$@"', "sh", str(SITES), sys.executable, STEPS, "20", "0.001"]
    done = trace("run", "--no-views", "--levels", "token", "-o", str(tmp_path / "run"), "--", *command)
    assert done.returncode == 0, done.stderr
    assert len(RawRecording(tmp_path / "run").records("token_end")) == 20


@pytest.mark.parametrize("then", [None, "no JSON\n", "[]\n"], ids=["ends", "garbage", "no object"])
def test_a_planner_that_fails_costs_what_it_would_have_planned_and_nothing_else(tmp_path: Path, then: str | None) -> None:
    done = record(tmp_path / "run", [sys.executable, STEPS, "20", "0.001"], Told([], after=1, then=then))
    assert done.returncode == 0 and done.stdout == "done 20\n", done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.is_whole and run.manifest["state"] == "complete" and run.manifest["target"]["exit_code"] == 0
    first, *others = run.manifest["warnings"]
    assert "the planner" in first and all(str(SITES) in other for other in others)  # asked for, or no longer asked for
    assert "token_end" not in run.manifest["records"]


def test_a_recorder_without_a_plan_starts_nothing(tmp_path: Path) -> None:
    done = record(tmp_path / "run", ["touch", str(tmp_path / "ran")], lambda message: None)
    assert done.returncode == FAILED and not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()
