"""Features that tests need from the machine, detected by trying them; the final summary shows what ran and what could not."""

import contextlib
import fcntl
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from moescope.answers import json_text
from moescope.schemas import json_schema
from tests.golden import golden  # noqa: F401, a fixture
from tracer.recording.format import RecordingError
from workloads.host_time import HostTime
from workloads.raw_records import RawRecording

ROOT = Path(__file__).resolve().parent.parent
RECORDER = ROOT / "tracer" / "recorder" / "bin" / f"moescope-recorder-{os.uname().machine}"
SHARED = "MOESCOPE_TESTS_SHARED"
"""The environment variable with the folder for things that are made once per session of several workers."""
LONG = os.environ.get("MOESCOPE_TESTS") == "long"
"""Whether tests repeat and draw as often as `make test-long` asks for."""


def drawn(examples: int) -> int:
    """How many examples a test draws that draws so many in `make test`."""
    return 20 * examples if LONG else examples


# On a shared machine, running and drawing an example may take any time, which says nothing about the code. Examples are the same
# every time, so that results do not vary between changes. For random ones: --hypothesis-profile=default.
hypothesis.settings.register_profile(
    "shared", deadline=None, derandomize=True, max_examples=drawn(15), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")


FIRST_FILES = (
    *("test_install", "test_tracer_bcc", "test_compare_planted", "test_tracer_compare", "test_runtime_models"),
    *("test_runtime_quality", "test_end_to_end", "test_tracer_lifecycle", "test_docs_commands", "test_hostile"),
    *("test_llamacpp_truth", "test_on_device", "test_views_browser", "test_views_pages", "test_truth_llama"),
    *("test_tracer_kernels", "test_compare", "test_tracer_builds", "test_tracer_truth", "test_tracer_series"),
)
"""The files that take longest, run first, so that no worker is still busy with one at the end while the others are idle."""


def rest_long(values: Iterable[Any], *short: object) -> list[Any]:
    """Parameters of a test, of which `make test` takes only those that are `short`."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.fixture(autouse=True)
def nothing_was_learnt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test begins without the graph loops that others have taught."""
    monkeypatch.setenv("MOESCOPE_CACHE", str(tmp_path / "learnt"))


@pytest.fixture(autouse=True)
def answers_keep_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer that a test lets a verb print in this process as JSON is as moescope/answers.toml declares it."""

    def checked(value: Any) -> str:
        text = json_text(value)
        if isinstance(value, dict) and "schema" in value:
            validator(value["schema"]).validate(json.loads(text))
        return text

    if find_spec("jsonschema"):  # not in the guests of tests/vm
        monkeypatch.setattr("moescope.answers.json_text", checked)


@cache
def validator(schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json_schema(schema.split("/")[1]))


@cache
def can_probe() -> str:
    """Empty if BPF programs can be loaded and uprobes attached, otherwise the reason why not."""
    from tracer.errors import TracerError
    from tracer.kernel.trial import try_programs

    if os.geteuid() != 0:
        return "not root"
    try:
        costs = try_programs().costs
    except TracerError as error:
        return str(error)
    return "" if all(costs[kind] > 0 for kind in ("emulated", "stepped")) else "probes on functions are not hit"


@cache
def can_use_bcc() -> str:
    """Empty if BCC can compile against this kernel's headers and load, otherwise why not. If so, our sources must work too."""
    from tracer.errors import TracerError
    from tracer.kernel.bcc_helper import import_bcc

    if can_probe():
        return can_probe()
    try:
        bcc = import_bcc()
        small = bcc.BPF(text=b"#include <linux/sched.h>\nint nothing(void *context) { return 0; }")
        small.load_func(b"nothing", bcc.BPF.KPROBE)
        small.cleanup()
    except TracerError as error:
        return str(error)
    except Exception as error:  # BCC raises many kinds
        return " ".join(str(error).split())
    return ""


@cache
def can_run_htp() -> str:
    """Empty if a QNN HTP device or its emulator responds, otherwise the reason why not."""
    script = (
        "import onnxruntime as ort, onnxruntime_qnn as q;"
        "ort.register_execution_provider_library('QNNExecutionProvider', q.get_library_path());"
        "assert any(d.ep_name == 'QNNExecutionProvider' for d in ort.get_ep_devices())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else "onnxruntime-qnn does not work here"


@cache
def can_drop_pages() -> str:
    """Empty if a temporary file's pages can be dropped and are then read from a device, otherwise the reason why not."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * mmap.PAGESIZE)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            mapped[0]
            dropped = resource.getrusage(resource.RUSAGE_SELF).ru_majflt > before
    return "" if dropped else f"files in {tempfile.gettempdir()} are never read from a device"


@cache
def can_make_wheels() -> str:
    """Empty if clang and a package index for pip are available, otherwise which is missing."""
    if not shutil.which("clang"):
        return "clang is not installed"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--retries",
        "0",
        "--timeout",
        "10",
    ]
    done = subprocess.run([*command, "scikit-build-core"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "pip reaches no package index"


OLD_PACKAGES = ("xllamacpp==0.1.3", "xllamacpp==0.2.0")


def old_package(name: str) -> Callable[[Path], object]:
    """A function that puts a package into a folder, where pip finds it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--timeout", "10", name]
    return lambda folder: subprocess.run([*command, "--target", str(folder)], capture_output=True, check=False)


def has_old_packages() -> str:
    """Empty if pip finds packages of llama.cpp of 2025 for this machine and Python, otherwise which is missing."""
    missing = [name for name in OLD_PACKAGES if not list(made_once(name, old_package(name)).rglob("*.so"))]
    return f"pip finds no {', '.join(missing)}" if missing else ""


def can_use_vulkan() -> str:
    """Empty if llama.cpp's libraries for Vulkan can be fetched and there is a driver, otherwise which is missing."""
    drivers = os.environ.get("VK_ICD_FILENAMES") or [
        *Path("/usr/share/vulkan/icd.d").glob("*"),
        *Path("/etc/vulkan/icd.d").glob("*"),
    ]
    if platform.machine() != "x86_64" or not shutil.which("npm"):
        return "npm does not bring llama.cpp for Vulkan: not installed, or not x86-64"
    return "" if drivers else "no driver of Vulkan's is installed (Debian: mesa-vulkan-drivers)"


def can_build_blas() -> str:
    """Empty if a compiler, OpenBLAS and the means to fetch llama.cpp's libraries are available, otherwise what is missing."""
    missing = [name for name in ("npm", "g++") if not shutil.which(name)]
    look = ["g++", "-shared", "-include", "cblas.h", "-x", "c++", "/dev/null", "-lopenblas", "-o", "/dev/null"]
    if not missing and subprocess.run(look, capture_output=True, check=False).returncode:
        missing = ["libopenblas-dev"]
    return f"{missing[0]} is not installed" if missing else ""


FEATURES: dict[str, Callable[[], str]] = {
    "recorder": lambda: "" if RECORDER.exists() else "moescope-recorder has not been built: make recorders",
    "probes": can_probe,
    "bcc": can_use_bcc,
    "htp": can_run_htp,
    "dropping pages": can_drop_pages,
    "chromium": lambda: (
        "" if shutil.which("chromium") and shutil.which("chromedriver") else "chromium or chromedriver is not installed"
    ),
    "wheels": can_make_wheels,
    "old packages": has_old_packages,
    "llama.cpp on Vulkan": can_use_vulkan,
    "BLAS": can_build_blas,
    "bpftrace": lambda: "" if shutil.which("bpftrace") else "bpftrace is not installed",
}


@cache
def lacking(feature: str) -> str:
    """Why a feature is missing, empty if it is available; tried once for all workers."""

    def tried(folder: Path) -> None:
        (folder / "reason").write_text(FEATURES[feature]())

    return (made_once(f"feature {feature}", tried) / "reason").read_text()


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills once for all workers of this session; others wait meanwhile."""
    folder = Path(os.environ[SHARED]) / name
    made = folder.with_name(f"{name}.made")
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what verbs print into tests/data/golden")


def pytest_configure(config: pytest.Config) -> None:
    for name in ("SUDO_UID", "SUDO_GID", "SUDO_USER"):  # else the tracer writes as that user, who may not into tests' folders
        os.environ.pop(name, None)
    if not hasattr(config, "workerinput"):  # workers inherit the environment of the main process
        os.environ[SHARED] = tempfile.mkdtemp(prefix="moescope-tests-")
        os.environ["MOESCOPE_CACHE"] = os.path.join(os.environ[SHARED], "learnt")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[SHARED]))
        config.option.loadscopereorder = False  # otherwise xdist begins with the files that have many tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST_FILES.index(item.path.stem) if item.path.stem in FIRST_FILES else len(FIRST_FILES))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for feature in mark.args:
            reason = lacking(feature)
            if reason:
                pytest.skip(f"{feature}: {reason}")


@contextlib.contextmanager
def admitted(alone: bool) -> Iterator[None]:
    """Hold a lock for one test: shared with tests of other workers, or exclusive. Waiting tests block later ones."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".tests-door", "w") as door, open(ROOT / "build" / ".tests-room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with admitted(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("features of this machine")
    for name in FEATURES:
        if not Path(os.environ[SHARED], f"feature {name}.made").exists():
            continue  # no test that ran needs it: a few tests begin and end without trying everything
        reason = lacking(name)
        terminalreporter.write_line(f"{name}: {'yes' if not reason else 'no, ' + reason}")


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    """The last output of a traced program, as JSON; the tracer may print something after it."""
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith(("[", "{"))))


def trace(*arguments: str, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `moescope` like a user."""
    return subprocess.run(
        [sys.executable, "-m", "tracer", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def begin_trace(*arguments: str) -> subprocess.Popen[str]:
    """Start `moescope` without waiting for it."""
    command, pipe = [sys.executable, "-m", "tracer", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True)


def manifest_when(done: Callable[[dict], object], folder: Path, tracer: subprocess.Popen[str], patience_s: float = 120) -> dict:
    """The manifest of a recording in progress, once `done` is true for it."""
    deadline, path = time.monotonic() + patience_s, folder / "manifest.json"
    while time.monotonic() < deadline:
        manifest = json.loads(path.read_text()) if path.exists() else {}
        if manifest and done(manifest):
            return manifest
        assert tracer.poll() is None, tracer.stderr and tracer.stderr.read()
        time.sleep(0.05)
    raise AssertionError(manifest)


RECORDED_BY = {"local": (), "exec": ("--on", "exec:sh -c", "--libraries", str(ROOT / "runtime" / "telemetry" / "_probes.so"))}
"""Where the recorder's plan comes from: asked for at once, or a file made beforehand, as for another machine → the options."""


@pytest.fixture(scope="module", params=RECORDED_BY)
def on(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options for either recorder."""
    if request.param == "exec" and lacking("recorder"):
        pytest.skip(lacking("recorder"))
    return RECORDED_BY[request.param]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A machine of its own as far as its temporary folder goes: a script that runs a line with that folder for /var/tmp."""
    there = tmp_path / "device"
    there.mkdir()
    program = tmp_path / "shell"
    program.write_text(f'#!/bin/sh\nexec unshare -m sh -c \'mount --bind {there} /var/tmp && exec sh -c "$1"\' sh "$1"\n')
    program.chmod(0o755)
    return program


def forget_loops() -> None:
    """Forget the graph loops that this test's recordings have taught."""
    shutil.rmtree(os.environ["MOESCOPE_CACHE"], ignore_errors=True)


over_recorders = pytest.mark.parametrize(
    "on",
    [
        pytest.param(RECORDED_BY["local"], id="local", marks=pytest.mark.needs("probes", "recorder")),
        pytest.param(RECORDED_BY["exec"], id="exec", marks=[pytest.mark.needs("probes", "recorder"), pytest.mark.long]),
    ],
)


def recorded_when(done: Callable[[RawRecording], object], folder: Path, tracer: subprocess.Popen[str]) -> None:
    """Wait until `done` is true for a recording in progress, here or (`remote.json`) where `--on` makes it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        state = folder / "remote.json"
        with contextlib.suppress(OSError, ValueError, RecordingError):  # it has not begun, or is being fetched
            place = Path(json.loads(state.read_text())["folder"]) / "recording" if state.exists() else folder
            if done(RawRecording(place)):
                return
        assert tracer.poll() is None, tracer.stderr and tracer.stderr.read()
        time.sleep(0.2)
    raise AssertionError(f"{folder}: not within the time")


def recorded_so_far(folder: Path, kind: str) -> int:
    """How many records of a kind are in a recording in progress; its manifest tells that 5 s late."""
    with contextlib.suppress(OSError, ValueError, RecordingError):  # it has not begun
        return len(RawRecording(folder).records(kind))
    return 0


class DemoRun:
    """A traced run of the bundled demo with its results."""

    def __init__(self, folder: Path, output: str, stolen: float = 0.0):
        self.folder, self.output, self.stolen = folder, output, stolen
        self.log = json.loads((folder / "runtime.json").read_text())
        self.manifest = json.loads((folder / "manifest.json").read_text())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter and write to."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def wait_until(condition: Callable[[], object], patience_s: float = 120) -> bool:
    """Whether a condition holds before patience is lost."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def demo() -> DemoRun:
    """A traced run of the main job with the default loader and views, after one run that converts and compiles the model."""

    def make(folder: Path) -> None:
        trace("run", "--no-views", "--levels", "token", "-o", str(folder / "first"))
        host = HostTime()
        done = trace("run", "-o", str(folder / "run"))
        assert done.returncode == 0, done.stderr
        (folder / "output").write_text(done.stdout + done.stderr)
        (folder / "stolen").write_text(str(host.share()))

    folder = made_once("demo", make)
    return DemoRun(folder / "run", (folder / "output").read_text(), float((folder / "stolen").read_text()))
