"""Steps of a llama.cpp by the host's own clock: llama_phases.py MODEL PROMPT_TOKENS NEW_TOKENS. Prints ms of each step as JSON.

The first step is the prompt's. Otherwise like workloads/programs/llama_steps.py.
"""

import json
import time
from typing import Any

from workloads.programs.llama_steps import decode_batches, load_library, parse_arguments


class Timed:
    """The library with timed llama_decode."""

    def __init__(self, lib: Any):
        self.lib = lib
        self.ms: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def llama_decode(self, *given: Any) -> int:
        """llama_decode, timed."""
        call = self.lib.llama_decode
        begin = time.monotonic_ns()
        status = call(*given)
        self.ms.append((time.monotonic_ns() - begin) / 1e6)
        return int(status)


def main() -> None:
    lib = Timed(load_library())
    decode_batches(lib, lib.llama_context_default_params(), *parse_arguments())  # type: ignore[arg-type]
    print(json.dumps(lib.ms))


if __name__ == "__main__":
    main()
