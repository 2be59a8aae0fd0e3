"""Commands of the documents run as printed, in a folder where what they name is there."""

import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from analyzer.questions.fidelity import log_truth
from moescope.__main__ import main
from moescope.verbs import VERBS
from tests import docs_stage
from tests.conftest import ROOT, rest_long, trace, wait_until
from tests.test_docs import PAGES, commands
from tracer.kernel.definitions import constant
from tracer.recording.format import STREAMS, kinds_of, write_manifest
from views.serving import UI_PORT
from workloads.slot_files import SlotFile

pytestmark = pytest.mark.needs("probes")
DATA = ROOT / "tests" / "data"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
# fmt: off
RECORDINGS = [
    "OTHER", "OTHER_RUN", "ALL", "RUN_FP32", "RUN_INT4", "run", "slow", "fast", "before", "after", "main", "branch", "first",
    "second", "recordings/run-1", "recordings/llama", "recordings/NAME", "recordings/latest", "base-1", "base-2", "base-3",
    "base-4", "base-5", "cand-1", "cand-2", "cand-3", "cand-4", "cand-5", "results/old", "runs/device=phone-1/build=v1/a",
    "runs/device=phone-1/build=v2/a",
]
# fmt: on
"""What the documents call recordings beside RUN: all of them are that one here."""
FILES = {
    "qnn/expert.csv": "qnn/onnxruntime.csv",
    "profile.csv": "qnn/onnxruntime.csv",
    "chrometrace.json": "qnn/optrace.json",
    "model.etdp": "etdump/cpu.etdp",
    "hexagon.log": "hexagon/profile.log",
    "LOG": "hexagon/profile.log",
    "qwen.metrics": "bigmoeonedge/qwen.metrics",
    "qnn-profiling-data.csv": "qnn/onnxruntime.csv",
}
"""Files of the documents → those of tests/data that are like them."""
MADE = {
    "demo.txt": "moescope convert demo PACKAGE",
    "profile.txt": "workloads.programs.profiled_ort cpu onnxruntime_profile 4",
    "trace.txt": "moescope write RUN --only routes --out trace.csv",
}
"""Files → the commands that print them, or that make what else is needed."""
TEXTS = ("mytext.txt", "train.txt", "more.txt", "test.txt")
TAKING_PACKAGES = ("tune predictor", "tune")
REPLACED = {
    "model.etdp --out RUN": "model.etdp --out imported-etdump",
    "--out RUN": "--out imported",
    "--config DIR": "--config MODEL_DIR",
    "--device snapdragon-8-elite --config MODEL_DIR": "--device snapdragon-8-elite --config PACKAGE",
    "inspect /models/qwen3-moe": "inspect CHECKPOINT",
    "convert MODEL_DIR PACKAGE": "convert CHECKPOINT OWN",
    "convert /models/qwen3-moe /models/qwen3-moe.package": "convert CHECKPOINT OWN",
    "convert /models/olmoe /models/olmoe.package": "convert CHECKPOINT OWN",
    **{f"{verb} {name}": f"{verb} CONVERTED" for verb in TAKING_PACKAGES for name in ("/models/qwen3-moe.package", "PACKAGE")},
    "/models/qwen3-moe.package": "PACKAGE",
    "/models/olmoe.package": "PACKAGE",
    "/tmp/demo": "PACKAGE",
    "/models/qwen3-moe": "MODEL_DIR",
    "/models/olmoe": "MODEL_DIR",
    "/tmp/tables": "tables",
    "runtime/telemetry/_probes.so": str(ROOT / "runtime" / "telemetry" / "_probes.so"),
}
"""Names that a reader puts their own in the place of."""
IN_PROCESS = ("analyzer", "views")
"""Packages whose verbs run here: the others start processes, bring threads and the emulator, or use $(...)."""
NOT_RUN = {
    r"moescope compare .*(--budget|STEPS|moescope generate).*": "takes minutes: tests/test_tracer_compare.py",
    r"moescope simulate .* --prefetch off,recorded.*": "a recording that prefetched: tests/test_predict_recorded.py",
    r".*s3://.*": "an object store: tests/test_many_recordings.py",
    r"moescope predict kernels (train|predict) .*": "takes minutes: tests/test_predict_kernels.py",
    r"moescope import (profile.csv|qnn/\*.csv) --onto .*": "profiles of that run: tests/test_analyzer_qnn_import.py",
    r"moescope write .* --only flame": "a recording with stacks: tests/test_stacks.py",
    r"moescope history .* --pareto .*|moescope write .* --only energy": "recordings with power: tests/test_energy_models.py",
    r"moescope predict device .* --power .*": "a power sensor: tests/test_energy_models.py",
    r".*base/bmoe-cli .*": "an engine built by hand: tests/test_bigmoeonedge.py",
    r".*server_load.py .*": "a server and minutes: tests/test_requests.py",
    r".*genai_load.py .*": "minutes: tests/test_other_doors.py",
    r"moescope compare .* --flame .*": "recordings with stacks: tests/test_stacks_compare.py",
    r"moescope import meter.csv .*": "a meter's file of that run: tests/test_power_meter.py",
    r"moescope convert .* --adapter .*": "an adapter of that model: tests/test_runtime_adapter.py",
    r"moescope generate .* --score .*": "a text of the user's: tests/test_runtime_scoring.py",
    r"moescope serve .*": "it serves: tests/test_runtime_server.py",
    r"moescope npu .* --op-map .*": "maps of that run: tests/test_analyzer_qnn_import.py",
}
"""Form of commands → why they do not run here, and where their verb is tested."""


