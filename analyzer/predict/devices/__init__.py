"""Device profiles: one TOML file each, in SI units, with the source of every figure."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analyzer.errors import PredictError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Unit:
    """A compute unit. `peak`: operations per second by type; `bandwidth`: maximum bytes per second, 0: all of memory's.

    `watts`: of the whole device while the unit computes (`compute`) or moves bytes (`memory`); {} if they are not known.
    """

    peak: dict[str, float]
    mfu: float
    bandwidth: float = 0.0
    watts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """One device. Bandwidths are bytes per second in one direction; `efficiency` is the achieved share of memory bandwidth.

    `tables`: folder name of measured MFU tables, "" for none. `overlap_share`: share of a compute unit left for computation while
    it also communicates. `step_overhead_ms`: time that a scheduler adds to a step, by phase. `idle_watts`, `storage_watts`: of
    the whole device while it is idle, and while it reads from storage; 0: not known.
    """

    name: str
    units: dict[str, Unit]
    memory_bytes: float
    bandwidth: float
    efficiency: float
    tables: str = ""
    node_size: int = 1
    link: float = 0.0
    network: float = 0.0
    storage: float = 0.0
    overlap_share: float = 1.0
    step_overhead_ms: dict[str, float] = field(default_factory=dict)
    idle_watts: float = 0.0
    storage_watts: float = 0.0
    sources: dict[str, str] = field(default_factory=dict)
    estimates: tuple[str, ...] = ()

    @property
    def power_source(self) -> str:
        """The source of its watts."""
        return self.sources.get("power", "the profile names no source of its watts")


def packaged_names() -> list[str]:
    """Devices that come with the package."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def load_device(name: str) -> Device:
    """A device by name or by the path of a TOML file."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name.lower()}.toml"
    if not path.exists():
        raise PredictError(f"device {name!r} is unknown: choose one of {', '.join(packaged_names())}, or give a TOML file")
    try:
        return parse_device(tomllib.loads(path.read_text()), path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PredictError(f"{path} is not valid TOML ({error}): see {HERE / 'h20.toml'} for the form") from None


def parse_device(values: dict[str, Any], path: Path) -> Device:
    """A device from its TOML tables; the error names missing values."""
    try:
        memory, link, power = values["memory"], values.get("link", {}), values.get("power", {})
        units = {name: _parse_unit(unit) for name, unit in values["units"].items()}
        return Device(
            name=values["name"],
            units=units,
            memory_bytes=memory["gigabytes"] * 1e9,
            bandwidth=positive_number(memory, "gigabytes_per_s") * 1e9,
            efficiency=positive_number(memory, "efficiency"),
            tables=values.get("tables", ""),
            node_size=link.get("node_size", 1),
            link=link.get("gigabytes_per_s", 0.0) * 1e9 * link.get("efficiency", 1.0),
            network=link.get("network_gigabytes_per_s", 0.0) * 1e9 * link.get("efficiency", 1.0),
            storage=values.get("storage", {}).get("gigabytes_per_s", 0.0) * 1e9,
            overlap_share=link.get("overlap_share", 1.0),
            step_overhead_ms=dict(values.get("step_overhead_ms", {})),
            idle_watts=positive_number(power, "idle_watts") if power else 0.0,
            storage_watts=power.get("storage_watts", 0.0),
            sources=values.get("sources", {}),
            estimates=tuple(values.get("estimates", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PredictError(f"{path}: {error} is missing or of the wrong kind: see {HERE / 'h20.toml'} for the form") from None


def positive_number(values: dict[str, Any], name: str) -> float:
    """A number above 0. Raises ValueError."""
    if not values[name] > 0:
        raise ValueError(f"{name} = {values[name]}")
    return float(values[name])


def _parse_unit(values: dict[str, Any]) -> Unit:
    peak = {dtype: positive_number(values["tera_per_s"], dtype) * 1e12 for dtype in values["tera_per_s"]}
    watts = {what: positive_number(values["watts"], what) for what in values.get("watts", {})}
    return Unit(peak, positive_number(values, "mfu"), values.get("gigabytes_per_s", 0.0) * 1e9, watts)
