"""Sessions of an engine: the model of each handle, and its number of inputs and outputs."""

import numpy as np
import pyarrow

from analyzer.records.forks import through_forks
from analyzer.records.reading import Source
from analyzer.records.rows import Rows, decode_texts
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import NONE, following, latest, shared_codes


def session_columns(source: Source) -> Columns:
    """The columns of `session_columns`: one row for each session created; input and output counts are those of its first run."""
    rows = source.rows("session")
    if not len(rows):
        return {}
    created = creation_records(source)
    ran = rows.where(rows["n_inputs"] + rows["n_outputs"] > 0)
    handles, used = shared_codes(*((part["pid"], part["handle"]) for part in (created, ran)))
    owner = latest(handles, created["ts"], used, ran["ts"])
    counts = {}
    for name in ("n_inputs", "n_outputs"):
        counts[name] = np.full(len(created), NONE, np.int64)
        for row in np.flatnonzero(owner >= 0)[::-1].tolist():  # reversed order: the earliest run is written last
            counts[name][owner[row]] = ran[name][row]
    return {
        "session_id": np.arange(len(created)),
        **source.thread(created),
        "handle": created.raw("handle"),
        "name": decode_texts(created["name"]),
        "bytes": np.where(created["bytes"] > 0, created["bytes"], NONE),
        **counts,
        "since_ns": created["ts"],
    }


def creation_records(source: Source) -> Rows:
    """The records of session creation, without those of runs."""
    rows = source.rows("session")
    return rows.where(rows["n_inputs"] + rows["n_outputs"] == 0)


def model_names(
    source: Source, pid: np.ndarray, handle: np.ndarray, ts: np.ndarray, makes: np.ndarray
) -> pyarrow.DictionaryArray:
    """The model of the session that a (process, handle) means at a time; "" if it is not a session or its model has no name.

    `makes` marks the calls that create it: the session's record follows directly after them.
    """
    created, numbers = creation_records(source), handle.view(np.int64)

    def find(rows: np.ndarray, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
        handles, asked = shared_codes((created["pid"], created["handle"]), (pid, numbers[rows]))
        return latest(handles, created["ts"], asked, ts)

    session = through_forks(source, find, pid, ts) if len(created) else np.full(len(pid), NONE)
    handles, asked = shared_codes((created["pid"], created["handle"]), (pid[makes], numbers[makes]))
    session[makes] = following(handles, created["ts"], asked, ts[makes])
    return text_array(session, np.append(decode_texts(created["name"]), ""))
