"""moescope-recorder: what it records is what the Python tracer records, and it leaves nothing behind, whatever happens to it."""

import contextlib
import importlib.util
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analyzer.tables import store
from tests.conftest import LONG, RECORDER, ROOT, trace, wait_until
from tracer.errors import FAILED
from tracer.kernel.plan_file import file_identity
from tracer.kernel.trial import features
from tracer.probes.elf import read_binary
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.tracefs import has_tracepoint
from tracer.recording.checksums import check_file
from workloads.compiling import WITH_SITES, compile_c
from workloads.gguf_model import write_moe
from workloads.kernel_objects import load_libbpf
from workloads.raw_records import RawRecording

pytestmark = pytest.mark.needs("probes", "recorder")
KPROBE_TYPE, RINGBUF_MAP, CURRENT_TASK_BTF, ATTACH_COOKIE = 2, 27, 158, 174  # numbers of linux/bpf.h
SITES = ROOT / "runtime" / "telemetry" / "_probes.so"
STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
CALLS, PATIENCE_S = 300, 120
KILLS = 100 if LONG else 12
MOST_MIB = 64


def make_plan(path: Path, *words: str) -> dict[str, Any]:
    """What `moescope plan` writes to a file."""
    command = [sys.executable, "-m", "tracer", "plan", "-o", str(path), *words]
    subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
    return json.loads(path.read_text())


