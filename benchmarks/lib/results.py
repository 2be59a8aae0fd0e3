"""The common format of benchmark results, and its strict reader."""

import json
import re
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from benchmarks.lib.spread import Spread

FOLDER = Path(__file__).resolve().parent.parent / "results"
"""Where results are kept, one file for each benchmark and machine."""
SHOWN = ("avx512_vnni", "avx_vnni", "avx2", "i8mm", "asimddp")
"""Instruction sets that decide how fast a kernel is, the best first; the first that a machine has is shown."""
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

    def name(self) -> str:
        """Processor, number of CPUs and best instruction set."""
        model = self.cpu_model.replace("(R)", "").removesuffix(" Processor")
        return ", ".join([model, f"{self.cpus} CPUs", *[name for name in SHOWN if name in self.features][:1]])


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
    """One run of a benchmark. date: YYYY-MM-DD."""

    benchmark: str
    date: str
    commit: str
    machine: Machine
    command: str
    rounds: int | None
    figures: list[Figure]
    notes: str = ""


RESULTS = TypeAdapter(list[Result])


def read_results(path: Path) -> list[Result]:
    """Read the results of a file; raises ResultError with the defect."""
    try:
        return RESULTS.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ResultError(f"{path} holds no results of a benchmark: {' '.join(str(error).split())}") from None


def write_results(results: Iterable[Result], path: Path) -> None:
    """Write the results of a file, a figure per line."""
    texts = []
    for about in RESULTS.dump_python(list(results), exclude_defaults=True):
        figures = ",\n".join(f"  {json.dumps(figure)}" for figure in about.pop("figures"))
        texts.append(f'{json.dumps(about)[:-1]}, "figures": [\n{figures}\n]}}')
    path.write_text("[" + ",\n".join(texts) + "]\n", encoding="utf-8")


def figure_key(figure: Figure) -> tuple[str, str, tuple[str, ...]]:
    """What two measurements of one figure have in common: name, peer, labels."""
    return figure.name, figure.against, tuple(figure.labels)


def store_result(result: Result, where: Path) -> None:
    """Add a result to a file, or to that of its machine in a folder; it replaces earlier figures of the same names."""
    name = re.sub(r"\W+", "-", f"{result.benchmark}-{result.machine.name()}".lower())
    path = where / f"{name}.json" if where.is_dir() else where
    measured = set(map(figure_key, result.figures))
    earlier = []
    for one in read_results(path) if path.exists() else []:
        figures = [figure for figure in one.figures if figure_key(figure) not in measured]
        if figures:
            earlier.append(replace(one, figures=figures))
    write_results([*earlier, result], path)


def stored_results(folder: Path = FOLDER) -> list[Result]:
    """All results of a folder, by benchmark, machine and date."""
    return [result for path in sorted(folder.glob("*.json")) for result in read_results(path)]


def figure(name: str, unit: str, spread: Spread, against: str = "", labels: tuple[str, ...] = ()) -> Figure:
    """A figure from a measured spread."""
    bounds = (spread.low, spread.high, spread.interval, spread.n)
    return Figure(name, unit, spread.median, *bounds, against, list(labels))
