"""The common format of benchmark results, and its strict reader."""

import json
from dataclasses import field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from benchmarks.lib.spread import Spread

FOLDER = Path(__file__).resolve().parent.parent / "results"
"""Where results are kept."""
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ResultError(Exception):
    """A file is not a valid result."""


@dataclass(frozen=True, config=STRICT)
class Machine:
    """The machine of a benchmark; features: relevant instruction sets. Unknown values are empty or None."""

    cpu_model: str
    cpus: int
    arch: str
    features: list[str]
    kernel: str
    os: str
    memory_bytes: int | None


@dataclass(frozen=True, config=STRICT)
class Figure:
    """A figure with its spread.

    low, high: bounds of `interval`, None without one. median: None if only the bounds are known. n: number of values.
    against: the peer, if the figure is a ratio. labels: remarks such as `emulator`.
    """

    name: str
    unit: str
    median: float | None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    n: int | None = None
    against: str = ""
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class Result:
    """One run of a benchmark. date: YYYY-MM-DD. source: the origin of the figures, if not the run itself."""

    benchmark: str
    date: str
    commit: str
    machine: Machine
    command: str
    rounds: int | None
    figures: list[Figure]
    notes: str = ""
    source: str = ""


RESULT = TypeAdapter(Result)


def read(path: Path) -> Result:
    """Read a result from a file; raises ResultError with the defect."""
    try:
        return RESULT.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ResultError(f"{path} is no result of a benchmark: {error}") from None


def write(result: Result, path: Path) -> None:
    """Write a result to a file."""
    path.write_text(json.dumps(RESULT.dump_python(result), indent=1) + "\n", encoding="utf-8")


def kept(folder: Path = FOLDER) -> list[Result]:
    """All stored results of a folder, by benchmark and date."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def figure(name: str, unit: str, spread: Spread, against: str = "", labels: tuple[str, ...] = ()) -> Figure:
    """A figure from a measured spread."""
    bounds = (spread.low, spread.high, spread.interval, spread.n)
    return Figure(name, unit, spread.median, *bounds, against, list(labels))
