"""Whose a token's time is: every moment of it belongs to one operator or load, or to nobody, so that sums close."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analyzer.records.spans import Nest

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Charges:
    """ns of a token's own time that each operator (by row of `operators`) and each load (by row of `loads`) took."""

    operators: np.ndarray
    loads: np.ndarray


def charge(tables: Tables) -> Charges:
    """Share out the tokens' time. Per token: operators + loads <= the token's duration; the rest is the residual.

    What the token's own thread does counts, by the innermost span, waiting at barriers included. While that thread does
    nothing recorded, what other threads do for the token counts, shared evenly among them.
    """
    operators, threads, loads = tables["operators"], tables["op_threads"], tables["loads"]
    op, n_ops = threads["op_id"].to_numpy(), len(operators)
    moved = np.flatnonzero((loads["action"] == "load").to_numpy())
    token = np.concatenate((operators["token_id"].to_numpy()[op], loads["token_id"].to_numpy()[moved]))
    tid, begin, end = (np.concatenate((threads[c], loads[c].to_numpy()[moved])) for c in ("tid", "begin_ns", "end_ns"))
    target = np.concatenate((op, n_ops + moved))
    segment = Nest(tid, begin, end).segments()
    token, target, tid = token[segment.span], target[segment.span], tid[segment.span]
    steps = tables["tokens"].set_index("token_id")
    owner, first, last = (steps[c].reindex(token, fill_value=-1).to_numpy() for c in ("tid", "begin_ns", "end_ns"))
    begin, end = np.maximum(segment.begin, first), np.minimum(segment.end, last)
    keep = (token >= 0) & (end > begin)
    own = tid[keep] == owner[keep]
    ns = _shared(token[keep], begin[keep], end[keep], own)
    total = np.bincount(target[keep], ns, n_ops + len(loads))
    return Charges(total[:n_ops], total[n_ops:])


def _shared(token: np.ndarray, begin: np.ndarray, end: np.ndarray, own: np.ndarray) -> np.ndarray:
    """ns of each piece: all of it on the token's own thread, elsewhere the parts where that thread has no piece, shared."""
    n = len(token)
    ts = np.concatenate((begin, end))
    group = np.concatenate((token, token))
    order = np.lexsort((ts, group))
    step = np.repeat([1, -1], n)[order]
    on_own_thread = np.concatenate((own, own))[order]
    at_own, others = np.cumsum(np.where(on_own_thread, step, 0)), np.cumsum(np.where(on_own_thread, 0, step))
    lasting = np.append(np.diff(ts[order]), 0)
    lasting[:-1][np.diff(group[order]) != 0] = 0
    share = np.where((at_own == 0) & (others > 0), lasting / np.maximum(others, 1), 0.0)
    before = np.empty(2 * n)
    before[order] = np.concatenate(([0.0], np.cumsum(share)[:-1])) if n else share
    return np.where(own, (end - begin).astype(np.float64), before[n:] - before[:n])
