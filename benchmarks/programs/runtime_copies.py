"""Steps of our runtime, half of them unseen by a tracer: runtime_copies.py MODEL EXTRA. One round for each line that it reads.

The time of a kernel of 100 µs depends on the work before it. Directly after a run of its own kind it takes two thirds of its
time, and with only the other kernels in between still a fifth less: the interpreter between two kernels also fills the caches.
So a copy of a kernel is a run of it within a copy of the whole step: the same calls in the same order on the same memory, through
a second copy of the probes' extension (the same code, from a file of which the tracer knows nothing).

A round has, for recorded and for unrecorded steps, alternately first, one step that finds the caches as the others left them, and
then EXTRA steps that count. It prints ms of one run of each kind of kernel in unseen and (`seen KIND`) in seen ones as
JSON, by the runtime's own clock directly around each run. When its input ends, it prints phase and ns of all seen steps
by the runtime's own clock.
"""

import json
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

from runtime.backends import calls
from runtime.moe import MoE
from runtime.step import token_path  # type: ignore[attr-defined]
from runtime.step.sampling import Sampler, Sampling
from runtime.telemetry import _probes, probes  # type: ignore[attr-defined]
from runtime.telemetry.log import Step
from runtime.telemetry.probes import Phase

PROMPT = "The router looks at the token and picks a few experts, and a cache keeps those that were used last. " * 12
PREFILLS, WARM = 3, 12
"""Prefills (several, for the first hit of a probe takes 40 µs), and decode steps that make what a step needs."""
SITES = {f"{name}_{at}": f"{name}__{at}" for name in ("token", "op", "expert") for at in ("begin", "end")}
"""Function of runtime.probes → its name in the extension."""


def unseen_extension() -> ModuleType:
    """A second copy of the probes' extension, unknown to a tracer, which identifies extensions by file and name."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "unseen.so"
        copyfile(_probes.__file__, path)
        loader = ExtensionFileLoader("_probes", str(path))
        spec = spec_from_loader("_probes", loader)
        assert spec
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module


class Twice:
    """Patches the runtime: a token is prepared for both extensions, and `use` selects the active one."""

    def __init__(self) -> None:
        self.extensions = unseen_extension(), _probes
        self.seen = True
        self._prepared: dict[int, tuple[Any, Any]] = {}
        calls.Call = self._of_both("Call")
        token_path.Combine = self._of_both("Combine")
        calls.run = self._run

    def use(self, seen: bool) -> None:
        """Make the runtime pass the sites that the tracer sees, or the unseen ones."""
        self.seen, extension = seen, self.extensions[seen]
        for name, theirs in ({"graph": "graph", "route": "route"} | SITES).items():
            setattr(probes, name, getattr(extension, theirs))

    def _of_both(self, kind: str) -> Any:
        def prepare(*arguments: Any) -> Any:
            both = tuple(getattr(extension, kind)(*arguments) for extension in self.extensions)
            self._prepared[id(both[True])] = both
            return both[True]

        return prepare

    def _run(self, items: list[Any], caches: list[int], times: np.ndarray, first: int) -> int:
        chosen = [self._prepared[id(item)][self.seen] for item in items]
        return int(self.extensions[self.seen].run(chosen, caches, times, first))


class Stepper:
    """A model after its prompt; every step is at the same position of the sequence, with another token."""

    def __init__(self, model: Path, extra: int):
        self.twice, self.extra, self.taken = Twice(), extra, 0
        self.model = MoE.load(model, "all", prefill_backend="cpu", decode_backend="cpu", prefetch="off")
        self.ids, self.sampler = self.model.encode(PROMPT), Sampler(Sampling(0.0, 0, 1.0, 0))
        self.sequence = self.model.engine.begin_sequence(len(self.ids) + 1)
        self.steps: list[Step] = []
        for _ in range(PREFILLS):
            self._take(0, self.ids)
        for _ in range(WARM):
            self.step()

    def step(self) -> None:
        """Decode one token."""
        self.taken += 1
        self._take(len(self.ids), [self.ids[self.taken % len(self.ids)]])

    def round(self, turn: int) -> dict[str, float]:
        """ms of a run by kind of kernel, in unseen and in seen steps."""
        log, spent = self.model.log, dict[str, float]()
        for seen in (turn % 2 == 0, turn % 2 != 0):
            self.twice.use(seen)
            self.step()
            ns, runs = log.graph_ns.copy(), log.graphs.copy()
            for _ in range(self.extra):
                self.step()
            for (kind, _), n in (log.graphs - runs).items():
                name = kind.name.lower()
                spent[f"seen {name}" if seen else name] = (log.graph_ns[kind] - ns[kind]) / n / 1e6
        return spent

    def _take(self, behind: int, ids: list[int]) -> None:
        self.sequence.length = behind
        step, _ = self.model.engine.step(self.sequence, ids, self.sampler)
        if self.twice.seen:
            self.steps.append(step)


def main() -> None:
    stepper = Stepper(Path(sys.argv[1]), int(sys.argv[2]))
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(stepper.round(turn)), flush=True)
    stepper.model.close()
    print(json.dumps([(Phase(step.phase).name.lower(), step.duration_ns) for step in stepper.steps]), flush=True)


if __name__ == "__main__":
    main()
