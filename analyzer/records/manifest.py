"""Parts of a recording's manifest, which may be missing or damaged."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def section(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of the manifest; empty if it is missing or not an object."""
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


def listed_items(value: Any, kind: type[T]) -> list[T]:
    """The elements of this type in a list of the manifest; others are omitted, and all if it is missing or not a list."""
    return [element for element in value if isinstance(element, kind)] if isinstance(value, list) else []


def command_of(manifest: Mapping[str, Any]) -> list[str]:
    """The words of the recorded command; empty if the manifest has none."""
    command = manifest.get("command") or []
    return [str(word) for word in (command if isinstance(command, list) else [command])]
