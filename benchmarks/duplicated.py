"""Our runtime with one kind of subgraph run more often: duplicated.py KIND EXTRA GENERATE_ARGUMENTS...

Before each run of a subgraph of that kind in decode (one row) come EXTRA of other layers', in turn, with the same inputs: their
weights are as cold as its own. So the phase grows by that many kernels. The text may differ: copies of attention write their keys
and values over other layers'. Routers are small, and their results are kept: they are repeated themselves.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import calls
from runtime.__main__ import main
from runtime.graph import Graph

Run = Callable[[Any, Any], Any]


class Copies:
    """Runs that can stand for each other, by what they write to: an expert's output has a row of its own."""

    def __init__(self, kind: str, extra: int):
        self.kind, self.extra = kind, extra
        self._alike: defaultdict[Hashable, list[tuple[Run, Any]]] = defaultdict(list)
        self._turn = 0

    def before(self, run: Run, binding: Any, alike: Hashable) -> Run:
        """The run with copies before it."""
        own, others = (run, binding), self._alike[alike]
        others.append(own)

        def more(first: Any, second: Any) -> Any:
            for _ in range(self.extra):
                self._turn += 1
                copy, its_own = others[self._turn % len(others)]
                if its_own is binding and len(others) > 1:
                    self._turn += 1
                    copy, its_own = others[self._turn % len(others)]
                copy(its_own, second)
            return run(first, second)

        return more


def duplicate(kind: str, extra: int) -> None:
    """Patch the two places where sessions run: one by one, and as prepared for a token."""
    once, prepared, copies = Graph._probed, calls.Call, Copies(kind, extra)

    def probed(self: Graph, run: Any, first: Any, second: Any, n_tokens: int) -> Any:
        if n_tokens == 1 and self.kind.name.lower() == kind:
            for _ in range(extra):
                run(first, second)
        return once(self, run, first, second, n_tokens)

    def call(run: Any, binding: Any, handle: int, of: Any, layer: int, expert: int, *told: Any) -> Any:
        if of.name.lower() == kind:
            run = copies.before(run, binding, layer if kind == "router" else expert)
        return prepared(run, binding, handle, of, layer, expert, *told)

    Graph._probed = probed  # type: ignore[method-assign]
    calls.Call = call


if __name__ == "__main__":
    duplicate(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["generate", *sys.argv[3:]]))
