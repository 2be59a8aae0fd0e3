"""What a kernel lacks or refuses costs that one thing: the session goes on, and says what it goes without."""

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_tracer_custom import COUNT, DECLARED
from tests.vm import table
from tracer.errors import FAILED
from tracer.kernel import features
from tracer.kernel.features import VMLINUX
from tracer.kernel.trial import recorder_path
from tracer.probes import denials, tracefs
from workloads.altered_recorder import LIBRARIES, build_recorder
from workloads.compiling import compile_c
from workloads.raw_records import RawRecording

STEPS = str(ROOT / "workloads" / "programs" / "steps.py")
ALTERED = str(ROOT / "workloads" / "programs" / "altered_tracer.py")
# Programs that read memory through a number, which no verifier lets pass; the first has the name of one of ours.
REFUSED = """
#define REFUSED_PROGRAM(name) \\
	BARE_UPROBE(name) \\
	{ \\
		u64 address = ARG1(ctx), value; \\
		asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(value) : "r"(address)); \\
		return value; \\
	}
REFUSED_PROGRAM(moescope_token_end)
REFUSED_PROGRAM(bad_1)
BARE_UPROBE(good_1)
{
	return 0;
}
REFUSED_PROGRAM(bad_2)
"""
REFUSED_NAMES = {"moescope_token_end", "bad_1", "bad_2"}
# Names each program that is given to the kernel, by libbpf's own function for that.
NAMING = """
#include <bpf/bpf.h>
#include <stdio.h>
#define LOAD(name) int name(enum bpf_prog_type type, const char *name_of_it, const char *license, const struct bpf_insn *code, \\
	size_t count, struct bpf_prog_load_opts *options)
LOAD(__real_bpf_prog_load);
LOAD(__wrap_bpf_prog_load)
{
	fprintf(stderr, "given %s\\n", name_of_it && *name_of_it ? name_of_it : "nameless");
	return __real_bpf_prog_load(type, name_of_it, license, code, count, options);
}
"""
LACKING = tuple(
    ("kernel_features.c", old, new)
    for old, new in (
        (
            "return has_helper(BPF_FUNC_get_attach_cookie);",
            'return !getenv("NO_COOKIES") && has_helper(BPF_FUNC_get_attach_cookie);',
        ),
        ("return !access(UPROBES", 'return !getenv("NO_UPROBES") && !access(UPROBES'),
        (" || has_multi_links();", ' || (!getenv("NO_UPROBES") && has_multi_links());'),
    )
)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's BPF sources with programs that the kernel refuses."""
    folder = tmp_path_factory.mktemp("refusing") / "bpf"
    shutil.copytree(ROOT / "bpf", folder)
    source = folder / "moescope.bpf.c"
    renamed = "#define moescope_token_end moescope_token_end_whole\n"
    token = '#include "token.bpf.c"\n'
    source.write_text(source.read_text().replace(token, f"{renamed}{token}#undef moescope_token_end\n{REFUSED}"))
    return source


@pytest.fixture(scope="module")
def other_recorder(refusing: Path) -> Path:
    """One recorder for all: of those sources, with what NO_COOKIES and NO_UPROBES in the environment take from the kernel."""
    if not LIBRARIES.exists():
        pytest.skip("the recorder's libraries are not there: run `make recorders`")
    naming = write(refusing.parent, "naming.c", NAMING)
    return build_recorder(refusing.parent, refusing, LACKING, ("-Wl,--wrap=bpf_prog_load", str(naming)))


def traced(*words: str, **lacking: str) -> subprocess.CompletedProcess[str]:
    """Run the tracer, with more in its environment."""
    environment = {**os.environ, **lacking, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def altered(*arguments: str, **lacking: str) -> subprocess.CompletedProcess[str]:
    """The tracer with another recorder, or other sources."""
    return traced(sys.executable, ALTERED, *arguments, **lacking)


def without(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The tracer where a folder of the kernel's is empty, in a mount namespace of its own."""
    hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder))
    return traced(*hidden, sys.executable, "-m", "tracer", *arguments)


@pytest.mark.needs("probes")
@pytest.mark.parametrize("loader", ["libbpf", pytest.param("bcc", marks=[pytest.mark.long, pytest.mark.needs("bcc")])])
def test_a_refused_program_is_named_and_the_rest_is_recorded(tmp_path: Path, request: pytest.FixtureRequest, loader: str) -> None:
    other = ("--source", str(request.getfixturevalue("refusing")))
    if loader == "libbpf":
        other = ("--recorder", str(request.getfixturevalue("other_recorder")))
    options = ("--no-views", "--loader", loader, "--levels", "token,operator", "-o", str(tmp_path / "run"))
    done = altered(*other, "run", *options, "--", sys.executable, STEPS, "200", "0", "--operators", "2")
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("op_begin")) == len(run.records("op_end")) == 400
    assert len(run.records("token_end")) == 0
    assert "moescope_token_begin" not in {row["program"] for row in run.manifest["probes"]}  # a begin without its end
    said = [line for line in run.manifest["warnings"] if "moescope_token_end" in line]
    assert "invalid mem" in " ".join(said)
    assert said[0] in done.stderr


