"""Sources of power are declarations, too: `sources.toml` says where their files are and what the numbers in them mean."""

import tomllib
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "sources.toml"


def power_sources() -> list[dict[str, Any]]:
    """The declared sources, each with its `name`."""
    return [{"name": name, **row} for name, row in tomllib.loads(SOURCES.read_text()).items()]
