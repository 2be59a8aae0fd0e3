"""Engines are declarations: TOML files here list the libraries to watch for, what to probe in them, and at which level."""

import os
import re
import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from tracer.errors import EngineError

LEVELS = ("token", "graph", "operator", "expert", "qnn", "sched", "io")
NEEDS = {"operator": "graph", "expert": "graph"}
"""Level → the level that it requires for its names or its records: a graph's contents are recorded at its begin."""
ANCHORS = ("strings", "calls", "jumps", "file")
PROBE_POSITIONS = ("entry", "return", "tail", "exits")
ENDS = {"returns": "return", "exits": "exits"}
"""Keys that name the program at a function's end, and its position."""
EXAMPLES: dict[Any, str] = {
    str: 'a text, "..."',
    int: "a number",
    bool: "true or false",
    tuple: 'a list, ["..."]',
    dict: "a table",
}
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Probe:
    """One declared probe: the BPF program, and the site by USDT name, first existing symbol, QNN table slot, or learnt.

    It is used if its level or one that it serves is chosen. A probe that `teaches` the sites of others is removed once they
    are attached.
    """

    program: str
    level: str
    serves: tuple[str, ...] = ()
    usdt: str = ""
    symbols: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()  # alternatives, in this order, if none of `symbols` exists or is called
    every_token: bool = False  # the engine hits it, or another such probe of its level, in every step
    slot: int = -1
    learnt: str = ""
    teaches: bool = False
    table: str = ""  # name of the function table that has `slot`; "" for QNN's
    since: int = 0  # version of the table that added the slot
    at: str = "entry"
    every: bool = False  # all functions whose names begin as one of `symbols`, which end in *
    needed: bool = False  # a library without the function is reported
    throws: bool = False  # exceptions may pass the function: its return is probed at its own returns, if all are known
    end_optional: bool = False  # of one that `throws`: if not all are known, its end is not probed, instead of its return address
    unless: tuple[str, ...] = ()  # not used in a file that has one of these symbols
    once: bool = False  # not used if the program is already attached in another library of the folder: they call each other
    late: bool = False  # attached, and its BPF program loaded, only once a late engine's library is opened
    spared_by: tuple[str, ...] = ()  # unused while all these are attached, in the same files, unless another caller appears
    unless_engine: str = ""  # not used in a program that also has files of this engine, whose own probes tell the same
    anchor: dict[str, Any] = field(default_factory=dict)  # finds the function in a stripped program (tracer/probes/anchors.py)

    def wanted(self, levels: set[str]) -> bool:
        """Whether it is used at these levels."""
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
    together: bool = False  # the program opens all its libraries in a folder before it chooses: they get their probes together
    marker: str = ""
    needs: tuple[str, ...] = ()  # symbols of the versions whose layouts are known: a file without any of them gets no probes
    operator_table: tuple[str, ...] = ()  # the first operator names of the array in a file
    late: bool = False  # few programs use it: its BPF programs are loaded when one of its libraries is opened
    inspect: bool = True
    inspectable: tuple[str, ...] = ()  # prefixes of the names of files that may be inspected although `inspect` forbids it
    api_major: int = 0
    api_minor: int = 0  # the newest API version that the slots were checked against
    same_since: int = 0  # the API version since which the slots are where they are now
    older_lack: dict[str, list[int]] = field(
        default_factory=dict
    )  # of earlier versions whose order is known: slots not there yet
    interfaces: dict[str, list[int]] = field(
        default_factory=dict
    )  # name of a table in `probes` → number, bytes of the table with that order, numbers that need no probes
    not_language: tuple[str, ...] = ()  # prefixes of libraries whose models are none of language: their steps have no phase
    tried_on: str = ""  # what took the place of the NPU, if no device has confirmed the engine's records
    backends: dict[str, str] = field(default_factory=dict)  # name → the 16 bytes, as hexadecimal, that identify a ggml backend
    settings: dict[str, Any] = field(default_factory=dict)  # by name in struct settings (bpf/structs.h): numbers, or rows of them
    source: str = field(default="", compare=False)

    @property
    def is_bundled(self) -> bool:
        """Whether it is declared in this folder, not by the user."""
        return Path(self.source).parent == FOLDER

    def owns(self, file_name: str) -> bool:
        """Whether a library with this file name may contain the engine's code."""
        return file_name.startswith(self.libraries)

    def inspects(self, path: str) -> bool:
        """Whether the code of this file may be inspected."""
        return self.inspect or os.path.basename(path).startswith(self.inspectable)


