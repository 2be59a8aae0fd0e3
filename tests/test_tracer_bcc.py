"""The two loaders see the same: one session of a program for every engine, by the recorder's own programs and by BCC's.

BCC compiles all sources for every recording, so that this file makes two of them, one for each kind of buffer.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from analyzer.tables import store as tables_module
from tests import test_tracer_io as io_steps
from tests import test_tracer_onnxruntime as onnxruntime
from tests import test_truth_runtime as truth
from tests.conftest import RECORDED_BY, ROOT, forget_loops, lacking, trace
from tests.test_recorder import RECORDER, SITES, STEPS, make_plan
from tests.test_tracer_custom import COUNT, DECLARED, DEPTH
from tracer.engines import all_engines
from tracer.errors import FAILED
from tracer.kernel.bcc_helper import launcher_words
from tracer.recording.paths import BPF_SOURCE
from workloads.compiling import WITH_SITES, compile_c
from workloads.gguf_model import write_moe
from workloads.raw_records import RawRecording

pytestmark = [
    pytest.mark.long,
    pytest.mark.needs("probes", "bcc", "dropping pages"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
PROGRAMS = ROOT / "workloads" / "programs"
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
SAME = {
    "tokens": "engine seq phase n_tokens position result complete",
    "graphs": "engine kind layer expert backend tier n_tokens name status complete",
    "operators": "engine type name layer expert n_tokens shape complete",
    "routes": "layer row rank expert weight",
    "experts": "engine layer expert n_tokens cache backend tier complete",
    "loads": "action reason layer expert backend bytes resident_bytes complete",
    "sessions": "engine name bytes n_inputs n_outputs",
    "calls": "function at depth args complete",
    "qnn_executes": "graph_name profile_level n_inputs n_outputs status first asynchronous complete",
    "qnn_events": "type_name unit name depth",
    "qnn_calls": "call name status complete",
    "qnn_objects": "kind name level",
    "qnn_stages": "stage complete",
}
"""What a table says of what the programs did, but for when, where and under which addresses."""
LEARNT = {probe.program for engine in all_engines().values() for probe in engine.probes if probe.learnt}


@dataclass
class Session:
    """One recording of all programs."""

    folder: Path
    printed: str
    recording: RawRecording
    tables: dict[str, pd.DataFrame]

    def of(self, pid: int) -> dict[str, pd.DataFrame]:
        """What was recorded of one process."""
        mine = {name: table[table["pid"] == pid] if "pid" in table else table for name, table in self.tables.items()}
        for name, key, owner in (
            ("op_threads", "op_id", "operators"),
            ("pmc", "op_id", "operators"),
            ("routes", "token_id", "tokens"),
        ):
            mine[name] = mine[name][mine[name][key].isin(mine[owner][key])]
        return mine


def commands(made: Path, folder: Path) -> list[list[str]]:
    """A program for every engine that is at hand; `folder` is where they may write."""
    qnn, python = PROGRAMS / "qnn_c.py", sys.executable
    found = [
        [python, str(PROGRAMS / "io_steps.py"), str(made / "experts.bin")],
        [str(made / "truth"), str(folder / "log.csv"), str(truth.STEPS), str(truth.THREADS), str(folder / "cold")],
        [python, str(PROGRAMS / "steps.py"), "300", "0", "--child", "--operators", "3"],
        [str(made / "named"), str(COUNT), str(DEPTH)],
        [python, str(qnn), str(made / "libQnnFake.so"), "every=1", "executes=5"],
    ]
    if onnxruntime.RUNTIME:
        model = str(made / "identity.onnx")
        found.append([python, str(PROGRAMS / "ort_c.py"), str(onnxruntime.RUNTIME), model, str(onnxruntime.RUNS), "--child"])
    if onnxruntime.GENIE:
        found.append(onnxruntime.genie_calls(folder))
    if not lacking("htp"):
        found.append(["env", "-C", str(folder), python, str(PROGRAMS / "plain_qnn.py"), str(folder)])
    if importlib.util.find_spec("xllamacpp"):
        found.append([python, str(PROGRAMS / "llama_steps.py"), str(made / "model.gguf"), "20", "4", "0.05"])
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the programs are and read."""
    folder = tmp_path_factory.mktemp("programs")
    io_steps.make_file(folder)
    compile_c(folder / "truth", "truth_runtime.c", flags=WITH_SITES)
    plain = ["cc", "-O2", "-fno-ipa-ra", "-o", str(folder / "named"), str(PROGRAMS / "named.c")]
    shared = ["cc", "-shared", "-fPIC", "-o", str(folder / "libQnnFake.so"), str(PROGRAMS / "fake_qnn.c"), "-lpthread"]
    for command in (plain, shared):
        subprocess.run(command, check=True)
    onnxruntime.identity(folder / "identity.onnx")
    if importlib.util.find_spec("xllamacpp"):
        write_moe(folder / "model.gguf")
    (folder / "declared.toml").write_text(DECLARED.format(library=str(folder / "named")))
    return folder


