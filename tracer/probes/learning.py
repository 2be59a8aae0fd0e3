"""Learns from the first graphs where a build of llama.cpp keeps the loop variables that the single operator probe reads.

For each operator, the BPF program reports the address from which the leading thread entered the barrier after it, and which
places of that caller's frame held the operator's index and the graph at that moment. The graph loop is the caller that nearly
all operators have in common; a place that keeps agreeing while the operator changes is the loop's variable.

In a stripped program no probe sees the operator. There the BPF program examines every barrier that is entered from a frame
that holds the graph, and reports which places hold a number that has grown since the previous barrier. If the loop has no
barrier after the last operator, the operator's index grows to the last but one, and the next operator's index to the last.
"""

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracer.recording.format import Recording, kinds_of, records_in_slots

REGISTERS = {
    "x86_64": ("rbx", "rbp", "r12", "r13", "r14", "r15"),
    "aarch64": tuple(f"x{number}" for number in range(19, 30)),
}
Site = Mapping[str, Any] | np.void
"""A `site` record, or its fields."""
MISFITS = {
    "MISFIT_TENSOR": "the tensors of its graphs have an unknown layout",
    "MISFIT_LOOP": "its graph loop differs from the learnt one: a node came twice, or does not belong to its graph",
}
"""Names of enum misfit_of (bpf/records.h) → why a build cannot be recorded with its learnt loop."""
GRAPHS = 2  # the rest of the one in which learning began, and a whole one
LEAST_SITES = 32  # if other devices run most operators, the CPU's graphs are short: with few sites a place may agree by chance
MOST_GRAPHS = 64  # graphs without a result: this build differs from the known ones
AGREE = 0.85  # operators that were fused without notice pass the barrier and disagree


@dataclass(frozen=True)
class Loop:
    """A learnt loop: the return addresses of its two barrier calls, and places as numbered in bpf/ggml.h."""

    call: int
    last_call: int
    node_at: int
    node_more: int
    graph_at: int


@dataclass(frozen=True)
class LearntLoop:
    """A learnt loop by file, independent of the process: file offsets after its calls: `loop`, and `last` if that is another."""

    id: str
    sites: dict[str, int]
    node_at: int
    node_more: int
    graph_at: int
    why = "the graph loop's own call, passed once per operator; learnt in an earlier recording"

    @classmethod
    def of(cls, loop: Loop, call: dict[str, Any], last: dict[str, Any]) -> "LearntLoop":
        """From a loop and the places (path, id, offset) of its two addresses."""
        sites = {"loop": call["offset"]} | ({"last": last["offset"]} if last["offset"] != call["offset"] else {})
        return cls(call["id"], sites, loop.node_at, loop.node_more, loop.graph_at)

    def settings(self) -> dict[str, int]:
        """By name in struct settings (bpf/structs.h)."""
        places = {name: getattr(self, name) for name in ("node_at", "node_more", "graph_at")}
        return {**places, "one_call": int("last" not in self.sites)}


@dataclass
class Learning:
    """Collects a process's `site` records until they agree."""

    sites: list[Site] = field(default_factory=list)
    last_sites: list[Site] = field(default_factory=list)
    graphs: int = 0
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Address → path, id and offset of the file that contains it, as far as they were told."""

    def observe(self, record: Site) -> Loop | None:
        """Take another record; returns the loop once whole graphs identify it."""
        if not record["last"]:
            self.sites.append(record)
            return None
        self.graphs += 1
        if record["address"]:
            self.last_sites.append(record)
        return self._conclude() if len(self.sites) >= LEAST_SITES and len(self.last_sites) >= GRAPHS else None

    @property
    def hopeless(self) -> bool:
        """Whether enough graphs were seen to give up; with a single thread there are no barriers to learn from."""
        return self.graphs >= MOST_GRAPHS

    def _conclude(self) -> Loop | None:
        call, _ = Counter(int(record["address"]) for record in self.sites).most_common(1)[0]
        same = [record for record in self.sites if record["address"] == call]
        last_call, _ = Counter(int(record["address"]) for record in self.last_sites).most_common(1)[0]
        blind, ends = bool(same[0]["blind"]), self.last_sites if last_call == call else []
        node, more = (growing_index if blind else index_votes)(same, ends)
        graph = votes_by_bit(same, "graph")
        if min(len(same) / len(self.sites), node.max() / len(same), graph.max() / len(same)) < AGREE:
            return None
        return Loop(call, last_call, int(node.argmax()), more, int(graph.argmax()))


def index_votes(sites: list[Site], ends: list[Site]) -> tuple[np.ndarray, int]:
    """(votes for each place, how much its number exceeds the operator's index), for builds in which a probe sees the operator."""
    here, before = votes_by_bit(sites, "here"), votes_by_bit(sites, "before")
    more = int(before.max() > here.max())
    return before if more else here, more


def growing_index(sites: list[Site], ends: list[Site]) -> tuple[np.ndarray, int]:
    """The same for stripped builds; `ends` are the barriers after the last operators, if the loop itself calls them."""
    here = votes_by_bit(sites, "here")
    growing = here >= AGREE * len(sites)
    if ends:
        more = 0 if (growing & (votes_by_bit(ends, "before") > 0)).any() else 1
        return here * (growing & (votes_by_bit(ends if not more else sites, "before") > 0)), more
    more = int((growing & (votes_by_bit(sites, "before") > 0)).any())
    return here * (growing & (votes_by_bit(sites, "before" if more else "last_but_one") > 0)), more


def votes_by_bit(sites: list[Site], field: str) -> np.ndarray:
    """For each bit, the number of masks in a field that have it set, shape [64]."""
    masks = np.array([site[field] for site in sites], np.uint64)
    return ((masks[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(axis=0).astype(np.int64)


def of_recording(folder: Path) -> list[LearntLoop]:
    """The loops learnt from the `site` records of a recorder's recording, and the files that contain their addresses."""
    recording = Recording(folder)
    files = {row["address"]: row for row in recording.manifest.get("sites", [])}
    kind, dtype = recording.layouts["site"]
    slots = recording.map_slots("details", 0, recording.slot_count("details"))
    learning: dict[int, Learning] = {}
    loops: dict[str, LearntLoop] = {}
    for record in records_in_slots(slots[kinds_of(slots) == kind], dtype):
        loop = learning.setdefault(int(record["pid"]), Learning()).observe(record)
        if loop and loop.call in files and loop.last_call in files:
            learnt = LearntLoop.of(loop, files[loop.call], files[loop.last_call])
            loops.setdefault(learnt.id, learnt)
    return list(loops.values())


def frame_slot(number: int) -> str:
    """The name of a frame place, as numbered in bpf/ggml.h."""
    registers = REGISTERS[platform.machine()]
    return registers[number] if number < len(registers) else f"stack word {number - len(registers)}"
