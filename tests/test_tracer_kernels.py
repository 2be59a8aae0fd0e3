"""What a kernel lacks or refuses costs that one thing: the session goes on, and says what it goes without."""

import errno
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_tracer_custom import COUNT, DECLARED
from tests.vm import table
from tracer.errors import FAILED, ProbeError
from tracer.kernel import features, loaders
from tracer.kernel.btf import VMLINUX
from tracer.kernel.libbpf import BpfObject, Kernel, Refused, last_lines
from tracer.kernel.loaders import LibbpfLoader
from tracer.probes import denials, tracefs
from tracer.recording.paths import BPF_OBJECT
from workloads.bpf_objects import compile_object
from workloads.compiling import compiled
from workloads.raw_records import RawRecording

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
ALTERED = str(ROOT / "workloads" / "programs" / "altered_tracer.py")
# A program under the name of one of ours that reads memory through a number, which no verifier lets pass.
REFUSED = """
BARE_UPROBE(moescope_token_end)
{
	u64 address = ARG1(ctx), value;

	asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(value) : "r"(address));
	return value;
}
"""

MANY = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#define GOOD(name) SEC("uprobe") int name(void *ctx) { return 0; }
#define BAD(name) SEC("uprobe") int name(u64 *ctx) { return *(volatile int *)ctx[0]; }
typedef unsigned long long u64;
GOOD(good_1) BAD(bad_1) GOOD(good_2) BAD(bad_2) GOOD(good_3) GOOD(good_4) BAD(bad_3)
char gpl[] SEC("license") = "Dual BSD/GPL";
"""


@pytest.fixture(scope="module")
def refused_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's BPF sources, and their object, with one program that the kernel refuses."""
    folder = tmp_path_factory.mktemp("refused") / "bpf"
    shutil.copytree(ROOT / "bpf", folder)
    source = folder / "moescope.bpf.c"
    renamed = "#define moescope_token_end moescope_token_end_whole\n"
    token = '#include "token.bpf.c"\n'
    source.write_text(source.read_text().replace(token, f"{renamed}{token}#undef moescope_token_end\n{REFUSED}"))
    arch = "arm64" if platform.machine() == "aarch64" else "x86"
    compile_object(source, folder / "moescope.bpf.o", arch)
    return folder


