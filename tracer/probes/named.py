"""Where the user's functions were found: their numbers in the manifest, their probes' cookies, and what is missing."""

import difflib
import os
from dataclasses import dataclass
from typing import Any

from tracer.engines import Engine, Probe, all_engines
from tracer.errors import ProbeError
from tracer.probes.elf import Binary
from tracer.probes.functions import Function

MAX_FUNCTIONS = 511  # MAX_CALL_SPECS of bpf/structs.h has two for each; number 0 means none
CALL_ENDS = ("entry", "return", "exits")
PROGRAMS = ("custom_begin", "custom_end", "custom_exit")
STEP = "custom_step"
USER = Engine("user", 6, (), ())
NEAR = 3  # number of suggested names


@dataclass(frozen=True)
class NamedSite:
    """A function of a file, with its probes' specs by cookie: number << 1 | at return."""

    function: Function
    name: str
    offset: int
    specs: dict[int, bytes]
    inspect: bool

    def probe(self, at: str) -> Probe:
        """The probe at the function's `entry`, `return` or `exits`."""
        program = STEP if self.function.is_step else PROGRAMS[CALL_ENDS.index(at)]
        return Probe(program, self.function.level, at=at)


class NamedFunctions:
    """All functions that the user's files declare, in the order in which they were found."""

    def __init__(self, declared: list[Function]):
        self.declared = declared
        self.below = ""  # the folder in which another machine's files lie, whose paths the declarations name
        self.found: list[dict[str, Any]] = []  # the manifest's `functions`
        self._sites: dict[tuple[Function, int, int, int], NamedSite] = {}
        self._seen: dict[Function, set[str]] = {function: set() for function in declared}
        self._near: dict[Function, list[str]] = {}
        self._closed = [engine for engine in all_engines().values() if not engine.inspect] if declared else []

    def programs(self) -> set[str]:
        """Names of the required BPF programs."""
        calls = [function for function in self.declared if not function.is_step]
        return {*(PROGRAMS if calls else ()), *([STEP] if len(calls) < len(self.declared) else ())}

    def prefixes(self) -> set[str]:
        """Prefixes of the file names to watch for."""
        return {function.prefix for function in self.declared if function.prefix}

    def paths(self) -> list[str]:
        """The absolute paths of declared files."""
        return sorted({function.library for function in self.declared if function.library.startswith("/")})

    def wants(self, path: str, file_name: str, is_executable: bool) -> bool:
        """Whether any declaration is for this file."""
        return os.path.isfile(path) and any(self._is_of(function, path, file_name, is_executable) for function in self.declared)

    def _is_of(self, function: Function, path: str, file_name: str, is_executable: bool) -> bool:
        return function.owns(path.removeprefix(self.below), file_name, is_executable)

    def sites(self, binary: Binary, file_name: str, is_executable: bool, warnings: list[str]) -> list[NamedSite]:
        """The functions to probe in a file; a pattern that matches too many is refused with a warning."""
        answer = []
        for function in self.declared:
            if not self._is_of(function, binary.path, file_name, is_executable):
                continue
            self._seen[function].add(binary.path)
            matches = binary.functions(function.matches)
            if not matches:
                self._near.setdefault(function, similar_names(function, binary))
            if len(matches) > function.most:
                names = ", ".join(sorted(matches.values())[:NEAR])
                warnings.append(
                    f"{function.source}: {', '.join(function.symbols)} matches {len(matches)} functions of {binary.path} "
                    f"({names} ...), at most {function.most} are allowed: narrow the pattern, or raise the key most"
                )
                continue
            answer += [self._site(function, name, offset, binary) for offset, name in sorted(matches.items())]
        return answer

    def _site(self, function: Function, name: str, offset: int, binary: Binary) -> NamedSite:
        status = os.stat(binary.path)
        key = (function, status.st_dev, status.st_ino, offset)
        if key not in self._sites:
            number = len(self.found) + 1
            if number > MAX_FUNCTIONS:
                raise ProbeError(f"{number} functions match, at most {MAX_FUNCTIONS} can be probed: narrow the patterns")
            sides = {"entry": (False,), "return": (True,), "both": (False, True)}[function.at]
            specs = {number << 1 | at_return: function.spec(at_return) for at_return in sides}
            mine = [engine for engine in self._closed if engine.owns(os.path.basename(binary.path))]
            inspect = all(engine.inspects(binary.path) for engine in mine)
            self._sites[key] = NamedSite(function, name, offset, specs, inspect)
            self.found.append(function_row(number, name, function, binary.path))
        return self._sites[key]

    def forgo_return(self, site: NamedSite) -> None:
        """Declare that a function is recorded at its entry alone."""
        self.found[min(site.specs) // 2 - 1]["at"] = "entry"

    def missing(self) -> list[str]:
        """A line for each declaration without a matching function."""
        probed = {site.function for site in self._sites.values()}
        lines = []
        for function in self.declared:
            what = f"{function.source}: {', '.join(function.symbols)} of {function.library}"
            if function not in probed and not self._seen[function]:
                lines.append(f"{what} was not probed: the target mapped no such file")
            elif function in self._near and function not in probed:
                hint = f"; near: {', '.join(self._near[function])}" if self._near[function] else "; is it inlined or stripped?"
                lines.append(f"{what} was not found in {', '.join(sorted(self._seen[function]))}{hint}")
        return lines


def similar_names(function: Function, binary: Binary) -> list[str]:
    """Names in the file that resemble the missing ones."""
    names = list(binary.functions(lambda name: True).values())
    return [match for symbol in function.symbols for match in difflib.get_close_matches(symbol, names, NEAR)][:NEAR]


def function_row(number: int, name: str, function: Function, path: str) -> dict[str, Any]:
    """The function's row in the manifest: its arguments in the records' order, numbers and texts separately."""
    sides: dict[str, Any] = {}
    for at_return, side in ((False, "entry"), (True, "return")):
        numbers, texts = function.side(at_return)
        sides[side] = {"numbers": [[a.name, a.type] for a in numbers], "texts": [a.name for a in texts]}
    return {"probe": number, "name": name, "library": path, "level": function.level, "at": function.at, **sides}
