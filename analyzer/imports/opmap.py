"""The op map from QNN operators to operators of the model, from ONNX Runtime's framework op trace."""

import json
from dataclasses import dataclass
from pathlib import Path

from analyzer.imports.csv import text_of
from tracer.recording.format import RecordingError

REMEDY = "give the JSON that ONNX Runtime writes with enable_framework_op_trace"


@dataclass(frozen=True)
class SourceOperators:
    """A QNN operator's type, and its source operators in the model."""

    type: str
    sources: tuple[str, ...]


def read_op_map(path: Path) -> dict[str, SourceOperators]:
    """QNN operator's name → type and source operators. Raises RecordingError if the file is not an op map."""
    try:
        data = json.loads(text_of(path))
        mappings = [row for graph in data["subgraph_traces"] for row in graph["op_mappings"]]
        return {
            str(row["dst_name"]): SourceOperators(
                str(row["dst_qnn_op_type"]), tuple(str(source["name"]) for source in row["sources"] if source.get("type") == "OP")
            )
            for row in mappings
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError(f"{path} is not an op map ({error!r}): {REMEDY}") from None
