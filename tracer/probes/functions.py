"""Functions that a user declares in a TOML file, with the arguments to read; checked before anything is probed."""

import re
import struct
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tracer.engines import LEVELS, Engine, parse_engine
from tracer.errors import EngineError
from tracer.recording.user_files import read_text

SIZES = {f"{sign}{bits}": bits // 8 for bits in (8, 16, 32, 64) for sign in "us"} | {"ptr": 8, "f32": 4, "f64": 8, "str": 0}
RETURN, NOTHING = 6, 7  # sources other than the six argument registers
MAX_READS = 2
VALUES, PARTS = 3, 5  # CALL_VALUES and CALL_PARTS of bpf/records.h
MAX_NUMBERS, MAX_TEXTS = VALUES * PARTS, PARTS - 1
MOST = 64
EXECUTABLE = "executable"
KEYS = ("library", "symbol", "symbols", "level", "at", "throws", "args", "most")
CALL_ENDS = ("entry", "return", "both")
REGISTER = re.compile(r"@([1-6])$")
MEMORY = re.compile(r"\*\s*(?:\((.+?)\s*(?:([+-])\s*(0x[0-9a-fA-F]+|\d+))?\)|(.+))$")
GRAMMAR = 'write TYPE @N, TYPE *(@N + OFFSET) or TYPE return, such as "s32 @1"'
SPEC = struct.Struct("<IIIii")  # struct arg_spec: from, width[2], offset[2]


@dataclass(frozen=True)
class Argument:
    """A value to read: its type, the register to start from (0-5, 6: return value), and offsets of reads, innermost first."""

    name: str
    type: str
    source: int
    offsets: tuple[int, ...] = ()

    @property
    def at_return(self) -> bool:
        """Whether the value is known only at return."""
        return self.source == RETURN

    def spec(self) -> bytes:
        """struct arg_spec of bpf/structs.h."""
        widths = [8] * len(self.offsets)
        if widths and self.type != "str":
            widths[-1] = SIZES[self.type]
        none = [0] * (MAX_READS - len(widths))
        return SPEC.pack(self.source, *widths, *none, *self.offsets, *none)


@dataclass(frozen=True)
class Function:
    """A declaration: a library, functions in it by name or glob pattern, and what to record of their calls."""

    library: str
    symbols: tuple[str, ...]
    level: str = "operator"
    at: str = "both"
    throws: bool | None = None  # whether exceptions may pass it; None: by its file and code
    arguments: tuple[Argument, ...] = ()
    most: int = MOST
    source: str = field(default="", compare=False)
    is_step: bool = False  # a step begins at each entry

    def owns(self, path: str, file_name: str, is_executable: bool) -> bool:
        """Whether a mapped file is the declared one: the executable, an absolute path, or a prefix of the file name."""
        if self.library == EXECUTABLE:
            return is_executable
        if self.library.startswith("/"):
            return self.library == path or str(Path(self.library).resolve()) == path
        return file_name.startswith(self.library)

    @property
    def prefix(self) -> str:
        """The file name prefix that the BPF programs watch for when files are opened; "" if none."""
        return "" if self.library == EXECUTABLE else Path(self.library).name

    def matches(self, name: str) -> bool:
        """Whether a function's name matches the declaration."""
        return any(fnmatchcase(name, pattern) for pattern in self.symbols)

    def side(self, at_return: bool) -> tuple[list[Argument], list[Argument]]:
        """(numbers, texts) to read at entry or at return, in the records' order."""
        mine = [argument for argument in self.arguments if argument.at_return == at_return]
        return [a for a in mine if a.type != "str"], [a for a in mine if a.type == "str"]

    def spec(self, at_return: bool) -> bytes:
        """struct call_spec of bpf/structs.h."""
        numbers, texts = self.side(at_return)
        parts = max(1, -(-len(numbers) // VALUES), len(texts) + 1)
        nothing = Argument("", "u64", NOTHING)
        numbers = numbers + [nothing] * (MAX_NUMBERS - len(numbers))
        texts = texts + [nothing] * (MAX_TEXTS - len(texts))
        return struct.pack("<I", parts) + b"".join(argument.spec() for argument in numbers + texts)


class BadValue(Exception):
    """A wrong key of a declaration: what is wrong, and what to write instead."""


def parse_argument(name: str, text: Any) -> Argument:
    """Parse an argument such as `u64 *(@3 + 16)`."""
    if not isinstance(text, str) or len(text.split(None, 1)) != 2:
        raise BadValue(f"{text!r} is not an argument; {GRAMMAR}")
    kind, place = text.split(None, 1)
    if kind not in SIZES:
        raise BadValue(f"unknown type {kind!r}; known: {', '.join(SIZES)}")
    source, offsets = parse_source(place.strip())
    if len(offsets) > MAX_READS:
        raise BadValue(f"{place!r} reads memory {len(offsets)} times, at most {MAX_READS} are allowed")
    if kind in ("f32", "f64") and not offsets:
        raise BadValue("a float in a register cannot be read: a probe sees integer registers only; read it from memory, *(@N)")
    return Argument(name, kind, source, tuple(offsets))


def parse_source(text: str) -> tuple[int, list[int]]:
    """(register, offsets of reads) of a place such as `@2`, `return`, `*@2`, `*(@2 + 8)` or `*(*(@2 + 8) - 4)`."""
    if text == "return":
        return RETURN, []
    if register := REGISTER.match(text):
        return int(register[1]) - 1, []
    memory = MEMORY.match(text)
    if memory is None:
        raise BadValue(f"{text!r} is not a place; {GRAMMAR}; arguments 1 to 6 are in registers")
    source, offsets = parse_source((memory[1] or memory[4]).strip())
    return source, [*offsets, int((memory[2] or "") + (memory[3] or "0"), 0)]


def parse_function(row: dict[str, Any], source: str) -> Function:
    """Parse one `[[function]]`; raises EngineError with the file, the key and the remedy."""
    where = f"{source}: function {row.get('symbol') or row.get('symbols') or '(no symbol)'}"
    for key in row:
        if key not in KEYS:
            raise EngineError(f"{where}: unknown key {key!r}; known: {', '.join(KEYS)}")
    key = ""
    try:
        key = "library"
        library = checked_value(row.get(key), str, 'give the start of a file name, an absolute path, or "executable"')
        key = "symbols" if "symbols" in row else "symbol"
        names = [row["symbol"]] if "symbol" in row else row.get("symbols")
        names = checked_value(names, list, 'give symbol = "name" or symbols = ["name", "pattern_*"]')
        names = [checked_value(name, str, "give the function's name") for name in names]
        key = "level"
        level = one_of(row.get(key, "operator"), LEVELS)
        key = "at"
        at = one_of(row.get(key, "both"), CALL_ENDS)
        key = "throws"
        throws = row.get(key)
        if throws not in (None, True, False):
            raise BadValue(f"{throws!r} is wrong; give true or false")
        key = "most"
        most = checked_value(row.get(key, MOST), int, "give a number of functions")
        key = "args"
        arguments = []
        for name, text in checked_value(row.get(key, {}), dict, 'give a table, args = { n = "s32 @1" }', empty=True).items():
            key = f"args.{name}"
            arguments.append(parse_argument(name, text))
            if at == ("entry" if arguments[-1].at_return else "return"):
                raise BadValue(f'is not available with at = "{at}"; use at = "both"')
        function = Function(library, tuple(names), level, at, throws, tuple(arguments), most, source)
        key = "args"
        for at_return in (False, True):
            numbers, texts = function.side(at_return)
            if len(numbers) > MAX_NUMBERS or len(texts) > MAX_TEXTS:
                raise BadValue(f"{len(numbers)} numbers and {len(texts)} texts; at most {MAX_NUMBERS} and {MAX_TEXTS} fit")
    except BadValue as error:
        raise EngineError(f"{where}: key {key}: {error}") from None
    return function


def checked_value(value: Any, kind: type, remedy: str, empty: bool = False) -> Any:
    """Return the value; raises Wrong unless it is of this type and, without `empty`, not empty."""
    if not isinstance(value, kind) or isinstance(value, bool) or not (value or empty):
        raise BadValue(("missing" if value is None else f"{value!r} is wrong") + f"; {remedy}")
    return value


def one_of(value: Any, known: tuple[str, ...]) -> str:
    """Return the value; raises Wrong unless it is one of the known ones."""
    if value not in known:
        raise BadValue(f"{value!r} is not known; known: {', '.join(known)}")
    return str(value)


def read_probe_files(paths: list[Path]) -> tuple[list[Engine], list[Function]]:
    """The engines and functions that a user's files declare."""
    engines: list[Engine] = []
    functions: list[Function] = []
    for path in paths:
        try:
            data = tomllib.loads(read_text(path))
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error.strerror}; give a TOML file to --probes") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{path} is not TOML: {error}") from None
        if "probes" in data:
            engines.append(parse_engine(data, path))
            continue
        unknown = sorted(data.keys() - {"function", "engine"})
        if unknown or not data:
            what = f"unknown key {unknown[0]!r}" if unknown else "the file is empty"
            raise EngineError(f"{path}: {what}; write [[function]] or an engine with the key probes (docs/engines.md)")
        engines += [parse_engine(row, path) for row in list_of_tables(data, "engine", path)]
        functions += [parse_function(row, str(path)) for row in list_of_tables(data, "function", path)]
    return engines, functions


def step_function(text: str) -> Function:
    """The function that `[LIBRARY:]FUNCTION` of --step-at names; without a library it is the program's own."""
    library, _, symbol = text.rpartition(":")
    if not symbol:
        raise EngineError(f"--step-at {text!r} names no function; write FUNCTION, or LIBRARY:FUNCTION")
    return Function(library or EXECUTABLE, (symbol,), "token", "entry", most=1, is_step=True, source="--step-at")


def list_of_tables(data: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    """The list of tables `[[key]]`."""
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EngineError(f"{path}: key {key}: write it as [[{key}]], one for each")
    return rows
