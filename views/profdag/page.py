"""`profdag.html`: one step's operators as an interactive page; layout.py computes positions, static/profdag.js draws."""

from pathlib import Path
from typing import Any

import networkx as nx

from analyzer.questions.critical_path import critical_path
from analyzer.questions.node_costs import add_costs
from analyzer.records.manifest import command_of
from analyzer.records.schema import Tables
from analyzer.records.stamps import recording_stamp
from views.colours import CAUSES
from views.profdag.layout import drawn_operators, lay_out, page_data
from views.report.page import write_page


def about_step(tables: Tables, manifest: dict[str, Any], token_id: int) -> dict[str, Any]:
    """The heading's data on the step, and its begin on Perfetto's clock."""
    rows = tables["tokens"][tables["tokens"]["token_id"] == token_id]
    if not len(rows):
        return {"token_id": token_id}
    row, clock = rows.iloc[0], (manifest.get("clocks") or [{}])[0]
    begin = int(row["begin_ns"]) + int(clock.get("boottime_ns", 0) - clock.get("monotonic_ns", 0))
    facts = {name: row[name] for name in ("phase", "position", "duration_ns")}
    return {"token_id": token_id, "begin_boot_ns": begin, **facts}


def write_profdag(graph: nx.DiGraph, tables: Tables, manifest: dict[str, Any], path: Path) -> int:
    """Write the page of a graph from analyzer.questions.profdag; returns its size in bytes."""
    token_id = int(graph.graph.get("token_id", -1))
    add_costs(graph, tables, token_id)
    chain, spent = critical_path(graph, drawn_operators(graph))
    content = page_data(graph, lay_out(graph), frozenset(chain))
    content["critical_ns"], content["causes"] = spent, list(CAUSES)
    content["token"] = about_step(tables, manifest, token_id) | {"tokens_used": graph.graph.get("tokens_used", 1)}
    content["command"] = " ".join(command_of(manifest))
    content["emulator"] = bool((manifest.get("qnn") or {}).get("emulator"))
    return write_page(path, "profdag", f"ProfDAG: {content['command']}", content, stamp=recording_stamp(manifest))
