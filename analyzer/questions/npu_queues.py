"""Work sent to the NPU through queues without QNN, by llama.cpp's Hexagon backend."""

from typing import Any

from analyzer.records.schema import Tables

UNKNOWN_LAYOUT = 0


def unknown_layouts(tables: Tables) -> list[str]:
    """The warning about batches that could not be read."""
    count = int((tables["npu_batches"]["layout"] == UNKNOWN_LAYOUT).sum())
    said = "batches for the NPU have an unknown message layout: their operators were not read"
    return [f"{count:,} {said}"] if count else []


def summary(tables: Tables) -> dict[str, Any]:
    """Batches, their operators and times in ms; {} without batches.

    `steps`: number of steps that sent a batch; `unanswered`: batches without a response, among those with readable responses.
    """
    batches, operators = tables["npu_batches"], tables["npu_operators"]
    if not len(batches):
        return {}
    return {
        "batches": len(batches),
        "steps": batches.loc[batches["token_id"] >= 0, "token_id"].nunique(),
        "unanswered": int((~batches["complete"] & (batches["layout"] != UNKNOWN_LAYOUT)).sum()),
        "operators": len(operators),
        "joined": int((operators["n_nodes"] > 0).sum()),
        "profiled": int((operators["us"] >= 0).sum()),
        "in_flight": int(batches["in_flight"].max()),
        "submit_ms": float(batches["submit_ns"].clip(lower=0).sum()) / 1e6,
        "wait_ms": float(batches["wait_ns"].clip(lower=0).sum()) / 1e6,
        "npu_ms": float(batches["npu_us"].sum()) / 1e3 if batches["npu_us"].notna().any() else None,
    }
