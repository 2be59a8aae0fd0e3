"""Page faults, reads, block requests, the scheduler's scope and counters equal what the program did and the kernel counts."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyzer.tables import store as tables_module
from tests.conftest import ROOT, trace
from tracer.errors import FAILED
from tracer.kernel.definitions import constant
from workloads.programs.io_steps import ANONYMOUS_PAGES, PAGE, READS, SLEEPS, TOUCHED
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "dropping pages")
PROGRAM = str(ROOT / "workloads" / "programs" / "io_steps.py")
NOTHING, TOUCH, MEMORY, LOAD, READ_ON, SLEEP, TOUCH_AGAIN = range(7)
MOST_RUNS = 4
EVENTS = "major-faults,minor-faults,context-switches,task-clock"


@dataclass
class Run:
    """One traced run of io_steps.py."""

    recording: RawRecording
    tables: dict[str, pd.DataFrame]
    used: list[list[int]]
    path: str

    def of(self, table: str, op: int = -1) -> pd.DataFrame:
        """The rows of the program's file, of one operator."""
        rows = self.tables[table]
        rows = rows[rows["file"] == self.path]
        return rows[rows["op_id"] == op] if op >= 0 else rows


def make_file(folder: Path) -> Path:
    path = folder / "experts.bin"
    with path.open("wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    return path


def run_program(folder: Path, *options: str, prefix: tuple[str, ...] = ()) -> Run:
    path = make_file(folder)
    command = [sys.executable, "-m", "tracer", "run", "--no-views", "-o", str(folder / "run"), *options]
    command = [*prefix, *command, "--", sys.executable, PROGRAM, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    if prefix and ("unshare" in done.stderr or "mount" in done.stderr.split("tracer:")[0]):
        pytest.skip("mount namespaces are not allowed here")
    assert done.returncode == 0, done.stderr
    recording = RawRecording(folder / "run")
    assert recording.manifest["lost"] == {}
    return Run(recording, tables_module.build_tables(recording), json.loads(done.stdout.splitlines()[-1])["used"], str(path))


def events_of_sleeper(run: Run) -> list[str]:
    sched = run.tables["sched"]
    operator = run.tables["operators"].set_index("op_id").loc[SLEEP]
    inside = sched[sched["ts_ns"].between(operator["begin_ns"], operator["end_ns"]) & (sched["next_tid"] == operator["tid"])]
    return inside["event"].tolist()


def each_waking_has_its_wakeup(events: list[str]) -> bool:
    following = [events[i + 1 : i + 2] for i, event in enumerate(events) if event == "waking"]
    return following == [["wakeup"]] * len(following)


def answered(run: Run) -> bool:
    """Whether every interrupt for the target was told: some kernel keeps those that hit threads of its own from observers."""
    return bool(run.tables["blocks"]["complete"].all()) and each_waking_has_its_wakeup(events_of_sleeper(run))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, on: tuple[str, ...]) -> Run:
    for _ in range(MOST_RUNS):
        run = run_program(tmp_path_factory.mktemp("io"), "--pmc", EVENTS, *on)
        if answered(run):
            break
    return run


def test_every_major_fault_has_the_page_that_was_touched_and_the_operator_that_waited(run: Run) -> None:
    faults = run.of("faults", TOUCH)
    major = faults[faults["kind"] == "major"]
    assert (major["offset"] // PAGE).tolist() == TOUCHED
    assert major["exact"].all() and (major["bytes"] == PAGE).all()
    assert run.used[TOUCH][0] == len(major)
    operator = run.tables["operators"].set_index("op_id").loc[TOUCH]
    assert (major["begin_ns"] > operator["begin_ns"]).all() and (major["end_ns"] < operator["end_ns"]).all()
    assert (major["duration_ns"] > 0).all() and (major["token_id"] == 0).all()


def test_pages_that_are_mapped_already_do_not_fault_again(run: Run) -> None:
    assert len(run.of("faults", TOUCH_AGAIN)) == 0
    assert run.used[TOUCH_AGAIN][0] == 0


def test_every_fault_that_waited_for_the_device_contains_its_block_request(run: Run) -> None:
    faults, blocks = run.of("faults", TOUCH), run.tables["blocks"]
    blocks = blocks[(blocks["op_id"] == TOUCH) & (blocks["operation"] == "read")]
    assert blocks["bytes"].tolist() == [PAGE] * len(TOUCHED) and blocks["complete"].all() and (blocks["error"] == 0).all()
    major = faults[faults["kind"] == "major"]
    assert (blocks["begin_ns"].to_numpy() > major["begin_ns"].to_numpy()).all()
    assert (blocks["end_ns"].to_numpy() < major["end_ns"].to_numpy()).all()


IN_INTERRUPTS = ("sched_process_free", "sched_waking", "sched_wakeup", "block_rq_complete")
"""The kernel drops a perf tracepoint's event in an interrupt that hit another BPF program on its CPU: these are raw programs."""


def test_what_arrives_in_interrupts_is_not_kept_from_its_program_by_others_that_run(run: Run) -> None:
    skipped = {row["program"]: row["skipped"] for row in run.recording.manifest["probes"]}
    assert [skipped[name] for name in IN_INTERRUPTS] == [0] * len(IN_INTERRUPTS)


def test_reads_tell_offset_and_bytes_and_the_load_that_they_served(run: Run) -> None:
    reads = run.of("reads", LOAD)
    assert list(zip(reads["offset"], reads["asked_bytes"], strict=True)) == READS
    assert reads["bytes"].tolist() == [size for _, size in READS]
    assert reads["missed_bytes"].tolist() == [-(-size // PAGE) * PAGE for _, size in READS]
    assert set(reads["call"]) == {"pread64"} and (reads["load_id"] == 0).all() and reads["complete"].all()


def test_reads_from_the_files_position_and_into_lists_of_buffers_are_told_too_but_no_pipe(run: Run) -> None:
    reads = run.tables["reads"]
    reads = reads[reads["op_id"] == READ_ON]
    assert set(reads["file"]) == {run.path}
    assert reads["call"].str.rstrip("2").tolist() == ["read", "readv", "preadv"]
    assert reads["offset"].tolist() == [3 << 20, (3 << 20) + 1000, PAGE]
    assert reads["bytes"].tolist() == [1000, 30, 40]
    assert reads["asked_bytes"].tolist() == [1000, -1, -1]


def test_what_the_device_read_is_what_was_brought_into_the_page_cache(run: Run) -> None:
    blocks = run.tables["blocks"]
    asked = blocks[(blocks["op_id"] == LOAD) & (blocks["operation"] == "read")]["bytes"].sum()
    assert asked == run.of("reads", LOAD)["missed_bytes"].sum() == 9 * PAGE


def counted(run: Run, event: str) -> pd.Series:
    table = run.tables["pmc"]
    return table[table["event"] == event].set_index("op_id")["value"].astype(int)


def test_counted_faults_are_those_of_the_program_and_of_the_kernels_own_counters(run: Run) -> None:
    operators = run.tables["operators"].set_index("op_id")
    for event, field in (("major-faults", "maj_flt"), ("minor-faults", "min_flt")):
        pd.testing.assert_series_equal(counted(run, event), operators[field].astype(int), check_names=False)
    assert counted(run, "major-faults").loc[:TOUCH_AGAIN].tolist() == [used[0] for used in run.used]
    minor = counted(run, "minor-faults")
    assert minor[MEMORY] - run.used[MEMORY][1] in range(3) and run.used[MEMORY][1] - ANONYMOUS_PAGES in range(3)


def test_counted_switches_are_those_of_getrusage(run: Run) -> None:
    switches = counted(run, "context-switches")
    voluntary = [used[2] for used in run.used]
    assert voluntary[SLEEP] == SLEEPS
    assert (switches.loc[:TOUCH_AGAIN].to_numpy() >= voluntary).all() and switches[SLEEP] < SLEEPS + 20
    busy, whole = counted(run, "task-clock"), run.tables["operators"].set_index("op_id")["duration_ns"]
    assert (busy < 1.05 * whole + 20_000).all() and busy[SLEEP] < whole[SLEEP] / 2


def test_a_thread_that_begins_later_is_counted_too(run: Run) -> None:
    operators = run.tables["operators"]
    late = operators[operators["layer"] == 90].iloc[0]
    assert late["tid"] != late["pid"]
    assert counted(run, "context-switches")[late["op_id"]] >= SLEEPS
    assert run.recording.manifest["pmc"]["uncounted_threads"] == 0


def target_threads(run: Run) -> np.ndarray:
    threads = run.tables["threads"]
    return threads.loc[threads["target"], "tid"].to_numpy()


def test_the_kernel_side_sends_only_switches_that_a_thread_of_the_target_takes_part_in(run: Run) -> None:
    own = target_threads(run)
    switch = run.recording.records("sched_switch")
    assert len(switch) and (np.isin(switch["prev_tid"], own) | np.isin(switch["next_tid"], own)).all()
    assert (switch["comm_of_next"] == np.isin(switch["prev_tid"], own)).all()
    for kind in ("sched_waking", "sched_wakeup"):
        woken = run.recording.records(kind)["woken_tid"]
        assert len(woken) and np.isin(woken, own).all()


def test_every_waking_of_a_sleeper_is_followed_by_its_wakeup(run: Run) -> None:
    events = events_of_sleeper(run)
    assert events.count("wakeup") >= SLEEPS / 2  # a sleep may be over before the thread has left its CPU
    assert each_waking_has_its_wakeup(events)


def test_the_whole_machines_scheduling_leaves_no_gap_on_any_cpu_but_what_the_kernel_skipped(
    tmp_path: Path, on: tuple[str, ...]
) -> None:
    run = run_program(tmp_path, "--sched", "all", "--levels", "sched,operator,token", *on)
    own, switch = target_threads(run), run.tables["sched"].query("event == 'switch'")
    assert (~np.isin(switch["prev_tid"], own) & ~np.isin(switch["next_tid"], own)).any()
    leavers = switch["prev_tid"].unique()  # some kernel keeps a few threads' own events from every observer
    gaps = 0
    for _, rows in switch.groupby("cpu"):
        after, left = rows["next_tid"].to_numpy()[:-1], rows["prev_tid"].to_numpy()[1:]
        gaps += int(((after != left) & np.isin(after, leavers)).sum())
    skipped = {row["program"]: row["skipped"] for row in run.recording.manifest["probes"]}
    assert gaps <= skipped["sched_switch"] < len(switch) / 10
    assert set(run.tables["thread_states"]["tid"]) <= set(own.tolist())
    assert run.recording.manifest["sched"] == "all"


def test_a_kernel_that_does_not_tell_of_faults_as_they_begin_still_tells_file_and_count(tmp_path: Path) -> None:
    hide = 'mount -t tmpfs none /sys/kernel/tracing/events/filemap/mm_filemap_fault && exec "$@"'
    run = run_program(tmp_path, "--levels", "io,operator,token", prefix=("unshare", "-m", "sh", "-c", hide, "sh"))
    assert any("filemap:mm_filemap_fault" in w for w in run.recording.manifest["warnings"])
    faults = run.of("faults", TOUCH)
    assert (faults["kind"] == "major").all() and not faults["exact"].any()
    assert (faults["offset"] // PAGE).tolist() == TOUCHED
    assert run.tables["operators"]["maj_flt"][TOUCH] == len(faults) == run.used[TOUCH][0]


def test_without_the_level_nothing_of_it_is_attached(tmp_path: Path) -> None:
    run = run_program(tmp_path, "--levels", "operator")
    assert {row["level"] for row in run.recording.manifest["probes"]} == {"graph", "operator", "process"}
    assert len(run.tables["faults"]) == len(run.tables["reads"]) == len(run.tables["blocks"]) == len(run.tables["pmc"]) == 0


def test_an_event_that_cannot_be_counted_is_refused_before_anything_is_recorded(tmp_path: Path, on: tuple[str, ...]) -> None:
    done = trace("run", "--pmc", "0xfffffffffffffff", "-o", str(tmp_path / "run"), *on, "--", sys.executable, PROGRAM)
    assert done.returncode == FAILED and " 0xfffffffffffffff" in done.stderr
    assert not (tmp_path / "run").exists()


MANY_THREADS = 1000


@pytest.mark.long
def test_counters_of_ended_threads_make_room(tmp_path: Path) -> None:
    """More threads, a hundred at a time, than the recorder has room to count."""
    assert constant("MAX_COUNTED_THREADS") < 2 * MANY_THREADS
    script = "import threading\n"
    script += f"for _ in range({2 * MANY_THREADS // 100}):\n"
    script += "    threads = [threading.Thread(target=threading.Event().wait, args=(0.5,)) for _ in range(100)]\n"
    script += "    [thread.start() for thread in threads], [thread.join() for thread in threads]\n"
    options = ("--no-views", "--levels", "operator", "--pmc", "cs,faults", "-o", str(tmp_path / "run"))
    done = trace("run", *options, "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    counted = RawRecording(tmp_path / "run").manifest["pmc"]
    assert [event["name"] for event in counted["events"]] == ["cs", "faults"] and counted[
        "uncounted_threads"
    ] < 100  # under load some end first