@pytest.mark.needs("probes")
def test_a_program_is_verified_twice_at_most_however_many_are_refused(other_recorder: Path) -> None:
    done = traced(str(other_recorder), "--try-programs")
    trial = json.loads(done.stdout)
    given = Counter(line.split()[1] for line in done.stderr.splitlines() if line.startswith("given "))
    assert set(trial["refused"]) == REFUSED_NAMES
    assert all("invalid mem" in why for why in trial["refused"].values())  # not the verifier's statistics behind it
    assert {"good_1", "ggml_op_begin"} | REFUSED_NAMES <= given.keys()
    assert {name for name, count in given.items() if count > 2} <= {"nameless"}  # libbpf itself asks twice for a refused one: why


@pytest.mark.needs("probes")
def test_a_ring_whose_bytes_are_no_number_of_32_bits_is_refused_by_its_option(tmp_path: Path) -> None:
    done = traced(sys.executable, "-m", "tracer", "run", "--ring-mib", "4096", "-o", str(tmp_path / "run"), "--", "true")
    assert done.returncode == FAILED and "--ring-mib 4096" in done.stderr and done.stderr.count("\n") <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.needs("probes")
def test_libraries_are_noticed_where_there_are_no_events_of_single_system_calls(tmp_path: Path) -> None:
    options = ("--no-views", "--levels", "token,io", "-o", str(tmp_path / "run"))
    command = (sys.executable, STEPS, "300", "0", "--late", "0.5", "--child")
    done = without(tracefs.tracefs_folder() / "events" / "syscalls", "run", *options, "--", *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert sorted(Counter(run.records("token_begin")["pid"].tolist()).values()) == [300, 300]
    assert len(run.records("read_begin")) == len(run.records("read_end")) > 100
    assert len(run.records("write")) > 0
    symbols = {row["symbol"] for row in run.manifest["probes"] if row["engine"] == "kernel"}
    assert {"raw_syscalls:sys_enter", "raw_syscalls:sys_exit"} <= symbols
    assert not any(symbol.startswith("syscalls:") for symbol in symbols)
    assert "no tracepoint" not in done.stderr


@pytest.mark.needs("probes")
def test_named_functions_are_told_apart_where_probes_have_no_cookies(tmp_path: Path, other_recorder: Path) -> None:
    program, declared = compile_c(tmp_path / "named", "named.c", flags=("-fno-ipa-ra", "-Wno-error")), tmp_path / "my.toml"
    declared.write_text(DECLARED.format(library=str(program)))
    calls = {}
    for name, lacking in (("with", {}), ("without", {"NO_COOKIES": "1"})):
        options = ("--no-views", "--levels", "expert,operator,token", "--probes", str(declared), "-o", str(tmp_path / name))
        command = ("--", str(program), str(COUNT), "20")
        done = altered("--recorder", str(other_recorder), "run", *options, *command, **lacking)
        assert done.returncode == 0, done.stderr
        run = RawRecording(tmp_path / name)
        calls[name] = [run.records(kind)[["probe", "values"]].tolist() for kind in ("call_begin", "call_end")]
    assert len({probe for probe, _ in calls["with"][0]}) > 1
    assert [[probe for probe, _ in rows] for rows in calls["with"]] == [[probe for probe, _ in rows] for rows in calls["without"]]


@pytest.mark.needs("probes")
def test_a_file_holds_the_types_of_a_kernel_that_holds_none(tmp_path: Path) -> None:
    types = tmp_path / "types.btf"
    types.write_bytes(VMLINUX.read_bytes())
    options = ("--no-views", "--levels", "token,sched", "-o", str(tmp_path / "run"))
    command = ("--", sys.executable, STEPS, "50", "0.001")
    refused = without(VMLINUX.parent, "run", *options, *command)
    assert refused.returncode == FAILED
    assert "--btf FILE" in refused.stderr
    done = without(VMLINUX.parent, "run", "--btf", str(types), *options, *command)
    assert done.returncode == 0, done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("token_end")) == 50
    assert len(run.records("sched_switch")) >= 50
    assert run.records("token_end")["min_flt"].max() > 0  # read without the typed task


@pytest.mark.needs("probes")
def test_a_kernel_without_uprobes_still_shows_its_scheduler(tmp_path: Path, other_recorder: Path) -> None:
    other, command = ("--recorder", str(other_recorder), "run", "--no-views"), ("--", sys.executable, STEPS, "50", "0.001")
    done = altered(*other, "-o", str(tmp_path / "run"), *command, NO_UPROBES="1")
    assert done.returncode == 0, done.stderr
    assert "CONFIG_UPROBE_EVENTS" in done.stderr
    run = RawRecording(tmp_path / "run")
    assert len(run.records("sched_switch")) >= 50
    assert len(run.records("token_end")) == 0
    nothing = altered(*other, "--levels", "token", "-o", str(tmp_path / "other"), *command, NO_UPROBES="1")
    assert nothing.returncode == FAILED
    assert all(level in nothing.stderr.split() for level in ("sched", "io"))


def test_tracefs_is_found_wherever_it_is_mounted(tmp_path: Path) -> None:
    place = tmp_path / "somewhere"
    (place / "events" / "sched").mkdir(parents=True)
    rows = f"proc /proc proc rw 0 0\ntracefs {tmp_path} tracefs rw 0 0\ntracefs {place} tracefs rw 0 0\n"
    assert tracefs.tracefs_mounts(rows) == [place]


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
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
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


@pytest.mark.needs("probes")
def test_recorders_that_measure_at_the_same_time_do_not_hit_each_others_probes() -> None:
    command = [str(recorder_path()), "--try-programs"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    costs = [json.loads(each.communicate()[0])["costs"] for each in running]
    assert all(ns > 0 for each in costs for ns in each.values())
