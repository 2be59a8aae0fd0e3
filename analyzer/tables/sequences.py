"""The rows that each step feeds to each sequence; which of them are prefill and which decode; the requests that they belong to.

A sequence's rows in one step are a row set. Engines that do not report the phase of a step get it from these rules; `end` is the
sequence's last position so far, `prompt end` the last position of its latest prefill:

decode    all rows' outputs are wanted (at most VERIFIED rows; several verify drafted tokens), the prompt is finished (its last
          row's output was wanted), and the first row stands behind the prompt's end and not beyond `end` + 1: right behind the
          last output, or on generated positions after drafted tokens were rejected. A single row may stand beyond, since
          recordings may lack the steps between
prefill   all other row sets, and the first one of a sequence, unless it is a single row behind position 0 (the sequence is a
          copy, or began before the recording)
request   begins with the first row set of a sequence, and with prefill that follows decode or does not continue at `end` + 1. A
          prompt in chunks is one request whichever outputs are wanted, and so are an encoder's prompt and its decoder's

What cannot be distinguished: a request whose prompt continues the previous answer by exactly one token is decode of the previous
one; a request whose prompt continues that of a request without decode is a chunk of it.

A context whose outputs precede the rows of most verifications of another one drafts for it: its row sets belong to the other's
requests. Calls that return an error feed nothing. Nor do llama.cpp's warm-ups: steps under llama_set_warmup and, as newer builds
do without, a context's first prompts of at most WARMING tokens that are not answered, if others follow.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.schema import Columns, arrow_table, frame_of, text_array
from analyzer.records.spans import NONE, first_of_runs, number_rows, run_lengths

PHASES = np.array(["", "prefill", "decode", "warm-up", "draft", "refused", ""], object)
PREFILL, DECODE, WARM_UP, DRAFT, REFUSED, OTHER = range(1, 7)
"""Phases by index; OTHER: a step of what is no language model, or is not known to be one."""
APART = ("warm-up", "refused")
"""Phases of steps that feed nothing."""
POSITIONS, SEQUENCES, OUTPUTS = 1, 2, 4  # enum batch_array
LLAMACPP, GENAI = 2, 8
CHECKED = (LLAMACPP, GENAI)
"""Engines whose steps return 0 if they fed their tokens."""
WARMING = 2
"""Most rows of a warm-up: the tokens that begin and end a text."""
VERIFIED = 64
"""Most rows of a verification: engines draft at most a few tens of tokens."""


@dataclass(frozen=True)
class RowSets:
    """The row sets of steps, one row for each step and sequence, in the steps' order; int64 unless stated otherwise."""

    step: np.ndarray
    """Row number of the step."""
    sequence: np.ndarray
    rows: np.ndarray
    """0: unknown."""
    position: np.ndarray
    """Of the first row; -1: unknown."""
    outputs: np.ndarray
    """Rows whose output is wanted."""
    last: np.ndarray
    """bool: the last row's output is wanted."""

    def where(self, keep: np.ndarray) -> "RowSets":
        """The row sets selected by a mask or by row numbers."""
        return RowSets(*(column[keep] for column in vars(self).values()))


NONE_YET = np.empty(0, np.int64)
NO_SETS = RowSets(NONE_YET, NONE_YET, NONE_YET, NONE_YET, NONE_YET, NONE_YET > 0)


@dataclass(frozen=True)
class FedRows:
    """Row sets with their phases and requests."""

    sets: RowSets
    phase: np.ndarray
    """Index into PHASES."""
    request: np.ndarray
    """From 0 in order of begin; -1: of steps that feed nothing."""
    kept: np.ndarray
    """Rows that stayed in the sequence; -1: unknown."""

    def table(self, first: int = 0) -> Columns:
        """The columns of `sequences`; `first` is the token_id of the first step."""
        return {
            "token_id": self.sets.step + first,
            "sequence": self.sets.sequence,
            "phase": text_array(self.phase, PHASES),
            "rows": self.sets.rows,
            "position": self.sets.position,
            "outputs": self.sets.outputs,
            "request": self.request,
            "kept": self.kept,
        }

    def rows_of(self, phase: int, steps: int) -> np.ndarray:
        """The rows that each of `steps` steps feeds in a phase."""
        mine = (self.phase == phase) & (self.request >= 0)
        return np.bincount(self.sets.step[mine], self.sets.rows[mine], steps).astype(np.int64)


