"""A process that decodes continuously and logs the begin and end of each token."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


class Engine:
    """A decoding process and its log of tokens."""

    def __init__(self, command: list[str], log: Path, threads: int):
        self.log, self.threads = log, threads
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def tokens(self) -> np.ndarray:
        """(begin, end) of each token so far, ns, shape [n, 2]."""
        raw = np.fromfile(self.log, "<u8") if self.log.exists() else np.empty(0, "<u8")
        return raw[: len(raw) // 2 * 2].reshape(-1, 2).astype(np.int64)

    def wait_for_tokens(self, count: int) -> None:
        """Return once it has decoded `count` tokens."""
        while len(self.tokens()) < count:
            if self.process.poll() is not None:
                sys.exit(f"the engine ended with status {self.process.returncode}")
            time.sleep(0.2)

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None  # a pipe
        self.process.stdin.close()
        self.process.wait()


def default_library() -> str:
    """The llama.cpp inside the package xllamacpp."""
    package = importlib.util.find_spec("xllamacpp")
    if package is None or not package.submodule_search_locations:
        sys.exit("xllamacpp is not installed; give a llama.cpp with --library")
    return str(next(Path(package.submodule_search_locations[0]).glob("*.so")))
