"""`flame.html`: samples and waits as flame graphs, filtered by what their threads did; static/flame.js draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.stack_summary import stack_remarks, stack_summary
from analyzer.questions.stacks import CALLERS_UNKNOWN, base_name, frame_names, joined, short_function, stack_lists
from analyzer.records.manifest import command_of
from analyzer.records.schema import Tables
from analyzer.records.stamps import recording_stamp
from views.report.page import write_page

FILTERS = {
    "phase": "phase",
    "step": "token_id",
    "part": "part",
    "expert": "expert",
    "cause": "cause",
    "thread": "thread",
    "unwinding": "end",
}
"""Filter → its column."""
THREADS = ("another thread", "the one that decides")
KINDS = {"samples": "samples", "waits": "ms"}
"""Table → the unit of its weights."""
MOST_ROWS = 200_000
"""With more, a page of many megabytes, steps are no filter."""


def weights(tables: Tables, table: str) -> pd.DataFrame:
    """The weight of each (stack, *FILTERS): samples, or ms."""
    rows = joined(tables, table)
    weight = np.ones(len(rows)) if table == "samples" else rows["duration_ns"] * 1e-6
    rows = rows.assign(weight=weight, thread=np.array(THREADS, object)[rows["decides"].to_numpy(np.int64)])
    filters = [name for name in FILTERS if name != "step" or len(rows) <= MOST_ROWS]
    grouped = rows.groupby(["stack_id", *(FILTERS[name] for name in filters)], sort=False)["weight"].sum().reset_index()
    return grouped.set_axis(["stack", *filters, "weight"], axis=1)


def kind_data(unit: str, rows: pd.DataFrame) -> dict[str, Any]:
    """The rows of one kind: a column of codes for each filter, whose values are listed once."""
    values = {name: pd.Categorical(rows[name]) for name in rows.columns.drop(["stack", "weight"])}
    return {
        "unit": unit,
        "values": {name: value.categories.tolist() for name, value in values.items()},
        "columns": {
            "stack": rows["stack"].tolist(),
            "weight": rows["weight"].tolist(),
            **{name: value.codes.tolist() for name, value in values.items()},
        },
    }


def flame_data(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """The page's data: frames, stacks from the outermost frame on, and the weights of each kind."""
    frames, names = tables["frames"], [*frame_names(tables).tolist(), CALLERS_UNKNOWN]
    summary = stack_summary(tables, manifest)
    return {
        "names": names,
        "short": [short_function(name) for name in names],
        "files": [*map(base_name, frames["file"]), ""],
        "lines": [*frames["line"], ""],
        "stacks": [stack.tolist() for stack in stack_lists(tables)],
        "kinds": {table: kind_data(unit, weights(tables, table)) for table, unit in KINDS.items()},
        "summary": summary,
        "remarks": stack_remarks(summary),
        "title": " ".join(command_of(manifest)),
        "emulator": bool((manifest.get("qnn") or {}).get("emulator")),
    }


def write_flame(tables: Tables, manifest: dict[str, Any], path: Path) -> int:
    """Write the page; returns its size in bytes."""
    data = flame_data(tables, manifest)
    return write_page(path, "flame", f"Flame graph: {data['title']}", data, stamp=recording_stamp(manifest))