def with_needed(levels: set[str]) -> tuple[set[str], list[str]]:
    """(the levels and those that they require, a sentence for each added one)."""
    asking: dict[str, list[str]] = {}
    for level in sorted(levels & NEEDS.keys()):
        if NEEDS[level] not in levels:
            asking.setdefault(NEEDS[level], []).append(level)
    said = [f"level {needed} is recorded too: {' and '.join(by)} need it" for needed, by in asking.items()]
    return levels | asking.keys(), said


def with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    """The row with tuples instead of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def parse_engine(data: dict[str, Any], path: Path) -> Engine:
    """An engine from its declaration in the file `path`. Raises EngineError with the file, the key and the remedy."""
    name = data.get("name", "(no name)")
    rows = data.get("probes")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EngineError(f"{path}: engine {name}: key probes: give a list of tables with program, level and symbols")
    check_keys(Engine, {**data, "probes": []}, f"{path}: engine {name}")
    probes = []
    for row in rows:
        where = f"{path}: engine {name}, probe {row.get('program', '(no program)')}"
        ends = next(({"program": row[key], "at": at} for key, at in ENDS.items() if key in row), {})
        row = {key: value for key, value in row.items() if key not in ENDS}
        check_keys(Probe, row | ends, where)
        probes += [Probe(**with_tuples(row | more)) for more in ([{}, ends] if ends else [{}])]
        if probes[-1].level not in LEVELS:
            raise EngineError(f"{where}: key level: {probes[-1].level!r} is not known; known: {', '.join(LEVELS)}")
        unknown = [key for key in probes[-1].anchor if key not in ANCHORS]
        if unknown:
            raise EngineError(f"{where}: key anchor: {unknown[0]!r} is not known; known: {', '.join(ANCHORS)}")
        if probes[-1].at not in PROBE_POSITIONS:
            raise EngineError(f"{where}: key at: {probes[-1].at!r} is not known; known: {', '.join(PROBE_POSITIONS)}")
    for key, identity in data.get("backends", {}).items():
        if not re.fullmatch("[0-9a-fA-F]{32}", str(identity)):
            raise EngineError(f"{path}: engine {name}: key backends.{key}: {identity!r} is wrong; give 16 hexadecimal bytes")
    return Engine(**{**with_tuples(data), "probes": tuple(probes), "source": str(path)})


def check_keys(kind: type, row: dict[str, Any], where: str) -> None:
    """Raise EngineError if a key is unknown or missing, or a list where it must not be, or vice versa."""
    known = {each.name: each for each in fields(kind) if each.name != "source"}
    for key, value in row.items():
        if key not in known:
            raise EngineError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
        wanted: Any = get_origin(known[key].type) or known[key].type
        if not isinstance(value, list if wanted is tuple else wanted):
            raise EngineError(f"{where}: key {key}: {value!r} is wrong; give {EXAMPLES[wanted]}")
    for key, each in known.items():
        if key not in row and each.default is MISSING and each.default_factory is MISSING:
            raise EngineError(f"{where}: key {key} is missing; give {EXAMPLES[get_origin(each.type) or each.type]}")


def all_engines() -> dict[str, Engine]:
    """All declared engines by name."""
    engines = (parse_engine(tomllib.loads(path.read_text()), path) for path in sorted(FOLDER.glob("*.toml")))
    return {engine.name: engine for engine in engines}


def choose_engines(names: list[str], added: list[Engine] | None = None) -> list[Engine]:
    """The engines called `names` (`auto`: all), and those that the user adds, which replace built-in ones of the same name."""
    more = {engine.name: engine for engine in added or []}
    return [engine for engine in _engines_named(names) if engine.name not in more] + list(more.values())


def _engines_named(names: list[str]) -> list[Engine]:
    known = all_engines()
    for name in names:
        if name not in known and name != "auto":
            raise EngineError(f"unknown engine {name!r}; known: auto, {', '.join(known)}")
    return list(known.values()) if "auto" in names else [known[name] for name in dict.fromkeys(names)]
