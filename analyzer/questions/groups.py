"""Groups of operators by their role in the model, from their names, and each group's share of every token's time."""

import re

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, Nest
from moescope.packaged import toml_beside

GROUPS = (
    *("embedding", "attention", "softmax", "copy", "routing", "expert compute", "expert load", "combine"),
    *("feed-forward", "head", "sampling", "other"),
)
COPIES = ("CPY", "DUP", "CONT", "CONCAT", "SET", "SET_ROWS", "copy")
"""Operators that only move data: they are of the group "copy" where they belong to no expert and no router."""

HOST = ("cpu", "blas", "")
"""Backends of graphs that the CPU computes; others are accelerators."""
BESIDE = ("copy", "wait")
"""Kinds of graphs that compute nothing: a copy between backends, and the wait until a backend is done."""

BY_NAME = {group: re.compile(pattern) for group, pattern in toml_beside(__file__, "groups.toml").items()}
"""The first pattern found in an operator's name decides."""


def group_of(name: str) -> str:
    """The group of an operator by its name ("ffn_moe_gate-3", "attention.0"); "other" if no pattern matches."""
    return next((group for group, pattern in BY_NAME.items() if pattern.search(name)), "other")


def operator_groups(operators: pd.DataFrame) -> np.ndarray:
    """The group of each operator: by name, else by type."""
    names, types = pd.factorize(operators["name"].to_numpy()), pd.factorize(operators["type"].to_numpy())
    by_name = np.array([*(group_of(n) for n in names[1]), "other"], object)[names[0]]
    by_type = np.array([*(group_of(t.lower()) for t in types[1]), "other"], object)[types[0]]
    group = np.where(by_name == "other", by_type, by_name)
    moves = np.isin(operators["type"].to_numpy(), COPIES) & np.isin(group, ("attention", "other"))
    return np.where(moves, "copy", group)


def given_away(tables: Tables) -> pd.DataFrame:
    """The graphs that an engine passed to an accelerator without QNN: their operators are submitted and computed later."""
    graphs = tables["graphs"]
    return graphs[~graphs["backend"].isin((*HOST, "htp")) & ~graphs["kind"].isin(BESIDE)]


def enqueued(tables: Tables) -> np.ndarray:
    """Which operators the host only submits."""
    return tables["operators"]["graph_id"].isin(given_away(tables)["graph_id"]).to_numpy()


def pieces(tables: Tables) -> pd.DataFrame:
    """The work of every thread for its token: pieces (token_id, tid, begin, end) that do not overlap on a thread.

    `operator` is the piece's row in `operators`, -1 for a load; `load` its row in `loads`, -1 for an operator. A load
    within an operator is subtracted from it; pieces end with their token. Operators that are only submitted are not work.
    """
    operators, threads, loads = tables["operators"], tables["op_threads"], tables["loads"]
    threads = threads[~np.append(enqueued(tables), False)[np.minimum(threads["op_id"], len(operators))]]
    op = threads["op_id"].to_numpy()
    moved = np.flatnonzero(((loads["action"] == "load") & (loads["token_id"] >= 0)).to_numpy())
    token = np.concatenate((operators["token_id"].to_numpy()[op], loads["token_id"].to_numpy()[moved]))
    tid, begin, end = (np.concatenate((threads[c], loads[c].to_numpy()[moved])) for c in ("tid", "begin_ns", "end_ns"))
    operator, load = np.append(op, np.full(len(moved), NONE)), np.append(np.full(len(op), NONE), moved)
    segment = Nest(tid, begin, end).segments()
    token, tid, operator, load = (column[segment.span] for column in (token, tid, operator, load))
    last = tables["tokens"].set_index("token_id")["end_ns"].reindex(token, fill_value=NONE).to_numpy()
    columns = {"token_id": token, "tid": tid, "begin": segment.begin, "end": np.minimum(segment.end, last)}
    rows = pd.DataFrame({**columns, "operator": operator, "load": load})
    return rows[rows["end"] > rows["begin"]].reset_index(drop=True)


def charged(tables: Tables, rows: pd.DataFrame) -> np.ndarray:
    """ns of its token's time charged to each of `pieces`: every moment of a token is counted once.

    The work of the token's own thread is charged, including waits at barriers. While that thread has no recorded work, the time
    is divided evenly among the other threads that work for the token. The rest of the token's time is the residual.
    """
    token, begin, end = (rows[name].to_numpy() for name in ("token_id", "begin", "end"))
    own = rows["tid"].to_numpy() == tables["tokens"].set_index("token_id")["tid"].reindex(token, fill_value=NONE).to_numpy()
    group, n = np.concatenate((token, token)), len(rows)
    ts = np.concatenate((begin, end))
    order = np.lexsort((ts, group))
    step, of_owner = np.repeat([1, -1], n)[order], np.concatenate((own, own))[order]
    owners, others = np.cumsum(np.where(of_owner, step, 0)), np.cumsum(np.where(of_owner, 0, step))
    lasting = np.append(np.diff(ts[order]), 0)
    lasting[:-1][np.diff(group[order]) != 0] = 0
    share = np.where((owners == 0) & (others > 0), lasting / np.maximum(others, 1), 0.0)
    before = np.empty(2 * n)
    before[order] = np.concatenate(([0.0], np.cumsum(share)[:-1])) if n else share
    return np.where(own, (end - begin).astype(np.float64), before[n:] - before[:n])


def group_times(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """ns of each group in each token, summed from `charged`; rows: token_id, columns: GROUPS."""
    group = np.append(operator_groups(tables["operators"]), "expert load")[rows["operator"].to_numpy()]
    spent = pd.Series(charged(tables, rows)).groupby([rows["token_id"], group]).sum().unstack(fill_value=0.0)
    return spent.reindex(columns=list(GROUPS), fill_value=0.0)
