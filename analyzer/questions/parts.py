"""Parts of a model that operators belong to, by their names, and which graphs an accelerator computes."""

import re

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables
from moescope.packaged import toml_beside

LOAD, COPY, OFFLOADED, OTHER, HOST_CODE = "expert load", "copy", "offloaded graph", "other operators", "host code"
BY_NAME = {part: re.compile(pattern) for part, pattern in toml_beside(__file__, "parts.toml").items()}
"""The first pattern found in an operator's name decides."""
PARTS = (*BY_NAME, COPY, OFFLOADED, OTHER, HOST_CODE)
"""What a step does. `offloaded graph`: a graph of an accelerator outside of recorded operators; `host code`: the engine's own
code between operators."""
COPIES = ("CPY", "DUP", "CONT", "CONCAT", "SET", "SET_ROWS", "copy")
"""Operators that only move data: they are copies where they belong to no expert and no router."""

HOST = ("cpu", "blas", "")
"""Backends of graphs that the CPU computes; others are accelerators."""
NPU = "htp"
"""The backend whose graphs are executed through QNN."""
BESIDE = ("copy", "wait")
"""Kinds of graphs that compute nothing: a copy between backends, and the wait until a backend is done."""


def part_of(name: str) -> str:
    """The part of an operator by its name ("ffn_moe_gate-3", "attention.0"); OTHER if no pattern matches."""
    return next((part for part, pattern in BY_NAME.items() if pattern.search(name)), OTHER)


def operator_parts(operators: pd.DataFrame) -> np.ndarray:
    """The part of each operator: by name, else by type."""
    names, types = pd.factorize(operators["name"].to_numpy()), pd.factorize(operators["type"].to_numpy())
    by_name = np.array([*(part_of(n) for n in names[1]), OTHER], object)[names[0]]
    by_type = np.array([*(part_of(t.lower()) for t in types[1]), OTHER], object)[types[0]]
    part = np.where(by_name == OTHER, by_type, by_name)
    moves = np.isin(operators["type"].to_numpy(), COPIES) & np.isin(part, ("attention", OTHER))
    return np.where(moves, COPY, part)


def accelerated_graphs(tables: Tables) -> pd.DataFrame:
    """The graphs that an accelerator computes."""
    graphs = tables["graphs"]
    return graphs[~graphs["backend"].isin(HOST) & ~graphs["kind"].isin(BESIDE)]


def given_away(tables: Tables) -> pd.DataFrame:
    """The graphs that an engine passed to an accelerator without QNN: their operators are submitted and computed later."""
    graphs = accelerated_graphs(tables)
    return graphs[graphs["backend"] != NPU]


def submitted_only(tables: Tables) -> np.ndarray:
    """Which operators the host only submits."""
    return tables["operators"]["graph_id"].isin(given_away(tables)["graph_id"]).to_numpy()