def session(made: Path, folder: Path, loader: str) -> Session:
    script = folder / "all.sh"
    script.write_text("set -e\n" + "\n".join(map(shlex.join, commands(made, folder))))
    options = ["--loader", loader, "--probes", str(made / "declared.toml"), "--pmc", io_steps.EVENTS]
    forget_loops()  # so that both learn where llama.cpp's is
    done = trace(
        "run", "--no-views", *RECORDED_BY["exec"], *options, "-o", str(folder / "run"), "--", "sh", str(script), env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    recording = RawRecording(folder / "run")
    return Session(folder, done.stdout, recording, tables_module.build_tables(recording))


@pytest.fixture(scope="module")
def libbpf(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session(made, tmp_path_factory.mktemp("libbpf"), "libbpf")


@pytest.fixture(scope="module")
def bcc(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session(made, tmp_path_factory.mktemp("bcc"), "bcc")


def by_thread(table: pd.DataFrame, columns: list[str]) -> Counter[str]:
    """What every thread did, in its order; threads have no names that last."""
    when = next(name for name in ("begin_ns", "since_ns", "ts_ns") if name in table)
    rows = table.sort_values(when, kind="stable")
    if "engine" in table and "tid" in table:  # which of llama.cpp's threads is the first at an operator is chance
        rows = rows.assign(tid=rows["tid"].where(rows["engine"] != "llamacpp", 0))
    parts = [part for _, part in rows.groupby([name for name in ("pid", "tid") if name in table] or ["token_id"])]
    return Counter(str(part[columns].values.tolist()) for part in parts)


@pytest.mark.parametrize("name", SAME)
def test_both_loaders_record_what_every_thread_did_in_its_order(libbpf: Session, bcc: Session, name: str) -> None:
    one, other = (each.tables[name] for each in (libbpf, bcc))
    assert len(one) == len(other)
    assert by_thread(one, SAME[name].split()) == by_thread(other, SAME[name].split())


def test_both_loaders_are_told_the_same_tensors(libbpf: Session, bcc: Session) -> None:
    """How often is another matter: when learnt probes take over, and by then which graph is next, is chance."""
    columns = ["engine", "type", "name", "shape", "dtype", "bytes"]
    one, other = (set(map(str, each.tables["tensors"][columns].values.tolist())) for each in (libbpf, bcc))
    assert one and one == other


def test_through_bcc_too_every_engine_is_there_and_nothing_is_lost(bcc: Session) -> None:
    manifest = bcc.recording.manifest
    assert manifest["loader"] == "bcc" and manifest["lost"] == {}
    assert len(bcc.tables["unpaired"]) == 0
    assert set(bcc.tables["tokens"]["engine"]) >= {"moescope"} and len(bcc.tables["calls"]) == COUNT + DEPTH + 2
    assert len(bcc.tables["qnn_executes"]) > 5


def test_both_loaders_attach_the_same_programs_and_count_their_runs_alike(libbpf: Session, bcc: Session) -> None:
    hits = []
    for each in (libbpf, bcc):
        rows = pd.DataFrame(each.recording.manifest["probes"])
        rows = rows[~rows["program"].isin(LEARNT)]  # placed if a run was long enough
        hits.append(rows.groupby(["engine", "program"])["hits"].sum())
    assert hits[0].index.equals(hits[1].index)
    # The kernel's own events depend on who ran when, and how llama.cpp is watched on what was learnt by then.
    own = ~hits[0].index.get_level_values("engine").isin(["kernel", "llamacpp"])
    assert hits[0][own].equals(hits[1][own]) and (hits[0][own] > 0).mean() > 0.8


def test_through_bcc_too_times_choices_and_faults_are_those_that_the_runtimes_double_logged(bcc: Session) -> None:
    log = bcc.folder / "log.csv"
    tokens = bcc.tables["tokens"]
    (pid,) = tokens.loc[tokens["tid"].isin(pd.read_csv(log)["tid"]), "pid"].unique()
    traced = truth.Traced(log, bcc.recording, bcc.of(pid), 0.0)
    for what in truth.TABLE_OF:
        truth.test_every_begin_and_end_lies_between_the_programs_own_readings(traced, what)
    for what in ("token", "op", "expert"):
        truth.test_page_faults_are_those_that_the_kernel_counted_for_the_thread(traced, what)
    truth.test_what_the_program_says_of_its_work_is_in_the_tables(traced)
    truth.test_routes_follow_the_programs_rule(traced)
    truth.test_states_tile_the_time_of_every_thread(traced)


def check_io(recording: RawRecording, tables: dict[str, pd.DataFrame], printed: str, path: Path) -> None:
    """Of io_steps.py, whose operators have the recording's first numbers."""
    used = next(json.loads(line)["used"] for line in printed.splitlines() if '"used"' in line)
    run = io_steps.Run(recording, tables, used, str(path))
    io_steps.test_every_major_fault_has_the_page_that_was_touched_and_the_operator_that_waited(run)
    if run.tables["blocks"]["complete"].all():
        io_steps.test_every_fault_that_waited_for_the_device_contains_its_block_request(run)
    else:  # some kernel keeps a few interrupts from every observer; programs that see none would be another matter
        assert run.tables["blocks"]["complete"].mean() > 0.5
    io_steps.test_reads_tell_offset_and_bytes_and_the_load_that_they_served(run)
    io_steps.test_reads_from_the_files_position_and_into_lists_of_buffers_are_told_too_but_no_pipe(run)
    io_steps.test_what_the_device_read_is_what_was_brought_into_the_page_cache(run)
    if recording.manifest["pmc"]:
        io_steps.test_counted_faults_are_those_of_the_program_and_of_the_kernels_own_counters(run)
        io_steps.test_counted_switches_are_those_of_getrusage(run)


def test_through_bcc_too_faults_reads_requests_and_counters_are_those_of_the_program(bcc: Session, made: Path) -> None:
    check_io(bcc.recording, bcc.of(bcc.tables["tokens"]["pid"].iloc[0]), bcc.printed, made / "experts.bin")
    events = io_steps.events_of_sleeper(io_steps.Run(bcc.recording, bcc.tables, [], ""))
    following = [events[i + 1 : i + 2] == ["wakeup"] for i, event in enumerate(events) if event == "waking"]
    assert len(following) >= io_steps.SLEEPS / 2 and following.count(False) <= 1


# A program under the name of one of ours that reads memory through a number, which no verifier lets pass.
REFUSED = """
#undef moescope_token_end
BARE_UPROBE(moescope_token_end)
{
	u64 address = ARG1(ctx), value;

	asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(value) : "r"(address));
	return value;
}
"""


@pytest.mark.needs("recorder")
def test_a_program_that_the_kernel_refuses_is_named_with_its_reason_and_costs_only_its_events(tmp_path: Path) -> None:
    shutil.copytree(BPF_SOURCE.parent, tmp_path / "bpf")
    source, token = tmp_path / "bpf" / BPF_SOURCE.name, '#include "token.bpf.c"\n'
    renamed = "#define moescope_token_end moescope_token_end_whole\n"
    source.write_text(source.read_text().replace(token, renamed + token + REFUSED))
    make_plan(tmp_path / "plan.json", "--libraries", str(SITES), "--levels", "token,operator", "--", sys.executable)
    words = ["-p", str(tmp_path / "plan.json"), "-o", str(tmp_path / "run"), "--", sys.executable, STEPS, "200", "0"]
    command = [*launcher_words(source), str(RECORDER), *words, "--operators", "2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("op_begin")) == len(run.records("op_end")) == 400
    assert len(run.records("token_begin")) == len(run.records("token_end")) == 0  # a begin without its end tells nothing
    (said,) = run.manifest["warnings"]
    assert "moescope_token_end: " in said and "invalid mem" in said


@pytest.mark.needs("recorder")
def test_sources_that_do_not_compile_are_said_and_nothing_runs(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json", "--libraries", str(SITES), "--levels", "token", "--", sys.executable)
    source = tmp_path / "wrong.bpf.c"
    source.write_text("int nothing(void) { return missing; }\n")
    words = [str(RECORDER), "-p", str(tmp_path / "plan.json"), "-o", str(tmp_path / "run"), "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run([*launcher_words(source), *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED and "BCC" in done.stderr and "missing" in done.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "ran").exists()


def test_where_a_kernel_has_no_types_the_programs_compile_against_its_headers(tmp_path: Path) -> None:
    apart = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/kernel/btf && exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    options = ["--no-views", "--loader", "bcc", "--levels", "io,sched", "-o", str(tmp_path / "run")]
    command = [*apart, sys.executable, "-m", "tracer", "run", *options, "--", "true"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert {"sched_waking", "block_rq_complete"} <= {row["program"] for row in run.manifest["probes"]}
    assert not any("refused" in warning for warning in run.manifest["warnings"])


def test_bcc_fills_perf_buffers_too_and_does_without_a_tracepoint_that_this_kernel_lacks(made: Path, tmp_path: Path) -> None:
    hide = 'mount -t tmpfs none /sys/kernel/tracing/events/block/block_io_start && exec "$@"'
    apart = ["unshare", "-m", "sh", "-c", hide, "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        apart = []  # mount namespaces are not allowed here: with all tracepoints, then
    script = tmp_path / "all.sh"
    steps = [sys.executable, str(PROGRAMS / "steps.py"), "3000", "0", "--child"]
    script.write_text("set -e\n" + "\n".join(map(shlex.join, [commands(made, tmp_path)[0], steps])))
    options = [
        "--no-views",
        "--loader",
        "bcc",
        "--buffer",
        "perf",
        "--levels",
        "io,operator,token,expert",
        "-o",
        str(tmp_path / "run"),
    ]
    command = [*apart, sys.executable, "-m", "tracer", "run", *options, "--", "sh", str(script)]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert (run.manifest["loader"], run.manifest["buffer"], run.manifest["lost"]) == ("bcc", "perf", {})
    io, *both = pd.unique(run.records("token_begin")["pid"])
    for kind, pid in product(("token_begin", "token_end"), both):
        rows = run.records(kind)
        assert rows["seq"][rows["pid"] == pid].tolist() == list(range(3000))
    assert len(both) == 2
    tables = tables_module.build_tables(run)
    mine = {name: table[table["pid"] == io] if "pid" in table else table for name, table in tables.items()}
    check_io(run, mine, done.stdout, made / "experts.bin")
    assert any("block_io_start" in line for line in run.manifest["warnings"]) == bool(apart)
