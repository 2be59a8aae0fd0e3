"""Probes that every step should hit but none does: tries their alternatives, and says so."""

from collections.abc import Iterator

from tracer.engines import Engine
from tracer.errors import ProbeError
from tracer.probes.plan import Row
from tracer.probes.planner import Planner

STEPS = 2  # that ended without a hit: one may have begun before the probes were attached


class Unhit:
    """Watches the levels for which an engine declares probes that every step hits, until one probe of each was hit."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self.steps: dict[tuple[str, str], int] = {}  # (engine, level) → steps that had ended when its probes last changed
        self.settled: set[tuple[str, str]] = set()

    def moves(self, hits: dict[str, int], levels: list[str]) -> Iterator[tuple[Row, Row]]:
        """(row to retire, row in its place) of levels that no step hits; `hits` by program, `levels` that are on."""
        for engine in self.planner.engines:
            for level in dict.fromkeys(probe.level for probe in engine.probes if probe.every_token):
                if level in self.planner.levels and (engine.name, level) not in self.settled:
                    yield from self._look(engine, level, hits, level in levels)

    def _look(self, engine: Engine, level: str, hits: dict[str, int], is_on: bool) -> Iterator[tuple[Row, Row]]:
        key, steps = (engine.name, level), finished_steps(engine, hits)
        if not is_on or not steps:
            self.steps[key] = steps
        elif any(hits.get(probe.program) for probe in engine.probes if probe.every_token and probe.level == level):
            self.settled.add(key)
        elif steps - self.steps.get(key, 0) >= STEPS:
            yield from self._move(engine, level, steps)
            self.steps[key] = steps

    def _move(self, engine: Engine, level: str, steps: int) -> Iterator[tuple[Row, Row]]:
        silent = ", ".join(dict.fromkeys(self._standing(engine, level))) or "none of its functions was found"
        moved = []
        probes = {probe.program: probe for probe in engine.probes if probe.otherwise and probe.level == level}
        standing = [row for row in self.planner.rows if row.program in probes and not row.retired_ns]
        for row in reversed(standing):  # ends before begins: a begin without its end would be an open span
            other = None
            try:
                other = self.planner.elsewhere(engine, probes[row.program], row.library)
            except ProbeError as error:
                self.planner.warnings.append(str(error))
            if other:
                row.retired_ns = 1
                self.planner.rows.append(other)
                moved.append(other.symbol)
                yield row, other
        said = f"{engine.name}: no event of level {level} was seen in {steps} steps, probed at {silent}"
        where = ", ".join(dict.fromkeys(moved))
        self.planner.warnings.append(f"{said}: moved to {where}" if moved else f"{said}; this build calls another function")
        if not moved:
            self.settled.add((engine.name, level))

    def _standing(self, engine: Engine, level: str) -> Iterator[str]:
        programs = {probe.program for probe in engine.probes if probe.every_token and probe.level == level}
        return (row.symbol for row in self.planner.rows if row.program in programs and not row.retired_ns)


def finished_steps(engine: Engine, hits: dict[str, int]) -> int:
    """Number of steps that the engine has finished while it was observed."""
    ends = (probe.program for probe in engine.probes if probe.level == "token" and probe.at == "return")
    return max((hits.get(program, 0) for program in ends), default=0)
