"""Sessions of an engine: what model each handle runs, and with how many inputs and outputs."""

import numpy as np
import pyarrow

from analyzer.records.reading import Source
from analyzer.records.rows import Rows, texts
from analyzer.records.schema import Columns, text
from analyzer.records.spans import NONE, following, latest, shared_codes


def sessions(source: Source) -> Columns:
    """The columns of `sessions`: one row per session made; its counts are those of its first run."""
    rows = source.rows("session")
    if not len(rows):
        return {}
    created = made(source)
    ran = rows.where(rows["n_inputs"] + rows["n_outputs"] > 0)
    handles, used = shared_codes(*((part["pid"], part["handle"]) for part in (created, ran)))
    owner = latest(handles, created["ts"], used, ran["ts"])
    counts = {}
    for name in ("n_inputs", "n_outputs"):
        counts[name] = np.full(len(created), NONE, np.int64)
        for row in np.flatnonzero(owner >= 0)[::-1].tolist():  # the earliest is written last
            counts[name][owner[row]] = ran[name][row]
    return {
        "session_id": np.arange(len(created)),
        **source.thread(created),
        "handle": created.raw("handle"),
        "name": texts(created["name"]),
        "bytes": np.where(created["bytes"] > 0, created["bytes"], NONE),
        **counts,
        "since_ns": created["ts"],
    }


def made(source: Source) -> Rows:
    """The records of sessions that were made, not run."""
    rows = source.rows("session")
    return rows.where(rows["n_inputs"] + rows["n_outputs"] == 0)


def model_names(
    source: Source, pid: np.ndarray, handle: np.ndarray, ts: np.ndarray, makes: np.ndarray
) -> pyarrow.DictionaryArray:
    """The model of the session that a (process, handle) is at a time; "" where it is not a session, or its model has no name.

    `makes` marks the calls that make it: a session's record follows just behind them.
    """
    created = made(source)
    handles, asked = shared_codes((created["pid"], created["handle"]), (pid, handle.view(np.int64)))
    session = np.where(makes, following(handles, created["ts"], asked, ts), latest(handles, created["ts"], asked, ts))
    return text(session, np.append(texts(created["name"]), ""))
