"""Like llama_steps.py on a library without names: llama_stripped.py LIBRARY OFFSETS MODEL BATCHES NEW_TOKENS [PAUSE].

OFFSETS is a JSON file: the name of each function called here and its offset in the library.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, cast

from workloads.programs import llama_steps


class Functions:
    """Functions of a library by their offsets in its file."""

    def __init__(self, path: str, offsets: dict[str, int]):
        self._library, self._offsets = ctypes.CDLL(path), offsets
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
        start, at = next((int(words[0].split("-")[0], 16), int(words[2], 16)) for words in lines if "x" in words[1])
        self._base = start - at

    def __getattr__(self, name: str) -> Any:
        function = self._library._FuncPtr(self._base + self._offsets[name])
        setattr(self, name, function)
        return function


def main() -> None:
    path, offsets = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    del sys.argv[1:3]
    lib = llama_steps.declare_functions(cast(ctypes.CDLL, Functions(path, offsets)))
    print(json.dumps(llama_steps.decode_batches(lib, lib.llama_context_default_params(), *llama_steps.parse_arguments())))


if __name__ == "__main__":
    main()
