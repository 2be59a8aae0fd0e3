"""What to install for a missing Python package."""

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Import name → distribution, for names that differ by more than - and _."""
COLLECTIONS = ("all", "dev")
"""Extras that combine others."""
CHECKOUT = Path(__file__).resolve().parent.parent / "Makefile"


def install_remedy(module: str) -> str:
    """How to install the package of a module: by the extra that lists it, else the package itself."""
    name = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    extras = extras_with(name)
    if extras:
        return f"pip install 'moescope[{extras[0]}]'"
    return "run `make setup` in the project's folder" if CHECKOUT.exists() else f"pip install {name}"


def extras_with(name: str) -> list[str]:
    """The extras of this project that list a distribution, combined ones last."""
    try:
        lines = requires("moescope") or []
    except PackageNotFoundError:
        return []
    pattern = re.compile(rf"{re.escape(name)}\b(?![-.\w]).*extra\s*==\s*['\"]([\w-]+)['\"]", re.IGNORECASE)
    extras = [match[1] for match in map(pattern.match, lines) if match]
    return sorted(extras, key=lambda extra: extra in COLLECTIONS)
