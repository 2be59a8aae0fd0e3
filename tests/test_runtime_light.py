"""What the analyzer takes from the runtime brings no engine with it."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
importlib.import_module({module!r})
heavy = {{"onnx", "onnxruntime", "tokenizers", "safetensors", "pandas"}}
print(*sorted(heavy & {{name.partition(".")[0] for name in sys.modules}}))
print(*sorted(name for name in sys.modules if name.startswith('runtime.')))
"""


@pytest.mark.parametrize("module", ["batches", "eviction", "forms", "replay", "rule"])
def test_the_rules_need_numpy_and_nothing_of_the_runtime(module: str) -> None:
    program = PROGRAM.format(module=f"runtime.cache_rules.{module}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    heavy, own = done.stdout.splitlines()
    assert heavy == ""
    assert all(name.startswith("runtime.cache_rules") for name in own.split())


def test_the_runtime_itself_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module="runtime")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", ""]