def collect(plan: Path, folder: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A recording by the recorder, from a plan and a command."""
    words = [str(RECORDER), "--plan", str(plan), "-o", str(folder), *options, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.fixture(scope="module")
def of_sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for our runtime's sites."""
    path = tmp_path_factory.mktemp("sites") / "plan.json"
    make_plan(path, "--libraries", str(SITES), "--levels", "token,graph,operator,expert", "--", sys.executable)
    return path


def llama(folder: Path, pause_s: float = 0.1) -> tuple[list[str], Path]:
    """(command that runs a seeded model in a real llama.cpp, with a pause after each step; the library that holds it)."""
    package = importlib.util.find_spec("xllamacpp")
    if package is None or not package.submodule_search_locations:
        pytest.skip("xllamacpp is not installed")
    write_moe(folder / "model.gguf")
    program = str(ROOT / "workloads" / "programs" / "llama_steps.py")
    command = [sys.executable, program, str(folder / "model.gguf"), "20", "8", str(pause_s)]
    return command, next(Path(package.submodule_search_locations[0]).glob("*.so"))


def facts(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """What does not depend on when something happened, and to which address."""
    operators, routes = tables["operators"], tables["routes"]
    return {
        "tokens": tables["tokens"][["n_tokens", "phase", "result", "complete"]].values.tolist(),
        "graphs": tables["graphs"][["token_id", "backend", "n_tokens"]].values.tolist(),
        "operators": operators.groupby(["token_id", "type"]).size().to_dict(),
        "routes": routes.sort_values(["token_id", "layer", "row", "rank"])[
            ["token_id", "layer", "row", "rank", "expert"]
        ].values.tolist(),
        "named": sorted(set(operators["name"])),
    }


def test_a_seeded_run_gives_the_tracers_tables_with_and_without_a_learnt_loop(tmp_path: Path) -> None:
    command, library = llama(tmp_path)
    levels = "token,graph,operator,expert"
    done = trace("run", "--no-views", "--levels", levels, "-o", str(tmp_path / "tracer"), "--", *command)
    assert done.returncode == 0, done.stderr
    wanted = facts(store.build_tables(RawRecording(tmp_path / "tracer")))
    for name, learn in (("first", ()), ("second", ("--learn", str(tmp_path / "first")))):
        plan = make_plan(tmp_path / f"{name}.json", "--libraries", str(library), "--levels", levels, *learn, "--", command[0])
        done = collect(tmp_path / f"{name}.json", tmp_path / name, *command)
        assert done.returncode == 0, done.stderr
        run = RawRecording(tmp_path / name)
        assert run.manifest["lost"] == {} and run.manifest["warnings"] == [] and run.is_whole
        assert facts(store.build_tables(run)) == wanted
        learnt = {row["program"] for row in plan["files"][-1]["rows"]} >= {"ggml_op_done", "ggml_graph_done"}
        assert learnt == (name == "second") == (run.manifest["records"].get("site", 0) == 0)


def test_graphs_of_a_build_that_calls_its_backends_directly_are_all_recorded(tmp_path: Path) -> None:
    source, program = ROOT / "workloads" / "programs" / "fake_ggml.c", tmp_path / "fake"
    subprocess.run(["cc", "-O2", "-Wno-unknown-pragmas", "-fopenmp", "-DINLINED", "-o", program, source], check=True)
    make_plan(tmp_path / "plan.json", "--levels", "token,graph", "--", str(program))
    done = collect(tmp_path / "plan.json", tmp_path / "run", str(program), "7", "1", "0")
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    hits = {row["symbol"]: row["hits"] for row in run.manifest["probes"] if row["program"] == "ggml_graph_begin"}
    assert len(hits) > 1 and len(store.build_tables(run)["graphs"]) == 7


@pytest.mark.long
@pytest.mark.parametrize("buffer", ["ring", "perf"])
def test_what_a_full_ring_loses_is_counted_to_the_record(tmp_path: Path, buffer: str) -> None:
    program = compile_c(tmp_path / "stress", "stress.c", flags=WITH_SITES)
    make_plan(tmp_path / "plan.json", "--libraries", str(SITES), "--levels", "expert", "--", str(program))
    run, made, code = held_up(tmp_path / "run", tmp_path / "plan.json", program, buffer)
    lost = run.manifest["lost"]["evict"]
    hits = next(row["hits"] for row in run.manifest["probes"] if row["program"] == "moescope_evict")
    assert len(run.records("evict")) + lost == hits == made and lost > 0 and code == 0
    assert run.is_whole and run.manifest["buffer"] == buffer
    told = sum(run.manifest["lost_by_cpu"].get("events", {}).values())
    least, most = (1, lost) if buffer == "perf" else (0, 0)  # told with the next record that finds room
    assert least <= told <= most


def held_up(folder: Path, plan: Path, program: Path, buffer: str) -> tuple[RawRecording, int, int]:
    """(recording, hits by the program's count, exit code) of a recorder that stands still twice, at last until the end."""
    events = folder / "events.bin"
    words = ["--plan", str(plan), "-o", str(folder), "--ring-mib", "1", "--buffer", buffer, "--", str(program), "10", "2"]
    with subprocess.Popen([str(RECORDER), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as recorder:
        assert wait_until(lambda: events.exists() and events.stat().st_size > 1 << 18)
        recorder.send_signal(signal.SIGSTOP)
        time.sleep(2)
        at_least = events.stat().st_size + (2 << 20)  # what filled its ring, and records after these
        recorder.send_signal(signal.SIGCONT)
        wait_until(lambda: events.stat().st_size > at_least, 3)
        recorder.send_signal(signal.SIGSTOP)
        assert recorder.stdout
        made = json.loads(recorder.stdout.readline())["hits"]
        recorder.send_signal(signal.SIGCONT)
        recorder.wait(PATIENCE_S)
    return RawRecording(folder), made, recorder.returncode


def test_every_call_of_a_childs_library_is_recorded_and_all_checksums_hold(of_sites: Path, tmp_path: Path) -> None:
    program = compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES)
    done = collect(of_sites, tmp_path / "run", "sh", "-c", f"true; {program} {CALLS}; exit 3", "Grüße \t☃")
    assert done.returncode == 3 and "status 3" in done.stderr
    run = RawRecording(tmp_path / "run")
    assert run.is_whole and run.manifest["target"]["exit_code"] == 3 and run.manifest["command"][-1] == "Grüße \t☃"
    kinds = ("token_begin", "token_end", "graph_begin", "graph_end", "op_begin", "op_end", "expert_begin", "expert_end", "evict")
    assert {kind: len(run.records(kind)) for kind in kinds} == dict.fromkeys(kinds, CALLS)
    hits = {row["program"]: row["hits"] for row in run.manifest["probes"] if row["engine"] == "moescope"}
    assert len(hits) == 12 and set(hits.values()) == {CALLS}
    for stream in ("events", "details"):
        assert check_file(run.path / f"{stream}.bin") == ([], run.slot_count(stream) * {"events": 64, "details": 256}[stream])
    assert run.manifest["engines"]["moescope"]["libraries"][0]["build_id"] == read_binary(str(SITES)).build_id


NOBODY = 65534
FOR_USERS = (19, 2, 38, 39)
"""CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_PERFMON, CAP_BPF: what SECURITY.md gives a recorder that users may start."""


def with_capabilities(program: Path, copy: Path) -> Path:
    """A copy that everyone may execute, with FOR_USERS in its file (struct vfs_cap_data, version 2, effective)."""
    shutil.copy(program, copy)
    copy.chmod(0o755)
    masks = [sum(1 << number - 32 * half for number in FOR_USERS if number // 32 == half) for half in (0, 1)]
    os.setxattr(copy, "security.capability", struct.pack("<5I", 0x02000001, masks[0], 0, masks[1], 0))
    return copy


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    """A command without root's rights."""
    return subprocess.run(command, capture_output=True, text=True, user=NOBODY, group=NOBODY, extra_groups=[], check=False)


def test_a_recorder_with_capabilities_records_for_a_user_and_opens_and_passes_on_no_more(
    of_sites: Path, open_folder: Path
) -> None:
    if as_nobody("test", "-r", str(SITES)).returncode:
        pytest.skip("others may not enter the folder of this checkout")
    recorder = with_capabilities(RECORDER, open_folder / "recorder")
    program = compile_c(open_folder / "usdt_calls", "usdt_calls.c", flags=WITH_SITES)
    shutil.copy(of_sites, open_folder / "plan.json")
    (open_folder / "plan.json").chmod(0o644)
    (open_folder / "secret.json").write_text(of_sites.read_text())
    (open_folder / "secret.json").chmod(0o600)
    words = [str(recorder), "--plan", str(open_folder / "plan.json"), "-o", str(open_folder / "run"), "--"]
    done = as_nobody(*words, "sh", "-c", f"{program} {CALLS}; grep -E 'Cap(Eff|Prm|Amb)' /proc/self/status")
    assert done.returncode == 0, done.stderr
    held = [int(line.split()[1], 16) for line in done.stdout.splitlines() if line.startswith("Cap")]
    assert held == [0, 0, 0]
    run = RawRecording(open_folder / "run")
    assert run.is_whole and run.manifest["state"] == "complete" and len(run.records("token_begin")) == CALLS
    assert (open_folder / "run" / "manifest.json").stat().st_uid == NOBODY
    words[2], words[4] = str(open_folder / "secret.json"), str(open_folder / "other")
    refused = as_nobody(*words, "true")
    assert refused.returncode == 125 and "Permission denied" in refused.stderr
    assert not (open_folder / "other").exists()


def test_functions_that_a_user_names_are_recorded_with_what_they_return(tmp_path: Path) -> None:
    library = compile_c(tmp_path / "libnamed.so", "named.c", flags=("-shared", "-fPIC", "-fno-ipa-ra", "-Wno-unused-parameter"))
    program, declared = compile_c(tmp_path / "reload", "reload.c"), tmp_path / "named.toml"
    declared.write_text('[[function]]\nlibrary = "libnamed.so"\nsymbol = "work_other"\nargs = { result = "s32 return" }\n')
    make_plan(tmp_path / "plan.json", "--libraries", str(library), "--probes", str(declared), "--", str(program))
    done = collect(tmp_path / "plan.json", tmp_path / "run", str(program), str(library), "20", "3")
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert [len(run.records(kind)) for kind in ("call_begin", "call_end")] == [60, 60]
    assert [row["name"] for row in run.manifest["functions"]] == ["work_other"]
    calls = store.build_tables(run)["calls"]
    assert calls[["function", "args"]].values.tolist() == [["work_other", '{"result": -1}']] * 60


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plan_version": 99}, "plan version 99"),
        ({"arch": "riscv64"}, "was made for riscv64"),
        ({"sources": "0" * 16}, "other programs"),
        ({"files": None}, "is damaged (at files)"),
        ({"patterns": [1]}, "is damaged (at patterns)"),
        ({"kernel": "sched"}, "is damaged (at kernel)"),
    ],
)
def test_a_plan_for_something_else_is_refused_in_one_line(of_sites: Path, tmp_path: Path, changed: dict, said: str) -> None:
    plan = json.loads(of_sites.read_text()) | changed
    (tmp_path / "plan.json").write_text(json.dumps({key: value for key, value in plan.items() if value is not None}))
    done = collect(tmp_path / "plan.json", tmp_path / "run", "touch", str(tmp_path / "ran"))
    assert done.returncode == FAILED and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_another_build_of_a_planned_file_is_refused_by_name(of_sites: Path, tmp_path: Path) -> None:
    plan = json.loads(of_sites.read_text())
    for file in plan["files"]:
        file["id"] = "00" * 20
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = collect(tmp_path / "plan.json", tmp_path / "run", "true")
    assert done.returncode == FAILED and f"{SITES} is build" in done.stderr and "plan again" in done.stderr


def test_a_library_that_the_plan_does_not_know_is_named_and_left_alone(of_sites: Path, tmp_path: Path) -> None:
    other = tmp_path / "_probes.other.so"
    shutil.copy(SITES, other)
    with other.open("ab") as file:
        file.write(b"another build")
    made = json.loads(of_sites.read_text())
    build = read_binary(str(other)).build_id
    for each in made["files"]:
        each["path"] = "/nowhere" + each["path"]
        each["id"] = each["id"] + "00" if build else each["id"]
    (tmp_path / "plan.json").write_text(json.dumps(made))
    script = f"import ctypes; ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL)"
    done = collect(tmp_path / "plan.json", tmp_path / "run", sys.executable, "-c", script)
    assert f"{other} (build {file_identity(str(other), build)}) " in done.stderr
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["warnings"]


def test_features_are_those_of_this_kernel() -> None:
    told = features()
    assert told["arch"] == os.uname().machine and told["fast_nop"] == has_fast_nop()
    assert told["ring_buffers"] == (load_libbpf().libbpf_probe_bpf_map_type(RINGBUF_MAP, None) == 1)
    for name, helper in (("cookies", ATTACH_COOKIE), ("task_btf", CURRENT_TASK_BTF)):
        assert told[name] == (load_libbpf().libbpf_probe_bpf_helper(KPROBE_TYPE, helper, None) == 1)
    assert told["syscall_tracepoints"] == has_tracepoint("syscalls", "sys_enter_openat")


def test_its_manifest_agrees_with_the_system_and_it_holds_no_more_than_its_probes(of_sites: Path, tmp_path: Path) -> None:
    log, before = tmp_path / "profile_qnn.log", resource.getrusage(resource.RUSAGE_CHILDREN)
    script = "import os, sys; open(sys.argv[1], 'wb').write(bytes(3 << 20)); held = f'/proc/{os.getppid()}/fd/'"
    script += "; print([os.readlink(held + fd) for fd in os.listdir(held)])"
    done = collect(of_sites, tmp_path / "run", sys.executable, "-c", script, str(log))
    after, manifest = resource.getrusage(resource.RUSAGE_CHILDREN), RawRecording(tmp_path / "run").manifest
    assert done.stdout.count("perf_event") + done.stdout.count("bpf_link") == len(manifest["probes"])
    assert [(row["from"], row["bytes"]) for row in manifest["qnn_logs"]] == [(str(log), 3 << 20)]
    assert manifest["machine"]["os"] == platform.freedesktop_os_release()["PRETTY_NAME"]
    spent_ns = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e9
    assert 0.8 * spent_ns < manifest["cost"]["tracer_cpu_ns"] + manifest["cost"]["target_cpu_ns"] < 1.05 * spent_ns


class Running:
    """A recorder over `steps.py`, which goes on until it is told to end."""

    def __init__(self, plan: Path, folder: Path, *options: str):
        folder.mkdir()
        self.folder, self.output, self.end = folder / "run", folder / "output", folder / "end"
        words = [str(RECORDER), "--plan", str(plan), "-o", str(self.folder), *options]
        words += ["--", sys.executable, STEPS, "100000", "0.002"]
        with self.output.open("wb") as out:
            command = [*words, "--until", str(self.end)]
            self.recorder = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)

    def target(self) -> int:
        """The target's number; 0 where it has not begun."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.folder / "manifest.json").read_text())["target"]["pid"])
        return 0

    def steps(self) -> int:
        """How many steps the last line of progress tells."""
        told = re.findall(r"(\d+) steps", self.output.read_text())
        return int(told[-1]) if told else 0

    def ends_well(self) -> bool:
        """Whether the target, told to end, does its last work: nobody left it stopped."""
        self.end.touch()
        return wait_until(lambda: b"done " in self.output.read_bytes())

    def close(self) -> None:
        """End both."""
        self.end.touch()
        if self.recorder.poll() is None:
            self.recorder.kill()
            self.recorder.wait()


@pytest.fixture
def running(of_sites: Path, tmp_path: Path) -> Iterator[Running]:
    run = Running(of_sites, tmp_path / "running")
    yield run
    run.close()


def is_changed(pid: int, address: int) -> bool:
    """Whether the kernel has put a probe over the library's code in a process."""
    with open(f"/proc/{pid}/mem", "rb") as memory, SITES.open("rb") as file:
        base = next(
            int(line.split("-")[0], 16) - int(line.split()[2], 16)
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if line.endswith(str(SITES)) and "x" in line.split()[1]
        )
        memory.seek(base + address)
        file.seek(address)
        return memory.read(1) != file.read(1)


def test_an_interrupted_recorder_detaches_and_completes_its_recording(running: Running) -> None:
    assert wait_until(lambda: running.steps() > 50)
    pid = running.target()
    running.recorder.send_signal(signal.SIGINT)
    assert running.recorder.wait(PATIENCE_S) == 0
    done = RawRecording(running.folder)
    assert done.manifest["state"] == "complete" and done.manifest["records"]["token_end"] > 50
    assert f"process {pid} " in running.output.read_text() and running.ends_well()


def processes(folder: Path) -> list[str]:
    """Those whose command line names a recording: the recorder, its guard, and a target that has not begun."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def left_alone(run: Running, pid: int, places: list[int]) -> bool:
    """Whether what a killed recorder leaves is a target without probes, which goes on, and a recording that can be read."""

    def runs() -> bool:
        with contextlib.suppress(OSError):
            return str(SITES) in Path(f"/proc/{pid}/maps").read_text()
        return False

    kept = RawRecording(run.folder)
    is_readable = kept.is_whole and kept.manifest["state"] == "recording"
    is_readable &= all(check_file(run.folder / f"{stream}.bin")[0] == [] for stream in ("events", "details"))
    if not wait_until(lambda: runs() or not Path(f"/proc/{pid}").exists()):
        return False
    if runs() and not wait_until(lambda: not any(is_changed(pid, place) for place in places)):
        return False
    return is_readable and (not Path(f"/proc/{pid}").exists() or run.ends_well())


@pytest.mark.long
def test_killed_at_any_moment_it_leaves_a_living_target_without_probes_and_a_readable_recording(
    of_sites: Path, tmp_path: Path
) -> None:
    draw = random.Random(20)
    places = [row["offset"] for row in json.loads(of_sites.read_text())["files"][-1]["rows"]]
    for number in range(KILLS):
        switching = ("--max-overhead", "0.1") if number % 2 else ()  # which removes probes and places them again all the time
        run = Running(of_sites, tmp_path / str(number), *switching)
        try:
            time.sleep(draw.uniform(0, 4))
            pid = run.target()
            run.recorder.kill()
            run.recorder.wait()
            assert wait_until(lambda folder=run.folder: not processes(folder))
            if pid:
                assert left_alone(run, pid, places), run.output.read_text()
        finally:
            run.close()


def test_a_full_disk_ends_the_recording_in_one_line_and_the_target_lives(of_sites: Path, tmp_path: Path) -> None:
    small = f'mount -t tmpfs -o size=600k none {tmp_path} && exec "$@"'
    command = f"{RECORDER} --plan {of_sites} -o {tmp_path}/run -- {sys.executable} {STEPS} 30000 0"
    read = f"cd {ROOT}; {command}; echo status $?; "
    read += f"{sys.executable} -m moescope query {tmp_path}/run 'SELECT count(*) > 100 AS many FROM tokens'; "
    read += f"grep -o '.state.: .[a-z]*' {tmp_path}/run/manifest.json"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", small, "sh", "sh", "-c", read], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert f"status {FAILED}" in done.stdout and "True" in done.stdout and "done " in done.stdout
    assert '"state": "recording' in done.stdout
    assert done.stderr.count("written") == 1, done.stderr


def test_it_follows_a_process_that_runs(of_sites: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    target = subprocess.Popen(
        [sys.executable, STEPS, "100000", "0.005", "--until", str(end)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        assert wait_until(lambda: str(SITES) in Path(f"/proc/{target.pid}/maps").read_text())
        words = ["--plan", str(of_sites), "-o", str(tmp_path / "run"), "--pid", str(target.pid), "--duration", "2"]
        done = subprocess.run([str(RECORDER), *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0 and "keeps running" in done.stderr, done.stderr
        run = RawRecording(tmp_path / "run")
        sequence = run.records("token_end")["seq"].tolist()
        assert len(sequence) > 10 and sequence == list(range(sequence[0], sequence[0] + len(sequence)))
        assert target.poll() is None and run.manifest["target"]["exit_code"] is None
    finally:
        end.touch()
        target.wait(PATIENCE_S)


def test_it_needs_less_memory_than_it_may(of_sites: Path, tmp_path: Path) -> None:
    """Its largest resident set, in which both rings count twice, for each is mapped twice in a row; and its size on disk."""
    assert RECORDER.stat().st_size < 5 << 19
    words = [str(RECORDER), "--plan", str(of_sites), "-o", str(tmp_path / "run"), "--", sys.executable, STEPS, "3000", "0"]
    recorder = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while recorder.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{recorder.pid}/status").read_text().splitlines()
            most = max(most, int(next(line for line in lines if line.startswith("VmHWM")).split()[1]))
        time.sleep(0.02)
    assert 0 < most < MOST_MIB << 10, most
