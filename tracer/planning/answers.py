"""What a planner answers to a recorder's messages: probes for files, and for the graph loop that it learns from records."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tracer.engines import Engine
from tracer.kernel.definitions import constant, name_in, program_numbers
from tracer.kernel.plan_file import FileRoot, common_entries, file_entry, found_at_run_time
from tracer.planning.unhit import Unhit
from tracer.probes import reach
from tracer.probes.elf import file_contains, file_stamp
from tracer.probes.learning import (
    GRAPHS,
    MISFITS,
    Learning,
    LearntLoop,
    Loop,
    frame_slot,
)
from tracer.probes.plan import FilePlan, Row, stored_row
from tracer.probes.planner import Planner

MASKS = ("address", "here", "before", "graph", "last_but_one")
"""Fields of a site that are unsigned; JSON's numbers have a sign in the recorder."""
INFINITY_NS = 1 << 63
Message = dict[str, Any]


def current_file(path: str) -> tuple[str, Any]:
    """Distinguishes a file from others, also from the one that was at its path before."""
    real = reach.resolved_path(path)
    with contextlib.suppress(OSError):
        return real, file_stamp(real)
    return real, None


@dataclass
class Answers:
    """The answers to one recorder, whose files are below `place`; `learnt` takes each loop that a build was learnt to have."""

    planner: Planner
    place: FileRoot
    loops: list[LearntLoop] = field(default_factory=list)
    learnt: Callable[[LearntLoop], None] = lambda loop: None
    fetched: Callable[[str, str], str] = lambda path, identity: path
    """The path here of a file that has this path and id there."""
    present: set[str] = field(default_factory=set)
    """The engines whose probes at run time the plan has."""

    def __post_init__(self) -> None:
        self._numbers = program_numbers()
        self._late = self.planner.programs(late=True)
        self._waiting: list[Row] = []
        self._seen: set[tuple[str, Any]] = set()
        self._learning: dict[int, Learning] = {}
        self._loop: Loop | None = None
        self._learns, self._graphs_since = constant("LEARN_PLACES"), 0
        self._stands_since = INFINITY_NS  # when the recorder had placed the learnt probes
        self._told = len(self.planner.warnings)
        self._unhit = Unhit(self.planner)

    def plan(self) -> Message:
        """The plan with which the recorder begins: nothing in any file, but all programs that files may need."""
        self.present = {engine.name for engine in self.planner.engines}
        plan = common_entries(self.planner, self.place, [], self.present)
        programs = self._bring(self.planner.programs())
        return {**plan, "programs": {**plan["programs"], **programs}, "files": []}

    def answer(self, message: Message) -> Message | None:
        """The answer or order that follows a message; None if none does."""
        if "ask" in message:
            path = self.fetched(message["path"], message["id"])
            order = self._files(path, message["executable"]) | {"answer": message["ask"]}
        elif "site" in message:
            order = self._site({**message["site"], **{key: message["site"][key] & (1 << 64) - 1 for key in MASKS}})
        elif "placed" in message:
            self._stands_since = min(self._stands_since, message["placed"]["ts"]) if self._loop else INFINITY_NS
            order = {}
        else:
            order = self._misfit(message["misfit"]["what"]) if "misfit" in message else {}
        said, self._told = self.planner.warnings[self._told :], len(self.planner.warnings)
        return order | {"warnings": said} if said else order or None

    def is_probed(self, path: str) -> bool:
        """Whether anything is to be probed in a program; all engines are looked for, as what is found is kept for the answer."""
        real = reach.resolved_path(path)
        markers = [engine.marker.encode() for engine in self.planner.engines if engine.marker]
        found = [file_contains(real, marker) for marker in markers] if self.place.is_of(real) else []
        return any(found) or self.planner.named.wants(real, os.path.basename(path), True)

    def without_probes(self, path: str) -> Message:
        """The order about a program in which nothing is probed: it need not be held for the question."""
        return self._files(reach.resolved_path(path), True)

    def moves(self, hits: dict[str, int], levels: list[str]) -> Iterator[Message]:
        """Orders that move probes that no step hits; `hits` by program so far, `levels` that are on."""
        for gone, other in self._unhit.moves(hits, levels):
            yield {"retire": [{"program": gone.program, "library": self.place.shown(gone.library)}]}
            yield {"rows": [self._row(other)], "programs": self._bring({other.program})}
        if len(self.planner.warnings) > self._told:
            said, self._told = self.planner.warnings[self._told :], len(self.planner.warnings)
            yield {"warnings": said}

    def _files(self, path: str, is_executable: bool) -> Message:
        """The plans of a file and of those that its engine opens together with it."""
        beside = [] if is_executable else self.planner.beside(path)
        identities = {name: current_file(name) for name in [path, *beside]}
        names = [name for name, identity in identities.items() if identity not in self._seen]
        self._seen |= set(identities.values())
        plans = [self.planner.file(name, is_executable) for name in names if self.place.is_of(name)]
        rows = [row for plan in plans for row in self._ready(plan)]
        files = [file_entry(self.planner, self.place, plan, self.loops) for plan in plans]
        new = {name for plan in plans for name in plan.engines} - self.present
        self.present |= new
        later = found_at_run_time(self.planner, new)
        here = found_at_run_time(self.planner, {name for plan in plans for name in plan.engines})
        programs = {row["program"] for each in files for row in each["rows"]} | {row["program"] for row in (*here, *later)}
        programs |= {row.program for row in rows}
        order = {
            "files": files,
            "rows": [self._row(row) for row in rows],
            "at_run_time": later,
            "programs": self._bring(programs),
            "retire": [{"program": row.program, "library": self.place.shown(row.library)} for row in self.planner.displaced()],
            "manifest": {"functions": self.planner.named.found} if self.planner.named.found else {},
        }
        return {key: value for key, value in order.items() if value}

    def _ready(self, plan: FilePlan) -> list[Row]:
        """Sets aside a file's rows that wait for a late engine; returns those that waited for the engine of this file."""
        waited: list[Row] = []
        if any(engine.late and engine.name in plan.engines for engine in self.planner.engines):
            waited, self._waiting = self._waiting, []
            self._late = set()
        self.planner.rows += plan.rows
        self._waiting += [row for row in plan.rows if row.program in self._late]
        plan.rows = [row for row in plan.rows if row.program not in self._late]
        once = {(row.program, row.library.rpartition("/")[0]): row for row in reversed(waited)}
        return list(once.values())

    def _bring(self, programs: set[str]) -> dict[str, int]:
        return {name: self._numbers.get(name, -1) for name in sorted(programs)}

    def _row(self, row: Row) -> Message:
        return {**stored_row(row), "library": self.place.shown(row.library)}

    def _engine(self) -> Engine:
        return next(engine for engine in self.planner.engines if any(probe.teaches for probe in engine.probes))

    def _site(self, site: Message) -> Message:
        """Learn where the graph loop is, have it probed, and the learning probes removed once both have seen a whole graph."""
        if self._loop:
            return self._end_of_graph(site)
        learning = self._learning.setdefault(site["pid"], Learning())
        learning.places |= {site["address"]: site["place"]} if site.get("place") else {}
        loop = learning.observe(site)
        if not loop:
            return self._learn("LEARN_NOTHING") if self._learns and learning.hopeless else {}
        call, last = learning.places.get(loop.call), learning.places.get(loop.last_call)
        if not (call and last and self._learns):
            return {}
        return self._probe_loop(loop, LearntLoop.of(loop, call, last), call["path"])

    def _probe_loop(self, loop: Loop, learnt: LearntLoop, path: str) -> Message:
        place = frame_slot(loop.node_at)
        why = f"the graph loop's own call, passed once per operator; learnt from its first graphs (node in {place})"
        here = self.fetched(path, learnt.id)
        rows = self.planner.learnt(self._engine(), {name: (here, at) for name, at in learnt.sites.items()}, why)
        self.planner.rows += rows
        if not rows:
            return self._learn("LEARN_NOTHING")
        self.learnt(learnt)
        self._loop = loop
        order = self._learn("LEARN_ENDS")
        order["settings"] |= learnt.settings()
        return {**order, "rows": [self._row(row) for row in rows], "programs": self._bring({row.program for row in rows})}

    def _end_of_graph(self, site: Message) -> Message:
        self._graphs_since += int(bool(site["last"]) and site["ts"] > self._stands_since)
        if self._graphs_since < GRAPHS or not self._learns:
            return {}
        learnt = {probe.program for probe in self._engine().probes if probe.learnt}
        files = {row.library for row in self.planner.rows if row.program in learnt}
        teachers = {probe.program for probe in self._engine().probes if probe.teaches}
        gone = [{"program": name, "library": self.place.shown(path)} for name in sorted(teachers) for path in sorted(files)]
        return self._learn("LEARN_NOTHING") | {"retire": gone}

    def _learn(self, what: str) -> Message:
        """Have the programs learn what a name of enum learning says."""
        self._learns = constant(what)
        return {"settings": {"learn": self._learns}}

    def _misfit(self, what: int) -> Message:
        """Stop recording what cannot be recorded correctly with this build."""
        engine, self._loop = self._engine(), None
        programs = {probe.program for probe in engine.probes if probe.level in ("operator", "expert")}
        why = f"levels operator and expert are switched off: {MISFITS[name_in('misfit_of', what)]}"
        self.planner.warnings.append(f"{engine.name}: {why}")
        gone = [{"program": each} for each in sorted(programs)]
        return self._learn("LEARN_NOTHING") | {"retire": gone, "engines": {engine.name: {"untold": why}}}
