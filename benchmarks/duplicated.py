"""Our runtime with one kind of subgraph run more often: duplicated.py KIND EXTRA GENERATE_ARGUMENTS...

Each run of a subgraph of that kind in decode (one row) is followed by EXTRA more of the same session with the same inputs and
outputs: the text stays what it was, the phase grows by that many kernels.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import calls
from runtime.__main__ import main
from runtime.graph import Graph


def repeated(run: Callable[[Any, Any], Any], extra: int) -> Callable[[Any, Any], Any]:
    """A session's run, and `extra` more."""

    def more(first: Any, second: Any) -> Any:
        result = run(first, second)
        for _ in range(extra):
            run(first, second)
        return result

    return more


def duplicate(kind: str, extra: int) -> None:
    """Patch the two places where sessions run: one by one, and as prepared for a token."""
    once, prepared = Graph._probed, calls.Call

    def probed(self: Graph, run: Any, first: Any, second: Any, n_tokens: int) -> Any:
        own = n_tokens == 1 and self.kind.name.lower() == kind
        return once(self, repeated(run, extra) if own else run, first, second, n_tokens)

    def call(run: Any, binding: Any, handle: int, of: Any, *told: Any) -> Any:
        return prepared(repeated(run, extra) if of.name.lower() == kind else run, binding, handle, of, *told)

    Graph._probed = probed  # type: ignore[method-assign]
    calls.Call = call


if __name__ == "__main__":
    duplicate(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["generate", *sys.argv[3:]]))
