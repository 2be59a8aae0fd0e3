"""Data stored next to the code that reads it."""

import tomllib
from pathlib import Path
from typing import Any


def toml_beside(module: str, name: str) -> dict[str, Any]:
    """The TOML file `name` in the folder of a module's `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
