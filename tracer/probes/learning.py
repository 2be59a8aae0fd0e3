"""Where a build of llama.cpp keeps the loop variables that the operators' one probe reads: learnt from its first graphs.

The kernel side reports, for each operator, from where the leading thread entered the barrier behind it, and in which places of
that caller's frame the operator's index and the graph stood at that moment. The graph loop is the caller that nearly
all operators have in common; a place that keeps agreeing while the operator changes is where the loop has its variable.

In a stripped program no probe sees the operator. There the kernel side examines every barrier that is entered from a frame
with the graph in it, and reports which places hold a number that has grown since the one before. The operator's index grows
to the last index but one where the loop has no barrier behind the last; the index of the operator behind it to the last.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tracer.recording import machine
from tracer.recording.format import Recording
from tracer.recording.tokens import kinds_of, records

REGISTERS = {
    "x86_64": ("rbx", "rbp", "r12", "r13", "r14", "r15"),
    "aarch64": tuple(f"x{number}" for number in range(19, 30)),
}
LEARN_NOTHING, LEARN_PLACES, LEARN_ENDS = 0, 1, 2  # enum learning of bpf/structs.h
GRAPHS = 2  # the end of one in which learning began, and a whole one
LEAST_SITES = 32  # where other devices take most operators the CPU's graphs are short: a place may agree by chance in a few
MOST_GRAPHS = 64  # that do not tell: this build is not like those that we know
AGREE = 0.85  # where operators are fused unannounced they pass the barrier and disagree


@dataclass(frozen=True)
class Loop:
    """What was learnt: the addresses behind the two calls of the barrier, and places as numbered in bpf/ggml.h."""

    call: int
    last_call: int
    node_at: int
    node_more: int
    graph_at: int


@dataclass(frozen=True)
class LearntLoop:
    """The same for a file, whichever process has it mapped: file offsets behind the two calls, `loop` and `last`."""

    id: str
    sites: dict[str, int]
    node_at: int
    node_more: int
    graph_at: int
    why = "the graph loop's own call, passed once per operator; learnt in an earlier recording"


@dataclass
class Learning:
    """Gathers `site` records of one process until they agree."""

    sites: list[np.void] = field(default_factory=list)
    last_sites: list[np.void] = field(default_factory=list)
    graphs: int = 0

    def observe(self, record: np.void) -> Loop | None:
        """Take one more record; the loop, once whole graphs identify it."""
        if not record["last"]:
            self.sites.append(record)
            return None
        self.graphs += 1
        if record["address"]:
            self.last_sites.append(record)
        return self._conclude() if len(self.sites) >= LEAST_SITES and len(self.last_sites) >= GRAPHS else None

    @property
    def hopeless(self) -> bool:
        """Whether enough graphs were seen to give up; a single thread enters no barrier to learn from."""
        return self.graphs >= MOST_GRAPHS

    def _conclude(self) -> Loop | None:
        call, _ = Counter(int(record["address"]) for record in self.sites).most_common(1)[0]
        same = [record for record in self.sites if record["address"] == call]
        last_call, _ = Counter(int(record["address"]) for record in self.last_sites).most_common(1)[0]
        blind, ends = bool(same[0]["blind"]), self.last_sites if last_call == call else []
        node, more = (growing_index if blind else index)(same, ends)
        graph = votes(same, "graph")
        if min(len(same) / len(self.sites), node.max() / len(same), graph.max() / len(same)) < AGREE:
            return None
        return Loop(call, last_call, int(node.argmax()), more, int(graph.argmax()))


def index(sites: list[np.void], ends: list[np.void]) -> tuple[np.ndarray, int]:
    """(votes for each place, what its number is more than the operator's) where a probe sees the operator."""
    here, before = votes(sites, "here"), votes(sites, "before")
    more = int(before.max() > here.max())
    return before if more else here, more


def growing_index(sites: list[np.void], ends: list[np.void]) -> tuple[np.ndarray, int]:
    """The same where none does; `ends` are the barriers behind the last operators, where the loop itself calls these."""
    here = votes(sites, "here")
    growing = here >= AGREE * len(sites)
    if ends:
        more = 0 if (growing & (votes(ends, "before") > 0)).any() else 1
        return here * (growing & (votes(ends if not more else sites, "before") > 0)), more
    more = int((growing & (votes(sites, "before") > 0)).any())
    return here * (growing & (votes(sites, "before" if more else "last_but_one") > 0)), more


def votes(sites: list[np.void], field: str) -> np.ndarray:
    """How many of the masks in a field have each bit set, shape [64]."""
    masks = np.array([site[field] for site in sites], np.uint64)
    return ((masks[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(axis=0).astype(np.int64)


def of_recording(folder: Path) -> list[LearntLoop]:
    """The loops that a collector's recording teaches: its `site` records, and the files in which their addresses lie."""
    recording = Recording(folder)
    files = {row["address"]: row for row in recording.manifest.get("sites", [])}
    kind, dtype = recording.layouts["site"]
    slots = recording.map_slots("details", 0, recording.slot_count("details"))
    learning: dict[int, Learning] = {}
    loops: dict[str, LearntLoop] = {}
    for record in records(slots[kinds_of(slots) == kind], dtype):
        loop = learning.setdefault(int(record["pid"]), Learning()).observe(record)
        if loop and loop.call in files and loop.last_call in files:
            call, last = files[loop.call], files[loop.last_call]
            places = loop.node_at, loop.node_more, loop.graph_at
            loops.setdefault(call["id"], LearntLoop(call["id"], {"loop": call["offset"], "last": last["offset"]}, *places))
    return list(loops.values())


def frame_place(number: int) -> str:
    """The name of a place of the frame, as numbered in bpf/ggml.h."""
    registers = REGISTERS[machine.describe()["arch"]]
    return registers[number] if number < len(registers) else f"stack word {number - len(registers)}"
