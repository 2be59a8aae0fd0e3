"""Steps of our runtime with copies of its kernels: runtime_copies.py MODEL EXTRA [KIND ...]. A round for each line that it reads.

A kernel of 100 µs takes up to half as long again where the rest of a step has swept the caches as right behind a run of its own
kind. So each copy is followed by a sweep: as many bytes are read as a step's other subgraphs read of their weights between two
runs of this kind. Copies of what runs once in a layer are other layers', in turn. For each kind there is a step whose runs of it have
EXTRA copies before them and one without: a kernel takes what its runs grow by, less the sweeps' time, over EXTRA.

It prints ms of one run of each kind as JSON, by the host's clock. Where EXTRA is 0, a round is as many plain steps. When its
input ends, it prints phase and ns of all steps by the runtime's own clock.
"""

import json
import mmap
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import calls
from runtime.graph import Graph
from runtime.moe import MoE
from runtime.package import Package, attention_name, layer_name
from runtime.probes import Phase
from runtime.sampling import Sampler, Sampling

Run = Callable[[Any, Any], Any]
KINDS = ("attention", "router", "mlp", "expert", "head")
PROMPT = "The router looks at the token and picks a few experts, and a cache keeps those that were used last. " * 12
WARM = 12
"""Steps that make what a step needs, before the first round."""
MOST_SWEPT = 64 << 20
"""Bytes: more than caches hold."""


class Copies:
    """Patches the runtime: copies of one kind of subgraph before each run of it in a decoded token."""

    def __init__(self, extra: int):
        self.extra, self.kind, self.copying, self.sweep_bytes = extra, "", False, 0
        self.slots: list[int] = []
        """ns of a step's runs of the kind, with their copies, but for the sweeps'."""
        self._alike: defaultdict[Hashable, list[tuple[Run, Any]]] = defaultdict(list)
        self._memory, self._at = small_pages(2 * MOST_SWEPT), 0
        self._patch()

    def _patch(self) -> None:
        """The two places where sessions run: one by one, and as prepared for a token."""
        once, prepared = Graph._probed, calls.Call

        def probed(graph: Graph, run: Run, first: Any, second: Any, n_tokens: int) -> Any:
            if n_tokens > 1 or graph.kind.name.lower() != self.kind:
                return once(graph, run, first, second, n_tokens)
            return once(graph, self._with_copies(run, lambda: iter([(run, first)] * self.extra)), first, second, n_tokens)

        def call(run: Run, binding: Any, handle: int, of: Any, layer: int, expert: int, *told: Any) -> Any:
            kind, alike = of.name.lower(), self._alike[of, expert]
            own = len(alike)
            alike.append((run, binding))
            more = self._with_copies(run, lambda: self._others(alike, own))

            def maybe(first: Any, second: Any) -> Any:
                return (more if self.kind == kind else run)(first, second)

            return prepared(maybe, binding, handle, of, layer, expert, *told)

        Graph._probed = probed  # type: ignore[method-assign]
        calls.Call = call

    def _others(self, alike: list[tuple[Run, Any]], own: int) -> Iterator[tuple[Run, Any]]:
        """Runs of other layers, that behind this one first."""
        rest = alike[own + 1 :] + alike[:own] or [alike[own]]
        return iter([rest[at % len(rest)] for at in range(self.extra)])

    def _with_copies(self, run: Run, copies: Callable[[], Iterator[tuple[Run, Any]]]) -> Run:
        def more(first: Any, second: Any) -> Any:
            swept, began = 0, clock()
            for copy, its_own in copies() if self.copying else ():
                copy(its_own, second)
                before = clock()
                self._sweep()
                swept += clock() - before
            result = run(first, second)
            self.slots.append(clock() - began - swept)
            return result

        return more

    def _sweep(self) -> None:
        """Read memory that was not read for long."""
        n = self.sweep_bytes // 4
        self._at = 0 if self._at + n > len(self._memory) else self._at
        self._memory[self._at : self._at + n].sum()
        self._at += n


def small_pages(size: int) -> np.ndarray:
    """Memory of `size` bytes as float32, in pages as mapped weights have them: reading it sweeps the TLB, too."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.float32)
    array[:] = 1
    return array


class Stepper:
    """A model behind its prompt; every step stands at the same place of the sequence, with another token."""

    def __init__(self, model: Path, extra: int, asked: list[str]):
        self.copies = Copies(extra) if extra else None
        self.model = MoE.load(model, "all", prefill_backend="cpu", decode_backend="cpu", prefetch="off")
        self.ids, self.sampler, self.taken = self.model.encode(PROMPT), Sampler(Sampling(0.0, 0, 1.0, 0)), 0
        self.sequence = self.model.engine.begin_sequence(len(self.ids) + 1)
        self.model.engine.step(self.sequence, self.ids, self.sampler)
        before = self.model.log.graphs.copy()
        for _ in range(WARM):
            self.step()
        ran = self.model.log.graphs - before
        self.runs = Counter({kind.name.lower(): count // WARM for (kind, _), count in ran.items()})
        self.kinds = [kind for kind in asked or KINDS if self.runs[kind]]

    def step(self) -> None:
        """Decode one token."""
        self.sequence.length = len(self.ids)
        self.taken += 1
        self.model.engine.step(self.sequence, [self.ids[self.taken % len(self.ids)]], self.sampler)

    def round(self, turn: int) -> dict[str, float]:
        """ms of a run by kind, behind a step that wakes up; nothing without copies."""
        self.step()
        if self.copies:
            return {kind: self._kernel(self.copies, kind, turn % 2 == 0) for kind in self.kinds}
        for _ in range(2 * len(self.kinds)):
            self.step()
        return {}

    def _kernel(self, copies: Copies, kind: str, copies_first: bool) -> float:
        copies.kind, copies.sweep_bytes = kind, self.swept(kind)
        spent = {}
        for copies.copying in (copies_first, not copies_first):
            copies.slots.clear()
            self.step()
            spent[copies.copying] = float(np.mean(copies.slots))
        copies.kind = ""
        return (spent[True] - spent[False]) / copies.extra / 1e6

    def swept(self, kind: str) -> int:
        """Bytes of weights that a step's other subgraphs read between two runs of this kind."""
        sizes = weights(self.model.package)
        whole = sum(count * sizes[of] for of, count in self.runs.items())
        return min(whole // self.runs[kind] - sizes[kind], MOST_SWEPT)


def weights(package: Package) -> Counter[str]:
    """Bytes of one subgraph's weights, by kind."""
    names = {"attention": attention_name(0), "router": layer_name("router", 0), "mlp": layer_name("shared", 0), "head": "head"}
    found = {kind: name for kind, name in names.items() if (package.folder / f"{name}.onnx").exists()}
    return Counter(
        {kind: initializer_bytes(package.graph(name)) for kind, name in found.items()} | {"expert": package.expert_bytes}
    )


def initializer_bytes(graph: bytes) -> int:
    """Of a model, as stored."""
    tensors = onnx.load_model_from_string(graph).graph.initializer
    return sum(int(np.prod(t.dims)) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in tensors)


def main() -> None:
    stepper = Stepper(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(stepper.round(turn)), flush=True)
    print(json.dumps([(Phase(step.phase).name.lower(), step.duration_ns) for step in stepper.model.log.steps]), flush=True)
    stepper.model.close()


if __name__ == "__main__":
    main()