def altered(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The tracer on a kernel that seems to be another."""
    return subprocess.run(
        [sys.executable, ALTERED, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.needs("probes")
@pytest.mark.parametrize("loader", ["libbpf", pytest.param("bcc", marks=pytest.mark.needs("bcc"))])
def test_a_refused_program_is_named_and_the_rest_is_recorded(tmp_path: Path, refused_sources: Path, loader: str) -> None:
    options = ("--no-views", "--loader", loader, "--levels", "token,operator", "-o", str(tmp_path / "run"))
    command = (sys.executable, STEPS, "200", "0", "--operators", "2")
    done = altered("--bpf", str(refused_sources), "run", *options, "--", *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("op_begin")) == len(run.records("op_end")) == 400
    assert len(run.records("token_end")) == 0
    assert "moescope_token_begin" not in {row["program"] for row in run.manifest["probes"]}  # a begin without its end
    said = next(line for line in done.stderr.splitlines() if "refused moescope_token_end" in line)
    assert "invalid mem access" in said
    assert "level token is recorded without it" in said


@pytest.mark.needs("probes")
def test_a_program_is_verified_twice_at_most_however_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, "many.bpf.c", MANY)
    monkeypatch.setitem(loaders.BPF_OBJECTS, "ring", compile_object(source, tmp_path / "many.bpf.o", "x86"))
    verified: Counter[str] = Counter()
    load = BpfObject.load

    def counted(opened: BpfObject, wanted: set[str]) -> None:
        given = [name for name in opened.programs if name in wanted]
        try:
            load(opened, wanted)
        except Refused as refusal:
            given = given[: given.index(refusal.program) + 1]
            raise
        finally:
            verified.update(given)

    monkeypatch.setattr(BpfObject, "load", counted)
    kernel = Kernel()
    loader = LibbpfLoader(kernel, set(BpfObject(kernel, loaders.BPF_OBJECTS["ring"]).programs), {})
    assert set(loader.refused) == {"bad_1", "bad_2", "bad_3"}
    assert verified == Counter({"bad_1": 1, "bad_2": 1, "bad_3": 1, "good_1": 2, "good_2": 2, "good_3": 2, "good_4": 2})
    assert all(loader.program_fd(f"good_{number}") > 0 for number in range(1, 5))
    loader.close()


@pytest.mark.needs("probes")
def test_what_is_wrong_with_the_maps_is_no_refused_program() -> None:
    opened = BpfObject(Kernel(), BPF_OBJECT)
    opened.resize_map("lost", 0)
    with pytest.raises(ProbeError, match=r"lost.*failed to create"):
        opened.load(set())
    opened.close()


@pytest.mark.needs("probes")
def test_every_program_is_accepted_with_and_without_what_newer_kernels_offer() -> None:
    kernel = Kernel()
    everything = set(BpfObject(kernel, BPF_OBJECT).programs)
    for offered in (kernel.offered, type(kernel.offered)(task_btf=False, cookies=False)):
        kernel.__dict__["offered"] = offered
        loader = LibbpfLoader(kernel, everything, {})
        assert loader.refused == {}
        loader.close()


def test_the_verifiers_last_lines_are_what_it_said_before_its_statistics() -> None:
    log = "libbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n0: (b7) r0 = 0\nR1 invalid mem access 'scalar'\nprocessed 3 insns\n"
    assert last_lines(log) == "0: (b7) r0 = 0 | R1 invalid mem access 'scalar'"


@pytest.mark.needs("probes")
def test_libraries_are_noticed_where_there_are_no_events_of_single_system_calls(tmp_path: Path) -> None:
    options = ("--no-views", "--levels", "token,io", "-o", str(tmp_path / "run"))
    command = (sys.executable, STEPS, "300", "0", "--late", "0.5", "--child")
    done = altered("--without", "syscalls", "run", *options, "--", *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert sorted(Counter(run.records("token_begin")["pid"].tolist()).values()) == [300, 300]
    assert len(run.records("read_begin")) == len(run.records("read_end")) > 100
    symbols = {row["symbol"] for row in run.manifest["probes"] if row["engine"] == "kernel"}
    assert {"raw_syscalls:sys_enter", "raw_syscalls:sys_exit"} <= symbols
    assert not any(symbol.startswith("syscalls:") for symbol in symbols)
    assert "no tracepoint" not in done.stderr


@pytest.mark.needs("probes")
def test_named_functions_are_told_apart_where_probes_have_no_cookies(tmp_path: Path) -> None:
    program, declared = compiled(tmp_path / "named", "named.c", flags=("-fno-ipa-ra", "-Wno-error")), tmp_path / "my.toml"
    declared.write_text(DECLARED.format(library=str(program)))
    calls = {}
    for name, ways in (("with", ()), ("without", ("--without-cookies",))):
        options = ("--no-views", "--levels", "expert,operator,token", "--probes", str(declared), "-o", str(tmp_path / name))
        done = altered(*ways, "run", *options, "--", str(program), str(COUNT), "20")
        assert done.returncode == 0, done.stderr
        run = RawRecording(tmp_path / name)
        calls[name] = [run.records(kind)[["probe", "values"]].tolist() for kind in ("call_begin", "call_end")]
    assert len({probe for probe, _ in calls["with"][0]}) > 1
    assert [[probe for probe, _ in rows] for rows in calls["with"]] == [[probe for probe, _ in rows] for rows in calls["without"]]


@pytest.mark.needs("probes")
def test_a_file_holds_the_types_of_a_kernel_that_holds_none(tmp_path: Path) -> None:
    types = write(tmp_path, "types.btf", "")
    types.write_bytes(VMLINUX.read_bytes())
    options = ("--no-views", "--levels", "token,sched", "-o", str(tmp_path / "run"))
    command = ("--", sys.executable, STEPS, "50", "0.001")
    refused = altered("--without-btf", "run", *options, *command)
    assert refused.returncode == FAILED
    assert "--btf FILE" in refused.stderr
    done = altered("--without-btf", "run", "--btf", str(types), *options, *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("token_end")) == 50
    assert len(run.records("sched_switch")) >= 50
    assert run.records("token_end")["min_flt"].max() > 0  # read without the typed task


@pytest.mark.needs("probes")
def test_a_kernel_without_uprobes_still_shows_its_scheduler(tmp_path: Path) -> None:
    command = ("--", sys.executable, STEPS, "50", "0.001")
    done = altered("--without-uprobes", "run", "--no-views", "-o", str(tmp_path / "run"), *command)
    assert done.returncode == 0, done.stderr
    assert "CONFIG_UPROBE_EVENTS" in done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("sched_switch")) >= 50
    assert len(run.records("token_end")) == 0
    nothing = altered("--without-uprobes", "run", "--levels", "token", "-o", str(tmp_path / "other"), *command)
    assert nothing.returncode == FAILED
    assert "only the levels sched and io are available" in nothing.stderr


def test_tracefs_is_found_wherever_it_is_mounted(tmp_path: Path) -> None:
    place = tmp_path / "somewhere"
    (place / "events" / "sched").mkdir(parents=True)
    rows = f"proc /proc proc rw 0 0\ntracefs {tmp_path} tracefs rw 0 0\ntracefs {place} tracefs rw 0 0\n"
    assert tracefs.mounted(rows) == [place]


def test_the_kernels_options_are_read_where_a_distribution_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "config.gz"
    packed.write_bytes(gzip.compress(b"CONFIG_UPROBES=y\n# CONFIG_FTRACE_SYSCALLS is not set\n"))
    monkeypatch.setattr(features, "CONFIGS", (str(packed),))
    features.kernel_config.cache_clear()
    assert features.option_state("CONFIG_UPROBES") == "CONFIG_UPROBES=y"
    assert features.option_state("CONFIG_FTRACE_SYSCALLS") == "CONFIG_FTRACE_SYSCALLS is not set"
    monkeypatch.setattr(features, "CONFIGS", ())
    features.kernel_config.cache_clear()
    assert features.option_state("CONFIG_UPROBES") == "CONFIG_UPROBES"
    features.kernel_config.cache_clear()


@pytest.mark.needs("probes")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_root_without_capabilities_is_told_so_and_not_that_something_is_missing(tmp_path: Path) -> None:
    bare = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", sys.executable, "-m", "tracer"]
    run = subprocess.run(
        [*bare, "run", "-o", str(tmp_path / "run"), "--", "true"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == FAILED
    assert "lacks CAP_BPF and CAP_PERFMON" in run.stderr
    doctor = subprocess.run([*bare, "doctor", "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)}
    assert doctor.returncode == 1
    assert checks["kernel BTF"]["ok"] and checks["uprobes"]["ok"]
    assert "CAP_BPF" in checks["BPF is allowed"]["seen"]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_is_forbidden_is_told_apart_from_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert denials.why_denied(errno.ENOENT) == ""
    monkeypatch.setattr(denials, "LOCKDOWN", write(tmp_path, "lockdown", "none integrity [confidentiality]\n"))
    monkeypatch.setattr(denials, "SELINUX", write(tmp_path, "enforce", "1"))
    said = denials.why_denied(errno.EPERM)
    assert "locked down" in said
    assert "SELinux" in said
    monkeypatch.setattr(denials, "LOCKDOWN", write(tmp_path, "lockdown", "[none] integrity confidentiality\n"))
    monkeypatch.setattr(denials, "SELINUX", tmp_path / "absent")
    assert "locked down" not in denials.why_denied(errno.EPERM)


def test_the_table_of_kernels_is_what_the_rungs_said() -> None:
    text = table.PAGE.read_text()
    rows = json.loads(table.RESULTS.read_text())
    assert table.page(text, rows) == text
    failed = table.merged(rows, [{**next(row for row in rows if row["rung"] == "programs"), "ok": False}])
    assert "FAILED" in table.page(text, failed) and len(failed) == len(rows)