def printed() -> list[str]:
    """Each command of the documents once, in the order of the pages."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def why_not(command: str) -> str:
    """Why a command does not run here; empty where it does."""
    return next((reason for form, reason in NOT_RUN.items() if re.fullmatch(form, command)), "")


def as_another(folder: Path, number: int) -> None:
    """Make a copy of a recording one of its own, whose last step is some ns longer: `compare` refuses copies."""
    events = np.fromfile(folder / "events.bin", np.uint8).reshape(-1, STREAMS["events"])
    last = int(np.flatnonzero(kinds_of(events) == constant("KIND_TOKEN_END"))[-1])
    events[last, 8:16] = (events[last, 8:16].copy().view("<u8") + 1000 * number).view(np.uint8)
    for name in ("events.bin", "events.sum"):
        (folder / name).unlink()
    file = SlotFile(folder / "events.bin")
    file.append(events)
    file.close()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    write_manifest(folder, {**manifest, "started_utc": f"2026-01-01T00:00:{number:02d}Z"})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with what the documents name: a recording of the bundled demo, imports, exports of earlier commands."""
    folder = tmp_path_factory.mktemp("stage")
    done = trace("run", "--no-views", "-o", str(folder / "RUN"))
    assert done.returncode == 0, done.stderr
    for number, name in enumerate(RECORDINGS, 1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder / "RUN", folder / name)
        as_another(folder / name, number)
    for name, source in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / source, folder / name)
    (folder / "qwen.route.csv").write_bytes(lzma.decompress((DATA / "bigmoeonedge" / "qwen.route.csv.xz").read_bytes()))
    for name, words in MADE.items():
        with open(folder / name, "w") as file:
            command = [sys.executable, "-m", *words.split()]
            subprocess.run(command, cwd=folder, stdout=file, check=True, env=ENVIRONMENT)
    (folder / "MODEL_DIR").mkdir()
    shutil.copy(DATA / "infersim" / "hf_configs" / "qwen3-30B-A3B_config.json", folder / "MODEL_DIR" / "config.json")
    shutil.copy(next((folder / "PACKAGE").rglob("tokenizer.json")), folder / "MODEL_DIR")
    lines = [f"The router looks at token {number} and chooses two experts." for number in range(200)]
    (folder / "all.txt").write_text("\n".join(lines))
    (folder / "all.jsonl").write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    (folder / "prompt.txt").write_text(lines[0])
    for name in ("FILE", "wiki.test.raw"):
        (folder / name).write_text("\n".join(lines))
    shutil.copy("/sys/kernel/btf/vmlinux", folder / "kernel.btf")
    docs_stage.write_all(folder)
    next(folder.glob("onnxruntime_profile_*.json")).rename(folder / "onnxruntime_profile.json")
    (folder / "truth.json").write_text(json.dumps({"phases": log_truth(folder / "RUN" / "runtime.json")}))
    for name in TEXTS:
        shutil.copy(folder / "all.txt", folder / name)
    for words in ("ceilings --out phone.json", "device --measure --out here.toml"):
        subprocess.run([sys.executable, "-m", "moescope", "predict", *words.split()], cwd=folder, check=True, env=ENVIRONMENT)
    return folder


