"""`--only-slower-than`: writes only the records of slow tokens; all others are counted and dropped."""

from typing import Any

import numpy as np

from tracer.recording.tokens import STEP, Tokens, column, kinds_of

STRUCTURAL: tuple[str, ...] = ("tensor", "node", "qnn_object", "qnn_table", "api_table", "session", "io_file")
STRUCTURAL += ("library", "task_fork", "task_exit", "task_exec", "qnn_callback", "qnn_reader", "qnn_log", "heat", "site")
OWN = ("token_begin", "token_end")
KERNEL = 0  # engine number of the kernel's records: their process is the one that happened to run
MEMORY_NS = 1_000_000_000  # how long a slow token is remembered, for records that arrive late
NEVER = np.iinfo(np.int64).max


def inside(ts: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For each instant, whether any of the intervals contains it, both ends included."""
    if not len(begin):
        return np.zeros(len(ts), bool)
    order = np.argsort(begin, kind="stable")
    row = np.searchsorted(begin[order], ts, "right") - 1
    return (row >= 0) & (ts <= np.maximum.accumulate(end[order])[row])


def names(tokens: np.ndarray) -> list[tuple[int, int, int]]:
    """The identities of steps: (thread, engine, begin)."""
    return tokens[["tid", "engine", "begin_ns"]].tolist()


class Moments:
    """Time, process, thread and engine of records, and whether each is a token's begin or end."""

    def __init__(self, slots: np.ndarray, own: list[int]):
        self.ts, self.pid, self.tid = column(slots, 0, 8), column(slots, 8, 4), column(slots, 12, 4)
        self.engine = column(slots, 20, 1)
        self.own = np.isin(kinds_of(slots), own)

    def within(self, tokens: np.ndarray) -> np.ndarray:
        """Which records belong to one of these tokens."""
        answer = np.zeros(len(self.ts), bool)
        begin, end = tokens["begin_ns"], tokens["end_ns"]
        kernel = self.engine == KERNEL
        answer[kernel] = inside(self.ts[kernel], begin, end)
        for pid in np.unique(tokens["pid"]).tolist():
            mine, of = np.flatnonzero((self.pid == pid) & ~kernel & ~self.own), tokens["pid"] == pid
            answer[mine] = inside(self.ts[mine], begin[of], end[of])
        last = end - (~tokens["complete"] & (end < NEVER))  # the record that ended an incomplete step is not the step's own
        for tid, engine in sorted(set(tokens[["tid", "engine"]].tolist())):
            mine = np.flatnonzero(self.own & (self.tid == tid) & (self.engine == engine))
            of = (tokens["tid"] == tid) & (tokens["engine"] == engine)
            answer[mine] = inside(self.ts[mine], begin[of], last[of])
        return answer


class SlowTokens:
    """Holds records back until their tokens are known to be slow or fast.

    A record belongs to the tokens that its process has open at its time; a kernel record to those of every process; a token's
    begin and end to that token only. It is kept if one of its tokens lasts longer than `limit_ns`. If more than `bound_bytes`
    wait for a decision, the open tokens are kept whatever their duration.
    """

    def __init__(self, limit_ns: int, layouts: dict[str, Any], bound_bytes: int = 64 << 20):
        self.limit_ns, self.bound_bytes = limit_ns, bound_bytes
        self.kinds = {layout["kind"]: name for name, layout in layouts.items()}
        self.structural = [number for number, name in self.kinds.items() if name in STRUCTURAL]
        self.own = [number for number, name in self.kinds.items() if name in OWN]
        self.tokens = self.token_ns = 0
        self.dropped = np.zeros(256, np.int64)
        self._slow = self._undecided = np.empty(0, STEP)
        self._forced: set[tuple[int, int, int]] = set()
        self._held: dict[str, list[np.ndarray]] = {}  # records of undecided tokens
        self._fresh: dict[str, np.ndarray] = {}  # records that are too new for all earlier ones to have arrived

    def sift(self, batches: dict[str, np.ndarray], tokens: Tokens, until_ns: int, last: bool = False) -> dict[str, np.ndarray]:
        """The records to write now; `until_ns` as for `tokens.read`."""
        news = self._learn(tokens, until_ns, last)
        kept = {name: self._sift(name, batch, until_ns, news) for name, batch in batches.items()}
        if self.held_bytes() > self.bound_bytes:
            self._forced |= set(names(self._undecided))
            self._slow = np.concatenate((self._slow, still(self._undecided)))
            self._undecided = self._undecided[:0]
            kept = {name: np.concatenate((slots, self._sift(name, slots[:0], until_ns, True))) for name, slots in kept.items()}
        return kept

    def held_bytes(self) -> int:
        """Bytes of records whose tokens are undecided."""
        return sum(slots.nbytes for held in self._held.values() for slots in held)

    def _learn(self, tokens: Tokens, until_ns: int, last: bool) -> bool:
        """Note the tokens that ended or have been open for too long; returns whether waiting records can be decided now."""
        done, left = tokens.finished, tokens.open
        slow = (done["end_ns"] - done["begin_ns"] > self.limit_ns) | self._is_forced(done)
        late = (until_ns - left["begin_ns"] > self.limit_ns) | self._is_forced(left)
        self._forced -= set(names(done))
        self._undecided = left[~late] if not last else left[:0]
        fast = np.concatenate((done[~slow], left[~late] if last else left[:0]))
        self.tokens += len(fast)
        self.token_ns += int((done["end_ns"] - done["begin_ns"])[~slow].sum())
        oldest = min([until_ns, *self._undecided["begin_ns"].tolist()]) - MEMORY_NS
        past = self._slow[(self._slow["end_ns"] < NEVER) & (self._slow["end_ns"] >= oldest)]
        self._slow = np.concatenate((past, done[slow], still(left[late])))
        return bool(len(done) or late.any() or last)

    def _is_forced(self, tokens: np.ndarray) -> np.ndarray:
        return np.array([name in self._forced for name in names(tokens)], bool)

    def _sift(self, name: str, batch: np.ndarray, until_ns: int, news: bool) -> np.ndarray:
        fresh = self._fresh.get(name)
        slots = np.concatenate((fresh, batch)) if fresh is not None and len(fresh) else batch
        due = column(slots, 0, 8) <= until_ns
        self._fresh[name] = slots[~due]
        ready = [slots[due]]
        if news and self._held.get(name):
            ready = [*self._held[name], *ready]
            self._held[name] = []
        return np.concatenate([self._judge(name, part) if len(part) else part for part in ready])

    def _judge(self, name: str, slots: np.ndarray) -> np.ndarray:
        """The records to keep; undecided ones go to `_held`, those of no slow token are counted."""
        moments, kinds = Moments(slots, self.own), kinds_of(slots)
        keep = moments.within(self._slow) | np.isin(kinds, self.structural)
        wait = moments.within(still(self._undecided)) & ~keep
        if wait.any():
            self._held.setdefault(name, []).append(slots[wait])
        self.dropped += np.bincount(kinds[~keep & ~wait], minlength=256)[:256]
        return slots[keep]

    def to_json(self) -> dict[str, Any]:
        """Counts of dropped records, for the manifest."""
        records = {self.kinds.get(number, str(number)): int(self.dropped[number]) for number in np.flatnonzero(self.dropped)}
        return {"slower_than_ns": self.limit_ns, "tokens": self.tokens, "token_ns": self.token_ns, "records": records}


def still(tokens: np.ndarray) -> np.ndarray:
    """The tokens as if they had not ended."""
    tokens = tokens.copy()
    tokens["end_ns"] = NEVER
    return tokens
