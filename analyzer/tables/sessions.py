"""Sessions of an engine: what model each handle runs, and with how many inputs and outputs."""

import numpy as np
import pyarrow

from analyzer.records.reading import Source
from analyzer.records.rows import Rows, texts
from analyzer.records.schema import Columns, text
from analyzer.records.spans import NONE, codes, following, latest


def sessions(source: Source) -> Columns:
    """The columns of `sessions`: one row per session made; its counts are those of its first run."""
    rows = source.rows("session")
    if not len(rows):
        return {}
    created = rows.where(rows["n_inputs"] + rows["n_outputs"] == 0)
    ran = rows.where(rows["n_inputs"] + rows["n_outputs"] > 0)
    key = identity(created, ran)
    owner = latest(key[: len(created)], created["ts"], key[len(created) :], ran["ts"])
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


def identity(*parts: Rows) -> np.ndarray:
    """A number for (process, handle) over the records of all parts."""
    return codes(*(np.concatenate([rows[field] for rows in parts]) for field in ("pid", "handle")))


def model_names(
    source: Source, pid: np.ndarray, handle: np.ndarray, ts: np.ndarray, makes: np.ndarray
) -> pyarrow.DictionaryArray:
    """The model of the session that a (process, handle) is at a time; "" where it is none, or its model has no name.

    `makes` marks the calls that make it: a session's record follows just behind them.
    """
    rows = source.rows("session")
    created = rows.where(rows["n_inputs"] + rows["n_outputs"] == 0)
    key = codes(np.concatenate((created["pid"], pid)), np.concatenate((created["handle"], handle.view(np.int64))))
    handles, asked = key[: len(created)], key[len(created) :]
    session = np.where(makes, following(handles, created["ts"], asked, ts), latest(handles, created["ts"], asked, ts))
    return text(session, np.append(texts(created["name"]), ""))
