"""The model of the traced command: the config in a folder on its command line, and how its package stores it."""

import json
from pathlib import Path
from typing import Any

from tracer.recording.user_files import read_bytes

LARGEST = 1 << 20
PACKAGE = ".moescope-package"
KEPT = ("precisions", "target", "model_type", "fingerprint")


def of_command(command: list[str]) -> dict[str, Any] | None:
    """`path`, `config` (config.json) and, if converted, `package` of the first word that names a model folder."""
    for word in command[1:]:
        folder = Path(word)
        config = read_small_json(folder / "config.json")
        if config is not None:
            package = read_small_json(folder / PACKAGE / "manifest.json") or read_small_json(folder / "manifest.json") or {}
            return {"path": str(folder), "config": config, "package": {key: package[key] for key in KEPT if key in package}}
    return None


def read_small_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON object; None if there is none."""
    try:
        value = json.loads(read_bytes(path, LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
