"""Tokens and graphs: the spans that everything else is attributed to."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analyzer.reading import BACKEND, UNKNOWN_U32, Rows, Source, Spans, chosen
from analyzer.sessions import model_names
from analyzer.spans import NONE, Nest, codes, first_of_runs, latest, order_in_groups, run_lengths, successors

PHASES = np.array(["", "prefill", "decode"], object)
PREFILL, DECODE = 1, 2


def faults(begin: Rows, end: Rows, matched: np.ndarray, field: str) -> np.ndarray:
    """Page faults between two readings of a 32-bit counter; -1 where the end is missing."""
    if len(end) == 0:
        return np.full(len(begin), NONE, np.int64)
    return np.where(matched >= 0, (end[field][matched] - begin[field]) & UNKNOWN_U32, NONE)


@dataclass
class Steps:
    """The tokens of a recording, in order of begin; `token_id` is the row number."""

    begin: Rows
    end: Rows
    spans: Spans
    n_tokens: np.ndarray

    @cached_property
    def until(self) -> np.ndarray:
        """Exclusive end; a token whose end was lost reaches to the next token of its thread, or to the recording's end."""
        tid, ts = self.begin["tid"], self.begin["ts"]
        after = successors(tid, ts)
        following_ns = np.where(after >= 0, ts[after] if len(ts) else 0, self.spans.until())
        return np.where(self.spans.complete, self.spans.end_ns + 1, following_ns)

    def of(self, rows: Rows) -> np.ndarray:
        """token_id of the step that contains each record: of its own thread if there is one, else of its process."""
        return self.at({"tid": rows["tid"], "pid": rows["pid"]}, rows["ts"])

    def at(self, owners: dict[str, np.ndarray], ts: np.ndarray) -> np.ndarray:
        """The same for moments of threads; `owners` has the columns `tid` and `pid`, in order of preference."""
        answer = np.full(len(ts), NONE, np.int64)
        for field, owner in owners.items():
            left = np.flatnonzero(answer < 0)
            token = latest(self.begin[field], self.begin["ts"], owner[left], ts[left])
            inside = (token >= 0) & (ts[left] < self.until[token]) if len(self.until) else token >= 0
            answer[left[inside]] = token[inside]
        return answer

    def phases(self) -> np.ndarray:
        """The engine's phase; where it tells none, prefill is a step of several tokens or the first of a sequence."""
        told, n_tokens, position = self.begin["phase"], self.n_tokens, self.begin["position"]
        first = position == 0
        if len(told):
            _, opening = np.unique(codes(self.begin["pid"], self.begin["tid"]), return_index=True)
            first[opening] |= position[opening] == UNKNOWN_U32
        guess = np.where((n_tokens > 1) | first, PREFILL, DECODE)
        return np.where((told == PREFILL) | (told == DECODE), told, guess)

    def table(self, source: Source) -> dict[str, np.ndarray]:
        """The columns of `tokens`."""
        matched, position = self.spans.end, self.begin["position"]
        result = np.where(matched >= 0, self.end["result"][matched], NONE) if len(self.end) else np.full(len(self.begin), NONE)
        return {
            "token_id": np.arange(len(self.begin)),
            **source.thread(self.begin),
            "seq": self.begin["seq"],
            "phase": PHASES[self.phases()],
            "n_tokens": self.n_tokens,
            "position": np.where(position == UNKNOWN_U32, NONE, position),
            "result": result,
            "maj_flt": faults(self.begin, self.end, matched, "maj_flt"),
            "min_flt": faults(self.begin, self.end, matched, "min_flt"),
            **self.spans.columns(),
        }


def rows_of_first_operator(begin: Rows, operators: Rows) -> np.ndarray:
    """Rows of the first operator after each token's begin on its thread: the embedding look-up's are the tokens fed."""
    answer = np.zeros(len(begin), np.int64)
    for tid in np.unique(begin["tid"]):
        mine, theirs = np.flatnonzero(begin["tid"] == tid), np.flatnonzero(operators["tid"] == tid)
        at = np.searchsorted(operators["ts"][theirs], begin["ts"][mine])
        found = at < len(theirs)
        answer[mine[found]] = operators["n_tokens"][theirs[at[found]]]
    return answer


def steps(source: Source) -> Steps:
    """The recording's tokens; where the engine does not tell how many tokens a step was fed, its first operator does."""
    begin = source.rows("token_begin")
    told = begin["n_tokens"]
    n_tokens = np.where(told > 0, told, rows_of_first_operator(begin, source.rows("op_begin")))
    return Steps(begin, source.rows("token_end"), source.spans("token", ("seq",), unknown=NONE), n_tokens)


@dataclass
class Graphs:
    """The graphs of a recording, in order of begin; `graph_id` is the row number."""

    begin: Rows
    end: Rows
    spans: Spans

    @cached_property
    def nest(self) -> Nest:
        """The graphs of each thread as a stack in time."""
        return Nest(self.begin["tid"], self.begin["ts"], self.spans.until())

    def of(self, rows: Rows) -> np.ndarray:
        """graph_id of the innermost graph that each record's thread was in."""
        return self.nest.innermost(rows["tid"], rows["ts"])

    def table(self, source: Source, tokens: Steps) -> dict[str, np.ndarray]:
        """The columns of `graphs`."""
        begin, matched = self.begin, self.spans.end
        status = np.where(matched >= 0, self.end["status"][matched], NONE) if len(self.end) else np.full(len(begin), NONE)
        handle = begin.raw("handle").copy()
        makes = (handle == 0) & (matched >= 0)  # the call's end tells what it made
        handle[makes] = self.end.raw("handle")[matched[makes]]
        return {
            "graph_id": np.arange(len(begin)),
            "token_id": tokens.of(begin),
            **source.thread(begin),
            "kind": source.named(begin["engine"], begin["type"], "graphs"),
            "layer": begin["layer"],
            "expert": begin["expert"],
            "backend": chosen(BACKEND, begin["backend"]),
            "tier": begin["tier"],
            "n_tokens": begin["n_tokens"],
            "handle": handle,
            "name": model_names(source, begin["pid"], handle, begin["ts"], makes),
            "status": status,
            **self.spans.columns(),
        }


def graphs(source: Source) -> Graphs:
    """The recording's graphs."""
    spans = source.spans("graph", ("handle",), unknown=0)
    return Graphs(source.rows("graph_begin"), source.rows("graph_end"), spans)


def running_count(group: np.ndarray, ts: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... within each group, in order of time."""
    order = order_in_groups(group, ts, np.arange(len(ts)))
    starts = first_of_runs(group[order])
    answer = np.empty(len(group), np.int64)
    answer[order] = np.arange(len(group)) - np.repeat(starts, run_lengths(starts, len(group)))
    return answer
