"""`flame.html`: samples and waits as flame graphs, filtered by phase, part and cause; static/flame.js draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.stacks import base_name, frame_names, joined, stack_lists, stack_summary
from analyzer.records.manifest import command_of
from analyzer.records.schema import Tables
from analyzer.records.stamps import recording_stamp
from views.report.page import write_page

FILTERS = ["phase", "part", "cause"]
KINDS = {"samples": "samples", "waits": "ms"}
"""Table → the unit of its weights."""


def weights(tables: Tables, table: str) -> pd.DataFrame:
    """The weight of each (stack, *FILTERS): samples, or ms."""
    rows = joined(tables, table)
    rows = rows.assign(weight=np.ones(len(rows)) if table == "samples" else rows["duration_ns"] * 1e-6)
    return rows.groupby(["stack_id", *FILTERS], sort=False)["weight"].sum().reset_index()


def flame_data(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """The page's data: frames, stacks from the outermost frame on, and the weights of each kind."""
    frames = tables["frames"]
    kinds = {}
    for table, unit in KINDS.items():
        rows = weights(tables, table)
        values = {name: pd.Categorical(rows[name]) for name in FILTERS}
        columns = {name: value.codes.tolist() for name, value in values.items()}
        kinds[table] = {
            "unit": unit,
            "values": {name: value.categories.tolist() for name, value in values.items()},
            "columns": {"stack": rows["stack_id"].tolist(), "weight": rows["weight"].tolist(), **columns},
        }
    return {
        "names": frame_names(tables).tolist(),
        "files": [base_name(file) for file in frames["file"]],
        "lines": frames["line"].tolist(),
        "stacks": [stack.tolist() for stack in stack_lists(tables)],
        "kinds": kinds,
        "summary": stack_summary(tables, manifest),
        "command": " ".join(command_of(manifest)),
        "emulator": bool((manifest.get("qnn") or {}).get("emulator")),
    }


def write_flame(tables: Tables, manifest: dict[str, Any], path: Path) -> int:
    """Write the page; returns its size in bytes."""
    data = flame_data(tables, manifest)
    return write_page(path, "flame", f"Flame graph: {data['command']}", data, stamp=recording_stamp(manifest))
