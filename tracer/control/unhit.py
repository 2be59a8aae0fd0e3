"""Probes that every token should hit but none does: tries their alternatives, and notes it in the recording."""

from collections.abc import Callable, Iterator

from tracer.engines import Engine
from tracer.probes.attach import Attachments

TOKENS = 2  # that ended without a hit: one may have begun before the probes were attached


class Unhit:
    """Watches the levels for which an engine declares probes that every token hits, until one probe of each was hit."""

    def __init__(self, probes: Attachments, runs: Callable[[str], int], changed: Callable[[], None]):
        self.probes, self.runs, self.changed = probes, runs, changed
        self.tokens: dict[tuple[str, str], int] = {}  # (engine, level) → tokens that had ended when its probes last changed
        self.settled: set[tuple[str, str]] = set()

    def turn(self) -> None:
        """Move the probes of levels that had no hit in several tokens."""
        for engine in self.probes.engines:
            levels = dict.fromkeys(probe.level for probe in engine.probes if probe.every_token)
            for level in [each for each in levels if each in self.probes.levels and (engine.name, each) not in self.settled]:
                self._look(engine, level)

    def _look(self, engine: Engine, level: str) -> None:
        key, tokens = (engine.name, level), self._tokens(engine)
        if level in self.probes.shed_levels or not tokens:
            self.tokens[key] = tokens
        elif any(self.runs(probe.program) for probe in engine.probes if probe.every_token and probe.level == level):
            self.settled.add(key)
        elif tokens - self.tokens.get(key, 0) >= TOKENS:
            self._move(engine, level, tokens)
            self.tokens[key] = tokens

    def _tokens(self, engine: Engine) -> int:
        """Number of tokens, or prompts, that the engine has finished while it was observed."""
        ends = (probe.program for probe in engine.probes if probe.level == "token" and probe.at == "return")
        return max(map(self.runs, ends), default=0)

    def _move(self, engine: Engine, level: str, tokens: int) -> None:
        silent = ", ".join(dict.fromkeys(self._standing(engine, level))) or "none of its functions was found"
        moved = ", ".join(self.probes.move(engine, level))
        self.changed()
        said = f"{engine.name}: no event of level {level} was seen in {tokens} tokens, probed at {silent}"
        self.probes.warnings.append(f"{said}: moved to {moved}" if moved else f"{said}; this build calls another function")
        if not moved:
            self.settled.add((engine.name, level))

    def _standing(self, engine: Engine, level: str) -> Iterator[str]:
        programs = {probe.program for probe in engine.probes if probe.every_token and probe.level == level}
        return (row.symbol for row in self.probes.rows if row.program in programs and not row.retired_ns)
