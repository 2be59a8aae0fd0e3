"""Engines are declarations: a TOML file here says which libraries to watch for, what to probe in them, and at which level."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracer.errors import EngineError

LEVELS = ("token", "graph", "operator", "expert", "qnn", "sched", "io")
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Probe:
    """One declared probe: the BPF program, and the site by USDT name, first existing symbol, QNN table slot, or learnt.

    It stands where its level or one that it serves is chosen. A probe that `teaches` where others are to stand goes when
    they do.
    """

    program: str
    level: str
    serves: tuple[str, ...] = ()
    usdt: str = ""
    symbols: tuple[str, ...] = ()
    slot: int = -1
    learnt: str = ""
    teaches: bool = False
    at: str = "entry"

    def wanted(self, levels: set[str]) -> bool:
        """Whether it stands at these levels."""
        return not levels.isdisjoint((self.level, *self.serves))


@dataclass(frozen=True)
class Engine:
    """One engine's declaration."""

    name: str
    id: int
    libraries: tuple[str, ...]
    probes: tuple[Probe, ...]
    graphs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    marker: str = ""
    operator_names: str = ""
    operator_table: str = ""
    inspect: bool = True
    api_major: int = 0
    source: str = field(default="", compare=False)

    def owns(self, file_name: str) -> bool:
        """Whether a library of this file name may hold the engine's code."""
        return file_name.startswith(self.libraries)


def frozen(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its lists as tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def _engine(path: Path) -> Engine:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
        probes = tuple(Probe(**frozen(row)) for row in data.pop("probes"))
        engine = Engine(probes=probes, source=str(path), **frozen(data))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is no engine declaration: {error}") from None
    for probe in probes:
        if probe.level not in LEVELS or probe.at not in ("entry", "return", "tail"):
            raise EngineError(f"{path}: probe {probe.program} has level {probe.level!r} at {probe.at!r}")
    return engine


def all_engines() -> dict[str, Engine]:
    """Every declared engine by name."""
    engines = (_engine(path) for path in sorted(FOLDER.glob("*.toml")))
    return {engine.name: engine for engine in engines}


def choose(names: list[str]) -> list[Engine]:
    """The engines called `names`; `auto` is all of them."""
    known = all_engines()
    if "auto" in names:
        return list(known.values())
    for name in names:
        if name not in known:
            raise EngineError(f"unknown engine {name!r}; known: auto, {', '.join(known)}")
    return [known[name] for name in names]
