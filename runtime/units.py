"""Sizes in bytes, to and from text."""

import re

from runtime.errors import BudgetError

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_budget(text: str) -> int | None:
    """Bytes of `1.5MiB`, `800kb`, `4096`; None for `all`."""
    if text.strip().lower() == "all":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in UNITS:
        raise BudgetError(f"expert cache {text!r} is not a size: write 1.5MiB, 800kB, 4096 or all")
    return int(float(match[1]) * UNITS[match[2].lower()])


def show_bytes(count: float) -> str:
    """Readable size in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