def recorded_row_sets(source: Source, of_step: np.ndarray) -> RowSets:
    """The row sets of the recorded batches; `of_step`: the step of each record of kind `batch_rows`."""
    records = source.rows("batch_rows")
    if len(records) == 0:
        return NO_SETS
    later = pd.DataFrame({"step": of_step, "first": records["first"]})
    holds = np.flatnonzero((of_step >= 0) & ~later.duplicated(keep="last").to_numpy())
    records, step = records.where(holds), of_step[holds]
    slot = np.arange(records["position"].shape[1])
    record, at = np.nonzero(slot < records["count"][:, None])
    given = records["given"][record]
    number = records["first"][record] + at
    reported = np.where(given & SEQUENCES, records["sequence"][record, at].astype(np.int64), 0)
    rows = {
        "step": step[record],
        "number": number,
        "position": np.where(given & POSITIONS, records["position"][record, at].astype(np.int64), NONE),
        "output": np.where(given & OUTPUTS, records["output"][record, at] != 0, number == records["n_rows"][record] - 1),
    }
    row, sequence = shared_rows(records["sequences"], records["n_sequences"], record, at, reported)
    return group_rows({name: column[row] for name, column in rows.items()}, sequence)


def shared_rows(
    named: np.ndarray, counts: np.ndarray, record: np.ndarray, at: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(row, sequence) for each sequence of each row: `first`, or, if it is like its record's first row, all that this one has."""
    of_first = (counts[record, at] == counts[record, 0]) & (first == named[record, 0])
    count = np.where(of_first, np.clip(counts[record, at].astype(np.int64), 1, named.shape[1]), 1)
    row = np.repeat(np.arange(len(record)), count)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, np.where(count[row] > 1, named[record[row], rank].astype(np.int64), first[row])


def group_rows(rows: dict[str, np.ndarray], sequence: np.ndarray) -> RowSets:
    """Rows as row sets."""
    order = np.lexsort((rows["number"], sequence, rows["step"]))
    step, sequence, position, output = (column[order] for column in (rows["step"], sequence, rows["position"], rows["output"]))
    starts = first_of_runs(number_rows(step, sequence)[0])
    length = run_lengths(starts, len(step))
    outputs = np.add.reduceat(output.astype(np.int64), starts) if len(starts) else starts
    return RowSets(step[starts], sequence[starts], length, position[starts], outputs, output[starts + length - 1])


def complete_row_sets(sets: RowSets, n_tokens: np.ndarray, position: np.ndarray) -> RowSets:
    """The same, and for each step without recorded rows one row set of sequence 0 whose last output is wanted."""
    alone = np.setdiff1d(np.arange(len(n_tokens)), sets.step)
    one = np.ones(len(alone), np.int64)
    implied = RowSets(alone, 0 * one, n_tokens[alone], position[alone], one, one > 0)
    joined = RowSets(*(np.concatenate(pair) for pair in zip(vars(sets).values(), vars(implied).values(), strict=True)))
    return joined.where(np.lexsort((joined.sequence, joined.step)))


def fed_rows(sets: RowSets, reported: np.ndarray, steps: Columns, whole: bool) -> FedRows:
    """Phases and requests of row sets, by the rules above.

    `reported`: the phase of each row set that the engine reports, as index into PHASES; 0: none. `steps`: columns of all steps
    (pid, tid, context, begin_ns, engine: its number). `whole`: every step since the program's begin was recorded.
    """
    feeds = np.flatnonzero(~np.isin(reported, (REFUSED, WARM_UP, DRAFT, OTHER)))
    owner = np.where(steps["context"] != 0, steps["context"], -steps["tid"])
    key = number_rows(steps["pid"][sets.step], owner[sets.step], sets.sequence)[0]
    order = feeds[np.lexsort((steps["begin_ns"][sets.step[feeds]], key[feeds]))]
    infers = (steps["engine"] == LLAMACPP)[sets.step[order]]
    phase, position, start = sequence_life(sets.where(order), key[order], reported[order], infers, whole)
    kept = kept_rows(sets.rows[order], position, phase, start)
    if whole:
        few = (sets.rows[order] > 0) & (sets.rows[order] <= WARMING)
        short = infers & start & (phase == PREFILL) & few & (position == 0)
        alone = short & np.append(start[1:], True)[: len(start)]
        context = number_rows(steps["pid"][sets.step[order]], owner[sets.step[order]])[0]
        warms = warm_ups(context, alone, steps["begin_ns"][sets.step[order]])
        phase, start = np.where(warms, WARM_UP, phase), start & ~warms
    answer = FedRows(
        replace(sets, position=sets.position.copy()), reported.copy(), np.full(len(reported), NONE), np.full(len(reported), NONE)
    )
    answer.phase[order] = phase
    answer.sets.position[order] = position
    begins = np.flatnonzero(start)
    rank = np.argsort(np.argsort(steps["begin_ns"][sets.step[order[begins]]], kind="stable"), kind="stable")
    answer.request[order] = np.where(phase == WARM_UP, NONE, np.append(rank, NONE)[np.cumsum(start) - 1])
    answer.kept[order] = kept
    return with_drafts(answer, steps)


def sequence_life(
    sets: RowSets, key: np.ndarray, reported: np.ndarray, infers: np.ndarray, whole: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(phase, position, whether a request begins) of row sets that are sorted by sequence (`key`) and time.

    `reported`: the phase that the engine reports, or 0; `infers`: unknown positions continue.
    """
    answer = []
    before = end = prompt_end = NONE
    finished = encoded = decoded = False
    columns = (key, reported, infers, sets.position, sets.rows, sets.outputs, sets.last)
    for of, known, infer, at, n, outputs, last in zip(*(column.tolist() for column in columns), strict=True):
        first = of != before
        if first:
            end = prompt_end = NONE
            finished = encoded = decoded = False
        if at < 0 and infer:
            at = end + 1 if not first else 0 if whole else NONE
        n = max(n, 1)
        if known:
            decodes = known == DECODE
        elif first:
            decodes = n == outputs == 1 and (at > 0 or (at < 0 and not whole))
        else:
            near = at < 0 or end < 0 or (prompt_end < at and (n == 1 or at <= end + 1))
            decodes = finished and outputs == n <= VERIFIED and near
        jumps = at >= 0 and end >= 0 and at != end + 1 and not (encoded and not known)
        answer.append((DECODE if decodes else PREFILL, at, first or (not decodes and (decoded or jumps))))
        before, decoded, end = of, decodes, at + n - 1 if at >= 0 else NONE
        finished = decodes or last
        if not decodes:
            prompt_end, encoded = end, bool(known)
    phase, position, start = np.array(answer, np.int64).reshape(-1, 3).T
    return phase, position, start > 0


def warm_ups(context: np.ndarray, alone: np.ndarray, begin_ns: np.ndarray) -> np.ndarray:
    """Which row sets are the first ones of a context, `alone`, and not its last; `alone`: short prompts without an answer."""
    order = np.lexsort((begin_ns, context))
    starts = first_of_runs(context[order])
    length = run_lengths(starts, len(order))
    others = np.concatenate(([0], np.cumsum(~alone[order])))
    answer = np.zeros(len(order), bool)
    answer[order] = others[1:] == np.repeat(others[starts], length)
    answer[order[starts + length - 1]] = False
    return answer


def kept_rows(rows: np.ndarray, position: np.ndarray, phase: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Rows that stayed in their sequence, of row sets sorted by sequence and time: all but those of rejected drafts.

    A verification's rows stay up to where the request's next rows begin.
    """
    ends = np.append(start[1:], True)[: len(start)]
    following = np.append(position[1:], NONE)[: len(position)]
    known = ~ends & (following >= 0) & (position >= 0)
    verifies = (phase == DECODE) & (rows > 1)
    return np.where(verifies, np.where(known, np.clip(following - position, 0, rows), NONE), np.maximum(rows, 1))


def with_drafts(answer: FedRows, steps: Columns) -> FedRows:
    """The row sets of contexts that draft for another one, with that one's requests."""
    sets, feeds = answer.sets, answer.request >= 0
    verifies = (answer.phase == DECODE) & (sets.rows > 1) & feeds
    begin, context, pid = steps["begin_ns"][sets.step], steps["context"][sets.step], steps["pid"][sets.step]
    request, drafts = answer.request.copy(), np.zeros(len(begin), bool)
    for target in np.unique(context[verifies & (context != 0)]).tolist():
        mine = (context == target) & feeds
        beside = feeds & (pid == pid[mine][0]) & (context != target)
        for other in np.unique(context[beside]).tolist():
            theirs = beside & (context == other)
            if (
                not (theirs & verifies).any()
                and 2 * verified_before(sets, begin, mine & verifies, theirs) >= (mine & verifies).sum()
            ):
                drafts |= theirs
                request[theirs] = draft_owners(answer, mine, theirs, begin)
    code, first = number_rows(request[feeds])  # requests of a draft's own are gone: numbers stay without gaps
    request[feeds] = np.argsort(np.argsort(request[feeds][first], kind="stable"), kind="stable")[code]
    return replace(answer, phase=np.where(drafts, DRAFT, answer.phase), request=request)


def verified_before(sets: RowSets, begin: np.ndarray, checks: np.ndarray, others: np.ndarray) -> int:
    """How many verifications have a row set among `others` before them whose last output is a row that they verify."""
    verified = pd.DataFrame({"check": np.flatnonzero(checks), "at": begin[checks]})
    verified = verified.assign(first=sets.position[checks], last=sets.position[checks] + sets.rows[checks] - 2)
    wanted, moments = others & sets.last, np.append(np.unique(begin[checks]), NONE)
    drafted = pd.DataFrame({"at": moments[np.searchsorted(moments[:-1], begin[wanted])]})
    drafted = drafted.assign(position=sets.position[wanted] + sets.rows[wanted] - 1)
    return int(drafted.merge(verified, on="at").query("first <= position <= last")["check"].nunique())


def draft_owners(answer: FedRows, target: np.ndarray, draft: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The target's request that each of a draft's row sets belongs to: the latest begun, if possible of the same sequence."""
    starts = pd.DataFrame(
        {"request": answer.request[target], "sequence": answer.sets.sequence[target], "begin": begin[target]}
    ).drop_duplicates("request")
    found = np.full(int(draft.sum()), NONE)
    for sequence in np.unique(answer.sets.sequence[draft]).tolist():
        mine = starts[starts["sequence"] == sequence]
        mine = mine if len(mine) else starts
        rows = answer.sets.sequence[draft] == sequence
        at = np.maximum(np.searchsorted(mine["begin"], begin[draft][rows], "right") - 1, 0)
        found[rows] = mine["request"].to_numpy()[at]
    return found


def step_phases(answer: FedRows, reported: np.ndarray) -> np.ndarray:
    """The phase of each step: of most of its rows; `reported`: the phases that engines report, 0 if they do not."""
    weight, steps = np.maximum(answer.sets.rows, 1), len(reported)
    fed = {phase: np.bincount(answer.sets.step, weight * (answer.phase == phase), steps) for phase in range(len(PHASES))}
    guess = np.where(fed[DRAFT] > 0, DRAFT, np.where(fed[DECODE] > fed[PREFILL], DECODE, PREFILL))
    guess = np.where(fed[WARM_UP] > 0, WARM_UP, guess)
    return np.where(np.isin(reported, (REFUSED, WARM_UP, OTHER)), reported, guess)


def renumber_sequences(tokens: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `sequences` for these steps, with new numbers of requests; a step without any gets one of sequence 0.

    For tables that were imported, or put together from those of several pieces of a recording.
    """
    code = {name: number for number, name in enumerate(PHASES.tolist())}
    rows = rows.assign(step=pd.Index(tokens["token_id"]).get_indexer(rows["token_id"])).query("step >= 0")
    n_tokens, position, numbers = (tokens[name].to_numpy(np.int64) for name in ("n_tokens", "position", "token_id"))
    step, sequence, n, at, outputs = rows[["step", "sequence", "rows", "position", "outputs"]].to_numpy(np.int64).T
    sets = complete_row_sets(RowSets(step, sequence, n, at, outputs, outputs > 0), n_tokens, position)
    reported = tokens["phase"].map(code).to_numpy(np.int64)[sets.step]
    phases = rows.set_index(["step", "sequence"])["phase"].map(code)
    given = phases.reindex(pd.MultiIndex.from_arrays([sets.step, sets.sequence])).to_numpy(np.float64)
    reported = np.where(np.isnan(given), np.where(reported == 0, DECODE, reported), given).astype(np.int64)
    steps = {name: tokens[name].to_numpy(np.int64) for name in ("pid", "tid", "begin_ns")}
    steps |= {"context": tokens["context"].to_numpy(np.int64) + 1, "engine": np.zeros(len(tokens), np.int64)}
    columns = fed_rows(sets, reported, steps, whole=False).table()
    return frame_of(arrow_table("sequences", columns | {"token_id": numbers[columns["token_id"]]}))
