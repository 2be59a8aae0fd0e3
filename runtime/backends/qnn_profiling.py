"""Which executions on the NPU QNN itself profiles, and at which level; can be changed between any two runs.

ONNX Runtime fixes the level of a session at its creation, so switching means choosing between sessions of one context binary:
a subgraph that has run at two levels has two (0.4 MB and its binary's size each).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from runtime.errors import RequestError
from runtime.telemetry.profile import Timers

OFF = "off"
LEVELS = (OFF, "basic", "detailed", "optrace")
"""The levels that ONNX Runtime's QNN provider accepts; QNN's level `linting` is not among them."""
EVERY_KIND = "*"


@dataclass
class Profiling:
    """levels: subgraph kind (attention, expert; * for the others) → level. every: profile every Nth run of a subgraph.

    most: maximum number of profiled runs of a subgraph, None for no limit; it bounds the collected events.
    """

    levels: dict[str, str] = field(default_factory=dict)
    every: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        for level in self.levels.values():
            if level not in LEVELS:
                raise RequestError(f"QNN profiling {level!r} is unknown: choose one of {', '.join(LEVELS)}")
        if self.every < 1 or (self.most is not None and self.most < 0):
            raise RequestError("QNN profiling of every Nth run needs N of 1 or more, and a limit of 0 or more")

    @classmethod
    def parse(cls, text: str, every: int = 1, most: int | None = None) -> "Profiling":
        """Parse `detailed`, or levels by kind: `attention=detailed,expert=off`."""
        pairs = (word.strip().rpartition("=") for word in text.split(","))
        return cls({kind or EVERY_KIND: level for kind, _, level in pairs}, every, most)

    def level(self, kind: str) -> str:
        """The level of a subgraph kind."""
        return self.levels.get(kind, self.levels.get(EVERY_KIND, OFF))

    def level_of_run(self, kind: str, run: int, profiled: int) -> str:
        """The level of a subgraph's run number `run`, counted from 0, after `profiled` profiled ones."""
        chosen = run % self.every == 0 and (self.most is None or profiled < self.most)
        return self.level(kind) if chosen else OFF

    @property
    def on(self) -> bool:
        """Whether anything may be profiled."""
        return any(level != OFF for level in self.levels.values())


class SwitchingSession:
    """A subgraph's sessions, one for each level that it ran at; `run` uses the one of the current level.

    open_session: level → session and the name of its CSV file. `timers` record every run.
    """

    def __init__(
        self, kind: str, profiling: Profiling, open_session: Callable[[str], tuple[Any, str]], timers: Timers | None = None
    ):
        self.kind, self.profiling, self._open, self.timers = kind, profiling, open_session, timers
        self._sessions: dict[str, tuple[Any, str]] = {}
        self._runs = self._profiled = 0
        self._session(self._level())
        if profiling.every > 1 or profiling.most is not None:
            self._session(OFF)

    def run(self, names: Any, feeds: Any) -> Any:
        """Run once at the current level."""
        level = self._level()
        self._runs += 1
        self._profiled += level != OFF
        session, csv = self._session(level)
        if not self.timers:
            return session.run(names, feeds)
        began = monotonic_ns()
        outputs = session.run(names, feeds)
        self.timers.add("npu run", began, monotonic_ns(), csv=csv)
        return outputs

    def _level(self) -> str:
        return self.profiling.level_of_run(self.kind, self._runs, self._profiled)

    def _session(self, level: str) -> tuple[Any, str]:
        if level not in self._sessions:
            self._sessions[level] = self._open(level)
        return self._sessions[level]
