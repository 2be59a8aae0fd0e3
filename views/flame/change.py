"""The flame graph of a comparison: call paths of both sides, coloured by their change; static/flame.js draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.compare.functions import FUNCTION, SELF
from analyzer.compare.verdict_text import LEVEL, with_figures
from analyzer.compare.verdicts import FASTER, SLOWER
from analyzer.questions.stacks import short_function
from views.errors import ViewError
from views.flame.page import kind_data
from views.report.page import write_page

SIDES = {"candidate": "cand", "base": "base"}
CALLERS = 4
"""The most functions listed that changed only with those they call."""
FIGURES = ("unit", "base", "cand", "least", "most", "verdict")


def changed_functions(document: dict[str, Any]) -> list[dict[str, str]]:
    """The functions with a verdict, those that changed themselves first, then the largest: name, sentence and level."""
    rows = [m for m in document["metrics"] if m["family"] == FUNCTION and m["verdict"] in (SLOWER, FASTER)]
    rows.sort(key=lambda m: (m["metric"] != SELF, -abs(m["cand"] - m["base"])))
    shown = sum(m["metric"] == SELF for m in rows) + CALLERS
    return [{"name": m["type"], "text": with_figures(m), "level": LEVEL[m["verdict"]]} for m in rows[:shown]]


def change_data(document: dict[str, Any]) -> dict[str, Any]:
    """The page's data: a stack and a change for each frame. Raises ViewError if no run has samples."""
    frames = document["frames"]
    if not frames:
        raise ViewError("no run has samples of stacks: record both sides with --stacks")
    numbers, names = pd.factorize(np.array([name for frame in frames for name in frame["path"]], object))
    stacks = np.split(numbers, np.cumsum([len(frame["path"]) for frame in frames])[:-1])
    rows = pd.DataFrame({"stack": range(len(frames)), "phase": [frame["phase"] for frame in frames]})
    kinds = {side: kind_data(frames[0]["unit"], rows.assign(weight=[f[key] for f in frames])) for side, key in SIDES.items()}
    return {
        "names": names.tolist(),
        "short": [short_function(name) for name in names],
        "stacks": [stack.tolist() for stack in stacks],
        "changes": [{name: frame[name] for name in FIGURES} for frame in frames],
        "functions": changed_functions(document),
        "kinds": kinds,
        "title": "What changed, by stack",
        "sentence": document["sentence"],
        "emulator": "emulator" in str(document["conditions"].get("NPU")),
    }


def write_change(document: dict[str, Any], path: Path) -> int:
    """Write the page of a comparison; returns its size in bytes."""
    return write_page(path, "flame", "Flame graph of a comparison", change_data(document))