@pytest.fixture
def at_stage(stage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(stage)
    yield stage


RUNNING = [command for command in printed() if not why_not(command)]
HEAVY = (
    r".* (compare (base-1|--).*|compare .* -- .*|predict kernels fusion|simulate qwen.*"
    r"|attach .*llama-server.*|run -- ./llama-bench .*)"
)
"""Commands that take many seconds."""


def runs_here(command: str) -> bool:
    """Whether a command runs in the process of the tests."""
    package, *words = shlex.split(command)
    return package == "moescope" and VERBS[words[0]].chosen(words[1:])[1].module.startswith(IN_PROCESS)


FIRST_OF_VERB = {command.split()[1]: command for command in reversed(RUNNING) if not re.fullmatch(HEAVY, command)}
SHORT = {command for command in RUNNING if runs_here(command) and not re.fullmatch(HEAVY, command)} | {*FIRST_OF_VERB.values()}
"""Commands that `make test` runs: the quick ones, and the first of each verb that starts processes."""
SERVING = [command for command in RUNNING if command.startswith("moescope open ")]
NEEDED: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "pgrep|pidof": docs_stage.llama_server,
    "--on adb": docs_stage.phone,
}
"""What a command contains → what runs beside it."""
STDIN = "The router looks at a token.\n"


def as_typed(stage: Path, command: str) -> str:
    """A command with the reader's own names, which a folder is for each command that writes one."""
    for name, own in REPLACED.items():
        command = command.replace(name, own)
    return command.replace(" OWN", f" {tempfile.mkdtemp(dir=stage)}/package")


def on_device(stage: Path, command: str, serial: str) -> str:
    """A command for a device with its serial number, and the device's folder in the stage."""
    return command.replace("SERIAL", serial).replace("/data/local/tmp", str(stage / "device"))


@contextmanager
def put_aside(words: list[str]) -> Iterator[None]:
    """Remove for a while what is where `tracer run -o` and others write."""
    output = Path(words[words.index("-o") + 1]) if "-o" in words else Path("nothing")
    with TemporaryDirectory(dir=".") as folder:
        there = output.exists()
        if there:
            output.rename(Path(folder) / "kept")
        yield
        if there:
            shutil.rmtree(output) if output.is_dir() else output.unlink()
            (Path(folder) / "kept").rename(output)


def ran(stage: Path, command: str) -> int:
    """The exit code of a command, in a shell where it needs one."""
    if runs_here(command):
        return main(shlex.split(command)[1:])
    path = f"{stage}/path:{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = f"python -m {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(["sh", "-c", line], input=STDIN, text=True, check=False, env=environment).returncode


@pytest.mark.parametrize("command", rest_long([command for command in RUNNING if command not in SERVING], *SHORT))
def test_a_command_runs_as_printed(at_stage: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = as_typed(at_stage, command)
    words = shlex.split(command)
    with ExitStack() as stack:
        for form, beside in NEEDED.items():
            if re.search(form, command):
                made = stack.enter_context(beside(at_stage))
                command = on_device(at_stage, command, made) if made else command
        stack.enter_context(put_aside(words))
        code = ran(at_stage, command)
        said = capfd.readouterr()
        assert code == 0, said.err
        written = next((Path(words[words.index(name) + 1]) for name in ("--out", "-o") if name in words), None)
        assert said.out.strip() or said.err.strip() or (written and written.stat().st_size)


@pytest.mark.parametrize("command", rest_long(SERVING, *SERVING[::3]))
def test_a_command_that_serves_does_so_until_ctrl_c(at_stage: Path, command: str) -> None:
    assert wait_until(lambda: docs_stage.is_free(UI_PORT))
    with docs_stage.serving([sys.executable, "-m", *shlex.split(command)]) as said:
        address = re.findall(r"http://127\.0\.0\.1:\d+/", said)[0]
        with urlopen(f"{address}trace.pftrace") as answer:
            assert len(answer.read()) > 10_000


def test_every_form_that_does_not_run_is_one_of_the_documents() -> None:
    assert [form for form in NOT_RUN if not any(re.fullmatch(form, command) for command in printed())] == []
    named = {name for reason in NOT_RUN.values() for name in re.findall(r"tests/\w+\.py", reason)}
    assert named and [name for name in named if not (ROOT / name).exists()] == []
    assert len(RUNNING) > 190
