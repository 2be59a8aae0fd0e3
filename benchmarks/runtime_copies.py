"""Steps of our runtime with copies of its kernels: runtime_copies.py MODEL EXTRA [KIND ...]. A round for each line that it reads.

A kernel of 100 µs takes up to half as long again where the rest of a step has swept the caches as right behind a run of its own
kind, and longer still where nothing of the runtime's code is left in them. So copies stand where the step itself has them: before
a kernel run EXTRA of those that follow it in a step, each with what lies behind it. For each kind there is a step with copies
before every run of it, and one without: a kernel takes what its runs grow by, less the time of what lies between, over EXTRA.

It prints ms of one run of each kind as JSON, by the host's clock. A round is one step that wakes up, then for each kind a step
with copies and one without; in the first round with copies first, then by turns. Copies pass no probe. When its input ends, it
prints phase and ns of all steps by the runtime's own clock.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import calls
from runtime.graph import Graph
from runtime.moe import MoE
from runtime.probes import Phase
from runtime.sampling import Sampler, Sampling

KINDS = ("attention", "router", "mlp", "expert", "head")
PROMPT = "The router looks at the token and picks a few experts, and a cache keeps those that were used last. " * 12
WARM = 12
"""Steps that make what a step needs, before the first round."""


class Ran(NamedTuple):
    """A run of a subgraph."""

    kind: str
    run: Callable[[Any, Any], Any]
    first: Any
    second: Any


class Copies:
    """Patches the runtime: copies of one kind of subgraph before each run of it in a decoded token. The text may differ."""

    def __init__(self, extra: int):
        self.extra, self.kind, self.copying = extra, "", False
        self.slots: list[int] = []
        """ns of a step's runs of the kind, with their copies."""
        self._before: list[Ran] = []
        self._now: list[Ran] = []
        self._patch()

    def begin(self) -> None:
        """A step begins."""
        self._before, self._now = self._now, []
        self.slots.clear()

    def _patch(self) -> None:
        """The two places where sessions run: one by one, and as prepared for a token."""
        once, prepared = Graph._probed, calls.Call

        def probed(graph: Graph, run: Any, first: Any, second: Any, n_tokens: int) -> Any:
            return once(graph, self._with_copies(run, graph.kind.name.lower()), first, second, n_tokens)

        def call(run: Any, binding: Any, handle: int, of: Any, *told: Any) -> Any:
            return prepared(self._with_copies(run, of.name.lower()), binding, handle, of, *told)

        Graph._probed = probed  # type: ignore[method-assign]
        calls.Call = call

    def _with_copies(self, run: Callable[[Any, Any], Any], kind: str) -> Callable[[Any, Any], Any]:
        def more(first: Any, second: Any) -> Any:
            chosen = self._following() if self.copying and kind == self.kind else []
            between, began = 0, clock()
            for copy, rest in chosen:
                copy.run(copy.first, copy.second)
                before = clock()
                for other in rest:
                    other.run(other.first, other.second)
                between += clock() - before
            result = run(first, second)
            if kind == self.kind:
                self.slots.append(clock() - began - between)
            self._now.append(Ran(kind, run, first, second))
            return result

        return more

    def _following(self) -> list[tuple[Ran, list[Ran]]]:
        """The next runs of the kind, as the step before had them, each with those of other kinds behind it."""
        at, found = len(self._now) + 1, list[tuple[Ran, list[Ran]]]()
        order = self._before[at:] + self._before[:at]
        for ran in order * (1 + self.extra):
            if ran.kind == self.kind:
                if len(found) == self.extra:
                    break
                found.append((ran, []))
            elif found:
                found[-1][1].append(ran)
        return found


class Stepper:
    """A model behind its prompt; every step stands at the same place of the sequence, with another token."""

    def __init__(self, model: Path, extra: int, asked: list[str]):
        self.copies = Copies(extra)
        self.model = MoE.load(model, "all", prefill_backend="cpu", decode_backend="cpu", prefetch="off")
        self.ids, self.sampler, self.taken = self.model.encode(PROMPT), Sampler(Sampling(0.0, 0, 1.0, 0)), 0
        self.sequence = self.model.engine.begin_sequence(len(self.ids) + 1)
        self.model.engine.step(self.sequence, self.ids, self.sampler)
        for _ in range(WARM):
            self.step()
        found = {kind.name.lower() for kind, _ in self.model.log.graphs}
        self.kinds = [kind for kind in asked or KINDS if kind in found]

    def step(self) -> None:
        """Decode one token."""
        self.sequence.length = len(self.ids)
        self.taken += 1
        self.copies.begin()
        self.model.engine.step(self.sequence, [self.ids[self.taken % len(self.ids)]], self.sampler)

    def round(self, turn: int) -> dict[str, float]:
        """ms of a run by kind, behind a step that wakes up."""
        self.step()
        return {kind: self._kernel(kind, turn % 2 == 0) for kind in self.kinds}

    def _kernel(self, kind: str, copies_first: bool) -> float:
        copies, spent = self.copies, {}
        copies.kind = kind
        for copies.copying in (copies_first, not copies_first):
            self.step()
            spent[copies.copying] = float(np.mean(copies.slots))
        copies.kind, copies.copying = "", False
        return (spent[True] - spent[False]) / copies.extra / 1e6


def main() -> None:
    stepper = Stepper(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(stepper.round(turn)), flush=True)
    print(json.dumps([(Phase(step.phase).name.lower(), step.duration_ns) for step in stepper.model.log.steps]), flush=True)
    stepper.model.close()


if __name__ == "__main__":
    main()
