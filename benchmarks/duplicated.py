"""Our runtime with one kind of subgraph run more often: duplicated.py KIND EXTRA GENERATE_ARGUMENTS...

Each run of a subgraph of that kind in decode (one row) is followed by EXTRA more of the same session with the same inputs,
whose results are dropped: the text stays what it was, the phase grows by that many kernels.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from runtime.__main__ import main
from runtime.graph import Graph


def duplicate(kind: str, extra: int) -> None:
    """Patch the one place where sessions run."""
    once = Graph.run

    def run(self: Graph, feeds: dict[str, np.ndarray], n_tokens: int) -> list[np.ndarray]:
        outputs = once(self, feeds, n_tokens)
        if n_tokens == 1 and self.kind.name.lower() == kind:
            for _ in range(extra):
                self.session.run(None, feeds)
        return outputs

    Graph.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    duplicate(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(["generate", *sys.argv[3:]]))
