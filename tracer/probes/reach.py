"""Access to files that no path leads to from here: below another root, only in memory, or deleted while mapped."""

import os

_ways: dict[str, str] = {}  # displayed path → path to open


def remember_path(shown: str, way: str) -> str:
    """Remember the path that opens a file under the path that is displayed; returns the latter."""
    _ways.setdefault(shown, way)
    return shown


def opening_path(shown: str) -> str:
    """The path that opens a file."""
    return _ways.get(shown, shown)


def resolved_path(shown: str) -> str:
    """The path with its links resolved; unchanged if it only has meaning elsewhere."""
    return shown if shown in _ways else os.path.realpath(shown)
