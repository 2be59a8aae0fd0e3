"""`profdag.html`: one token's operators as an interactive page; views/layout.py places, static/profdag.js draws and moves."""

from pathlib import Path
from typing import Any

import networkx as nx
import pandas as pd

from views.layout import document, lay_out
from views.page import write_page


def about_token(tables: dict[str, pd.DataFrame], token_id: int) -> dict[str, Any]:
    """What the heading says about the token."""
    mine = tables["tokens"][tables["tokens"]["token_id"] == token_id]
    if not len(mine):
        return {"token_id": token_id}
    row = mine.iloc[0]
    return {"token_id": token_id, "phase": row["phase"], "position": row["position"], "duration_ns": row["duration_ns"]}


def write_profdag(graph: nx.DiGraph, tables: dict[str, pd.DataFrame], manifest: dict[str, Any], path: Path) -> int:
    """Write the page of a graph from analyzer.profdag; returns its size in bytes."""
    shown = document(graph, lay_out(graph))
    shown["token"] = about_token(tables, int(graph.graph.get("token_id", -1)))
    shown["token"]["tokens_used"] = graph.graph.get("tokens_used", 1)
    shown["command"] = " ".join(map(str, manifest.get("command") or []))
    shown["emulator"] = bool((manifest.get("qnn") or {}).get("emulator"))
    return write_page(path, "profdag", f"ProfDAG: {shown['command']}", shown)
