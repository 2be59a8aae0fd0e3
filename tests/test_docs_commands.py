"""Commands of the documents run as printed, in a folder where what they name is there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from moescope.__main__ import main as moescope
from tests.conftest import ROOT, trace
from tests.test_docs import PAGES, commands

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
}
"""Files of the documents → those of tests/data that are like them."""
MADE = {
    "sweep.json": "analyzer simulate RUN --cache 50%,100% --prefetch off --json",
    "comparison.json": "analyzer compare before after --json",
    "demo.txt": "runtime demo-model PACKAGE",
    "trace.txt": "analyzer routes RUN --out trace.csv",
}
"""Files → the commands that print them, or that make what else is needed."""
REPLACED = {
    "model.etdp --out RUN": "model.etdp --out imported-etdump",
    "--out RUN": "--out imported",
    "--config DIR": "--config MODEL_DIR",
    "/models/qwen3-moe.package": "PACKAGE",
    "/models/olmoe.package": "PACKAGE",
    "/tmp/demo": "PACKAGE",
    "/models/qwen3-moe": "MODEL_DIR",
    "/models/olmoe": "MODEL_DIR",
    "/tmp/tables": "tables",
    "runtime/telemetry/_probes.so": str(ROOT / "runtime" / "telemetry" / "_probes.so"),
}
"""Names that a reader puts their own in the place of."""
MINUTES = "takes minutes: tests/test_"
NOT_RUN = {
    r".* --on (adb|ssh).*": "a device: tests/test_on_device.py",
    r".*(s3://|--dask ).*": "an object store: tests/test_many_recordings.py",
    r"(views|moescope) open .*|views top( RUN --every 2)?": "serves or follows until it is ended: tests/test_views_browser.py",
    r"(tracer|moescope) attach .*": "a process named by its number: tests/test_tracer_lifecycle.py",
    r"tracer run .+": "programs of the reader's own: tests/test_tracer_llamacpp.py",
    r"tracer compare .*": "programs of the reader's own: tests/test_tracer_compare.py",
    r"tracer plan .*": "files of a device: tests/test_collector_plan.py",
    r"tracer doctor --btf FILE": "types of another kernel: tests/test_tracer_doctor.py",
    r"tracer probes (--probes|/path/to|/usr/lib).*": "libraries of the reader's own: tests/test_tracer_custom.py",
    r".* \.\.\.": "leaves out what the reader fills in: tests/test_tracer_options.py",
    r"analyzer kernels (train|predict) .*": f"{MINUTES}predict_kernels.py",
    r"analyzer simulate .* --prefetch off,recorded.*": "a recording that prefetched: tests/test_predict_recorded.py",
    r"analyzer import-qnn (profile.csv|qnn/\*.csv) --onto .*": "profiles of that run: tests/test_analyzer_qnn_import.py",
    r"analyzer npu .* --op-map .*": "maps of that run: tests/test_analyzer_qnn_import.py",
    r"analyzer fidelity .* --truth .*": "times from elsewhere: tests/test_end_to_end.py",
    r"analyzer (import-profile onnxruntime|ledger recordings/imported).*": "another's profile: tests/test_analyzer_import.py",
    r"runtime (tune|train-predictor) .*": f"a converted package, and {MINUTES}runtime_tune.py",
    r"runtime perplexity .* --text - .*": "standard input: tests/test_runtime_quality.py",
    r"runtime (convert .*|inspect /models/qwen3-moe)": "a checkpoint: tests/test_runtime_models.py",
    r"runtime chat .*": "somebody who types: tests/test_runtime_chat.py",
}
"""Form of commands → why they do not run here, and where their verb is tested."""


def printed() -> list[str]:
    """Each command of the documents once, in the order of the pages."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def why_not(command: str) -> str:
    """Why a command does not run here; empty where it does."""
    return next((reason for form, reason in NOT_RUN.items() if re.fullmatch(form, command)), "")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with what the documents name: a recording of the bundled demo, imports, exports of earlier commands."""
    folder = tmp_path_factory.mktemp("stage")
    done = trace("run", "--no-views", "-o", str(folder / "RUN"))
    assert done.returncode == 0, done.stderr
    for name in RECORDINGS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder / "RUN", folder / name)
    for name, source in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / source, folder / name)
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
    for words in ("ceilings --out phone.json", "device --measure --out here.toml"):
        subprocess.run([sys.executable, "-m", "analyzer", *words.split()], cwd=folder, check=True, env=ENVIRONMENT)
    return folder


@pytest.fixture
def at_stage(stage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(stage)
    yield stage


RUNNING = [command for command in printed() if not why_not(command)]


@pytest.mark.parametrize("command", RUNNING)
def test_a_command_runs_as_printed(at_stage: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, own in REPLACED.items():
        command = command.replace(name, own)
    room, *words = shlex.split(command)
    if room == "runtime":  # in a process of its own, as it brings threads and the emulator
        run = [sys.executable, "-m", room, *words]
        code = subprocess.run(run, check=False, env=ENVIRONMENT).returncode
    else:
        code = moescope(words) if room == "moescope" else import_module(f"{room}.__main__").ROOM.main(words)
    said = capfd.readouterr()
    assert code == 0, said.err
    written = Path(words[words.index("--out") + 1]) if "--out" in words else None
    assert said.out.strip() or said.err.strip() or (written and written.stat().st_size)


def test_every_form_that_does_not_run_is_one_of_the_documents() -> None:
    assert [form for form in NOT_RUN if not any(re.fullmatch(form, command) for command in printed())] == []
    named = {name for reason in NOT_RUN.values() for name in re.findall(r"tests/\w+\.py", reason)}
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []
    assert len(RUNNING) > 145
