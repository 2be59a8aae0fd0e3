"""The programs, models and machines that the documents' commands name: stand-ins in a folder, on PATH and on the loopback."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moescope.command_line import INTERRUPTED
from runtime.package.convert import convert
from runtime.package.demo_model import DemoSizes, write_demo_model
from tests.adb_stand_in import Phone
from tests.conftest import ROOT
from workloads.compiling import SITES
from workloads.gguf_model import write_moe

PROGRAMS = ROOT / "workloads" / "programs"
PYTHON = Path(sys.executable)
TINY = DemoSizes(hidden=64, layers=2, experts=4, intermediate=64, vocabulary=400)
CALLS, STEPS, PROMPT_AND_STEPS, PAUSE_S = 300, 40, "20,1 20", 0.01
LLAMA = f"{PYTHON} {PROGRAMS}/llama_steps.py {{folder}}/model.gguf {PROMPT_AND_STEPS} {PAUSE_S}"
LLAMA_PROGRAMS = ("llama-bench",)
PACES_S = {"old": 0.02, "new": 0.01, "llama-bench-old": 0.02, "llama-bench-new": 0.01}
"""Programs to compare → duration of their steps."""
SCRIPTS = ("my_program.py", "gen.py", "my_qnn_script.py", "my_onnxruntime_qnn_script.py")
DEVICE_FILES = {"arch": os.uname().machine, "fast_nop": False}
FUNCTION = '[[function]]\nlibrary = "./my_engine"\nsymbol = "work"\n'
SAID_WITHIN_S = 60
ENGINE = f"""
#define main calls
#include "usdt_calls.c"
#undef main
int main(void)
{{
	char *words[] = {{"engine", "{CALLS}"}};

	return calls(2, words);
}}
"""
"""A program that calls each site of the runtime CALLS times, whatever its arguments are."""
SSH = """while :; do
  case "$1" in -T | -M) shift ;; -o) shift 2 ;; -S) touch "$2"; shift 2 ;; *) break ;; esac
done
cd {folder}
exec sh -c "$2"
"""
"""What stands for ssh: runs the line on this machine, whatever host is named."""


def write_program(path: Path, line: str) -> None:
    """Write a shell script that runs a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def steps(pause_s: float, *options: str) -> str:
    """A line that computes steps of a known duration."""
    return " ".join([f"exec {PYTHON} {PROGRAMS}/steps.py {STEPS}", str(pause_s), *options])


def write_engine(folder: Path, *names: str) -> None:
    """Compile programs that call the runtime's sites, with the library of those sites beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SITES / "_probes.so", folder)
    (folder / "engine.c").write_text(ENGINE)
    flags = f"-I{PROGRAMS} -rdynamic -L{folder} -l:_probes.so -Wl,-rpath,$ORIGIN,--allow-shlib-undefined,-z,lazy".split()
    for name in names:
        subprocess.run(["cc", "-O2", "-o", folder / name, folder / "engine.c", *flags], check=True)


def write_programs(folder: Path) -> None:
    """Write the programs that the documents trace."""
    for name in LLAMA_PROGRAMS:
        write_program(folder / name, f"exec {LLAMA.format(folder=folder)}")
    for name, pause_s in PACES_S.items():
        write_program(folder / name, steps(pause_s))
    for name in SCRIPTS:
        shutil.copy(ROOT / "tests" / "docs_script.py", folder / name)
    write_engine(folder, "llama-cli", "your-engine")
    write_engine(folder / "device" / "llama", "llama-cli")
    subprocess.run(["cc", "-O2", "-fno-ipa-ra", "-o", folder / "my_engine", PROGRAMS / "named.c"], check=True)
    (folder / "my.toml").write_text(FUNCTION)
    (folder / "phone.toml").write_text('levels = "token,expert"\n')
    (folder / "llama-server").symlink_to(PYTHON.resolve())


def write_device_files(folder: Path) -> None:
    """Write what was copied from a device: features, and the engine's libraries under the paths that they have there."""
    (folder / "device.json").write_text(json.dumps(DEVICE_FILES))
    for root in ("root/data/local/tmp/llama", "pulled/data/local/tmp", "lib"):
        (folder / root).mkdir(parents=True)
        shutil.copy(SITES / "_probes.so", folder / root)
        shutil.copy(folder / "llama-cli", folder / root)


def write_models(folder: Path) -> None:
    """Write a tiny model in each form: for llama.cpp, a checkpoint, and a converted package."""
    (folder / "build").mkdir()
    for name in ("model.gguf", "m.gguf", "build/tiny-moe.gguf"):
        write_moe(folder / name)
    convert(write_demo_model(folder / "CHECKPOINT", sizes=TINY), folder / "CONVERTED")


def write_libraries(folder: Path) -> None:
    """Link what a build of llama.cpp makes to the library of the package xllamacpp, and .venv and workloads to the checkout's."""
    package = importlib.util.find_spec("xllamacpp")
    assert package is not None and package.submodule_search_locations
    library = next(Path(package.submodule_search_locations[0]).glob("*.so"))
    (folder / "build" / "bin").mkdir()
    for name in ("build/bin/libllama.so", "build/bin/libggml-cpu.so", "device/llama/libggml-cpu.so", "device/libllama.so"):
        (folder / name).symlink_to(library)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (folder / "workloads").symlink_to(ROOT / "workloads")


def write_all(folder: Path) -> None:
    """Write everything that the documents' commands name, other than recordings."""
    write_models(folder)
    write_programs(folder)
    write_device_files(folder)
    write_libraries(folder)
    write_program(folder / "path" / "ssh", SSH.format(folder=folder))


@contextmanager
def phone(folder: Path) -> Iterator[str]:
    """A phone for adb: yields its serial number."""
    if not shutil.which("adb"):
        pytest.skip("adb is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(free.getsockname()[1]))
        free.close()
        patch.setenv("HOME", str(folder))
        serial = Phone("/bin/sh").serial
        try:
            subprocess.run(["adb", "connect", serial], check=True, timeout=SAID_WITHIN_S, capture_output=True)
            yield serial
        finally:
            subprocess.run(["adb", "kill-server"], check=True)


@contextmanager
def llama_server(folder: Path) -> Iterator[None]:
    """A process named llama-server that computes tokens for six seconds."""
    words = [folder / "llama-server", PROGRAMS / "steps.py", "300", "0.02"]
    process = subprocess.Popen(list(map(str, words)), env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """What a command that serves until Ctrl-C printed; ends it by Ctrl-C. Raises AssertionError if its exit is unclean."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BROWSER": "true"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout
    lines = []
    while "Ctrl-C ends" not in (line := process.stdout.readline()):
        assert line, "it ended without serving"
        lines.append(line)
    yield "".join(lines)
    process.send_signal(signal.SIGINT)
    assert process.wait(SAID_WITHIN_S) == INTERRUPTED


def is_free(port: int) -> bool:
    """Whether no other program uses a port on the loopback."""
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) != 0
