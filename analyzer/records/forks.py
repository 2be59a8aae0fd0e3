"""What a process has from its parent: handles that mean at a fork what they meant before, until it runs another program."""

from collections.abc import Callable

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.spans import NONE, latest, shared_codes

MOST_GENERATIONS = 16
Lookup = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Row numbers of an answer, their processes and times → what was found, -1 for nothing."""


def through_forks(source: Source, find: Lookup, pid: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """What `find` finds for each row; where a forked process has nothing of its own, what its parent had at the fork."""
    fork, run = source.rows("task_fork"), source.rows("task_exec")
    rows = np.arange(len(pid))
    answer = find(rows, pid, ts)
    for _ in range(MOST_GENERATIONS if len(fork) else 0):
        missing = np.flatnonzero(answer[rows] < 0)
        rows, pid, ts = rows[missing], pid[missing], ts[missing]
        children, asked = shared_codes((fork["child_tid"],), (pid,))
        born = latest(children, fork["ts"], asked, ts)
        programs, asked = shared_codes((run["pid"],), (pid,))
        began = latest(programs, run["ts"], asked, ts)
        inherits = (born >= 0) & (np.append(run["ts"], NONE)[began] < np.append(fork["ts"], 0)[born])
        rows, born = rows[inherits], born[inherits]
        if not len(rows):
            break
        pid, ts = fork["pid"][born], fork["ts"][born]
        answer[rows] = find(rows, pid, ts)
    return answer
