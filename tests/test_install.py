"""A wheel, installed in an empty folder: no compiler, no checkout on the path."""

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, lacking
from workloads.compiling import WITH_SITES, compile_c

pytestmark = [pytest.mark.long, pytest.mark.needs("probes", "wheels")]
STATIC_LIBRARIES = ROOT / "build" / "static"
"""What the recorders are linked with, where `make recorders` has fetched it."""
CALLS = 300
PACKAGES = {"analyzer", "moescope", "runtime", "tracer", "views"}
IMPORT_ALL = """
import importlib, json, pkgutil
missing = {}
for package in ("moescope", "tracer", "analyzer", "views"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name in ("tracer.probes.calibrate", "analyzer.records._joins"):  # plain libraries
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name
print(json.dumps(missing))
"""
WHERE = "import shutil, tracer; print(tracer.__file__, *map(shutil.which, ('cc', 'gcc', 'clang', 'make')))"


class Installation:
    """A virtual environment of its own, and a folder to work in."""

    def __init__(self, folder: Path):
        self.folder, self.programs = folder, folder / "env" / "bin"
        self.cache = folder / "cache"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)

    def run(self, program: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A program of the environment, which alone is on the PATH."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PATH": str(self.programs), "XDG_CACHE_HOME": str(self.cache)}
        command = [str(self.programs / program), *words]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def install(self, *wanted: str) -> None:
        """By pip, in the releases that were tested; what is never imported need not be compiled."""
        self.run("pip", "install", "--quiet", "--no-compile", "-c", str(ROOT / "constraints.txt"), *wanted)

    def rows(self, recording: str, sql: str) -> list[dict]:
        """What `moescope query` answers."""
        return json.loads(self.run("moescope", "query", recording, sql, "--json").stdout)["rows"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | ({"RECORDER_LIBRARIES": str(STATIC_LIBRARIES)} if STATIC_LIBRARIES.is_dir() else {})
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(words, env=environment, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel without extras."""
    installation = Installation(tmp_path_factory.mktemp("installed"))
    installation.install(str(wheel))
    return installation


@pytest.fixture(scope="module")
def imports(base: Installation) -> dict[str, str]:
    """Module → the package that it misses, without extras."""
    return json.loads(base.run("python", "-c", IMPORT_ALL).stdout)


@pytest.fixture(scope="module")
def refusal(base: Installation) -> str:
    """What a verb of the runtime says without extras."""
    return base.run("moescope", "convert", "demo", "model", code=2).stderr


@pytest.fixture(scope="module")
def installed(base: Installation, imports: dict[str, str], refusal: str, wheel: Path) -> Installation:
    """The wheel with what the demo needs."""
    base.install(f"{wheel}[runtime]")
    return base


@pytest.fixture(scope="module")
def recording(installed: Installation) -> str:
    """The demo, traced."""
    done = installed.run("moescope", "run", "-o", "demo")
    assert "0 lost" in done.stdout and "TTFT" in done.stdout, done.stdout + done.stderr
    return "demo"


def test_the_wheel_holds_the_program_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = next(name for name in names if name.endswith("METADATA"))
        needed = [line for line in archive.read(described).decode().splitlines() if line.startswith("Requires-Dist: ")]
    assert f"-cp311-abi3-linux_{platform.machine()}" in wheel.name
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert {name.split("/")[1] for name in names if name.endswith((".c", ".h"))} == {"bpf"}
    assert {"tracer/bpf/records.h", "tracer/engines/qnn.toml", "views/static/report.js"} <= set(names)
    base = {line.split()[1].split(">")[0].split("<")[0] for line in needed if "extra ==" not in line}
    assert "numpy" in base and not base & {"torch", "onnxruntime", "onnxruntime-qnn", "scikit-learn", "dask", "pytest"}


def test_tracing_and_reading_need_no_extra(imports: dict[str, str]) -> None:
    assert not [module for module in imports if not module.startswith("analyzer.predict.kernels")]
    assert set(imports.values()) <= {"onnx", "onnxruntime", "sklearn", "joblib"}


def test_a_missing_extra_is_named_in_one_line(refusal: str) -> None:
    assert refusal.count("\n") == 1 and "pip install 'moescope[runtime]'" in refusal


def test_neither_checkout_nor_compiler_is_in_reach(installed: Installation) -> None:
    file, *compilers = installed.run("python", "-c", WHERE).stdout.split()
    assert Path(file).is_relative_to(installed.folder) and set(compilers) == {"None"}


def test_doctor_finds_everything_that_tracing_needs(installed: Installation) -> None:
    checks = {check["name"]: check for check in json.loads(installed.run("moescope", "doctor", "--json").stdout)["checks"]}
    assert all(check["ok"] for check in checks.values() if check["required"])
    assert checks["built parts"]["seen"].startswith(str(installed.folder))
    assert checks["BCC and kernel headers"]["ok"] == (not lacking("bcc"))


def test_the_demo_is_traced_and_its_results_are_there(installed: Installation, recording: str) -> None:
    folder = installed.folder / recording
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["state"] == "complete" and not any(manifest["lost"].values()) and manifest["target"]["exit_code"] == 0
    assert (installed.cache / "moescope" / "demo-model" / "config.json").exists()
    for name in ("trace.pftrace", "report.html", "profdag.html", "tables/tokens.parquet"):
        assert (folder / name).stat().st_size > 1000, name


def test_summary_and_query_agree_about_the_recording(installed: Installation, recording: str) -> None:
    (counts,) = installed.rows(recording, "SELECT count(*) AS n, sum(n_tokens) AS rows FROM tokens WHERE phase = 'prefill'")
    (experts,) = installed.rows(recording, "SELECT count(*) AS n, count(DISTINCT layer) AS layers FROM experts")
    assert counts["n"] == 1 and counts["rows"] > 10 and experts["n"] > 100 and experts["layers"] == 4
    text = installed.run("moescope", "summary", recording).stdout
    assert f"over {counts['rows']} tokens" in text and "experts" in text and " hits, " in text


def test_the_report_is_written_again(installed: Installation, recording: str) -> None:
    report = installed.folder / recording / "report.html"
    report.unlink()
    installed.run("moescope", "write", recording, "--only", "report")
    text = report.read_text()
    assert text.endswith("</html>\n") and "Plotly" in text and "The router looks at the token" in text


@pytest.mark.needs("recorder")
@pytest.mark.skipif(not STATIC_LIBRARIES.is_dir(), reason="make recorders has not fetched what the recorders are linked with")
def test_it_records_on_other_machines_of_both_architectures(base: Installation, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("tracer/recorder/bin/")}
    assert held == {f"tracer/recorder/bin/moescope-recorder-{arch}" for arch in ("x86_64", "aarch64")}
    program, place = compile_c(tmp_path / "usdt_calls", "usdt_calls.c", flags=WITH_SITES), ROOT / "runtime" / "telemetry"
    machine = ("--on", f"exec:/usr/bin/env PATH={os.defpath} sh -c", "--libraries", str(place))
    (base.programs / "sh").symlink_to("/bin/sh")
    base.run("moescope", "run", "--no-views", *machine, "-o", "there", "--", str(program), str(CALLS))
    assert base.rows("there", "SELECT count(*) AS n FROM operators") == [{"n": CALLS}]


@pytest.mark.needs("bcc")
def test_bcc_compiles_the_sources_of_the_wheel(installed: Installation, recording: str) -> None:
    installed.run("moescope", "run", "--loader", "bcc", "--no-views", "--levels", "token,expert", "-o", "bcc")
    manifest = json.loads((installed.folder / "bcc" / "manifest.json").read_text())
    assert manifest["loader"] == "bcc" and not any(manifest["lost"].values())
    count = "SELECT phase, count(*) AS n FROM tokens GROUP BY phase ORDER BY phase"
    assert installed.rows("bcc", count) == installed.rows(recording, count)
