"""Sizes in bytes, to and from text."""

import re

from runtime.errors import BudgetError

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_budget(text: str, whole_bytes: int) -> int | None:
    """Bytes of `1.5MiB`, `800kb`, `4096`, or `25%` of `whole_bytes`; None for `all` and 100%."""
    if text.strip().lower() == "all":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in UNITS | {"%": 0}:
        raise BudgetError(f"expert cache {text!r} is not a size: write 1.5MiB, 800kB, 4096, 25% or all")
    if match[2] != "%":
        return int(float(match[1]) * UNITS[match[2].lower()])
    if (share := float(match[1])) > 100:
        raise BudgetError(f"expert cache {text!r} is more than all experts: write 100% or all")
    return int(share / 100 * whole_bytes) if share < 100 else None


def show_bytes(count: float) -> str:
    """A readable size in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
