"""Work sent to the NPU through queues without QNN, by llama.cpp's Hexagon backend."""

from typing import Any

from analyzer.records.schema import Tables
from analyzer.tables.hexagon import UNKNOWN_LAYOUT


def unknown_layouts(tables: Tables) -> list[str]:
    """The warning about batches that could not be read."""
    count = int((tables["npu_batches"]["layout"] == UNKNOWN_LAYOUT).sum())
    said = "batches for the NPU have an unknown message layout: their operators and the NPU's own time are unknown"
    return [f"{count:,} {said}"] if count else []


def queue_summary(tables: Tables) -> dict[str, Any]:
    """Batches, their operators and times in ms; {} without batches.

    `steps`: number of steps that sent a batch; `unanswered`: batches without a response; `unread`: with an unknown layout.
    """
    batches, operators = tables["npu_batches"], tables["npu_operators"]
    if not len(batches):
        return {}
    return {
        "batches": len(batches),
        "steps": batches.loc[batches["token_id"] >= 0, "token_id"].nunique(),
        "unanswered": int((~batches["complete"]).sum()),
        "unread": int((batches["layout"] == UNKNOWN_LAYOUT).sum()),
        "operators": len(operators),
        "joined": int((operators["n_nodes"] > 0).sum()),
        "profiled": int((operators["us"] >= 0).sum()),
        "in_flight": int(batches["in_flight"].max()),
        "submit_ms": float(batches["submit_ns"].clip(lower=0).sum()) / 1e6,
        "wait_ms": float(batches["wait_ns"].clip(lower=0).sum()) / 1e6,
        "npu_ms": float(batches["npu_us"].sum()) / 1e3 if batches["npu_us"].notna().any() else None,
    }
