"""Definitions of the figures that summary, comparison, report and `top` share. Only complete steps that feed tokens count.

request           the life of a sequence: its prompt's row sets and the decoded ones that follow (tables/sequences.py)
TTFT              end of the step with the last prompt row set of a request - begin of the first; a recording's is the median over
                  requests. An end is when outputs could be sampled (`sampled_ns`), here and in ITL
ITL               end of a request's decode step - end of its previous step: time from one token to the next; a verification that
                  kept n tokens gives n ITLs of 1/n of that time each
TPOT              mean ITL: time per output token after the first; its median and quantiles are those of the ITLs
decode tokens/s   number of ITLs / their sum, in s: 1000 / TPOT, the speed of one request; the engine's time between steps counts
prefill tokens/s  prompt rows fed in prefill steps / the sum of these steps' durations, in s
hit rate          hits / (hits + misses), of distinct experts of each step and layer, by the cache's state when the layer began

Steps of contexts that draft for another one do not count, nor do steps in which the tracer placed or learnt probes
(`undisturbed_steps`), unless a phase has no others.
"""

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables, empty_table
from analyzer.tables.sequences import APART, renumber_sequences

MS = 1e6


def fed_sequences(tables: Tables) -> pd.DataFrame:
    """What complete steps feed to requests: rows of `sequences` with the step's times and `itl_ms`, by request and time.

    `end_ns` is when the step's tokens could be sampled (`sampled_ns`). `itl_ms` is the time per token of decode; NaN of
    prefill, of disturbed steps and where it is not known how many tokens were kept. Tables without `sequences` (imported ones)
    have one sequence per context or thread.
    """
    tokens = tables["tokens"].reset_index(drop=True)
    rows = tables["sequences"] if "sequences" in tables else empty_table("sequences")
    rows = rows if len(rows) else renumber_sequences(tokens, rows)
    steps = tokens[tokens["complete"] & tokens["phase"].isin(("prefill", "decode"))]
    times = steps[["token_id", "begin_ns", "duration_ns", "disturbed"]].join(sampled_ns(tokens, rows))
    fed = rows[rows["request"] >= 0].merge(times, on="token_id").sort_values(["request", "end_ns"], ignore_index=True)
    since_last = fed.groupby("request")["end_ns"].diff() / MS
    known = (fed["phase"] == "decode") & (fed["kept"] > 0) & fed["token_id"].isin(undisturbed_steps(steps)["token_id"])
    return fed.assign(itl_ms=(since_last / fed["kept"]).where(known))


def sampled_ns(tokens: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """When each step's outputs could be sampled, by the index of `tokens`: at its end, or at that of its draft's step.

    Engines may feed the rows of a step to the draft as well before they sample: in the thread's next step, which has the same row
    sets and asks for an output. Without an output it prepares the draft for the tokens that were sampled already.
    """
    order = tokens[tokens["complete"]].sort_values(["pid", "tid", "begin_ns"])
    step, draft = order.iloc[:-1], order.iloc[1:]
    behind = (draft["phase"].to_numpy() == "draft") & step["phase"].isin(("prefill", "decode")).to_numpy()
    behind &= (step[["pid", "tid"]].to_numpy() == draft[["pid", "tid"]].to_numpy()).all(axis=1)
    sampled = tokens["end_ns"].copy()
    if behind.any():
        step, draft, fed = step[behind], draft[behind], rows.groupby("token_id")
        sets = fed[["sequence", "rows", "position"]].apply(lambda mine: frozenset(mine.itertuples(index=False)))
        same = (sets.reindex(step["token_id"]).to_numpy() == sets.reindex(draft["token_id"]).to_numpy()) & (
            fed["outputs"].sum().reindex(draft["token_id"]).to_numpy() > 0
        )
        sampled[step.index[same]] = draft["end_ns"].to_numpy()[same]
    return sampled


def undisturbed_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps that the tracer's placing and learning of probes did not disturb, and those of phases that have no others."""
    spoilt = steps["disturbed"]
    return steps[~spoilt | spoilt.groupby(steps["phase"]).transform("all")] if spoilt.any() else steps


def itls_ms(fed: pd.DataFrame) -> pd.Series:
    """The ITL of each token in `fed_sequences`, in order of end."""
    known = fed.dropna(subset=["itl_ms"]).sort_values("end_ns", kind="stable")
    return known["itl_ms"].repeat(known["kept"]).reset_index(drop=True)


def complete_steps(tables: Tables) -> pd.DataFrame:
    """Complete steps that feed tokens, with `generation`, the first of their requests, and `itl_ms`, the mean of their ITLs.

    By generation and time.
    """
    tokens, of_step = tables["tokens"], fed_sequences(tables).groupby("token_id")
    done = tokens[tokens["complete"] & ~tokens["phase"].isin(APART)]
    about = of_step.agg(generation=("request", "min"), itl_ms=("itl_ms", "mean"))
    done = done.join(about, on="token_id")
    return done.assign(generation=done["generation"].fillna(-1).astype(np.int64)).sort_values(["generation", "end_ns"])


def ttft_ms(fed: pd.DataFrame) -> pd.Series:
    """TTFT of each request in `fed_sequences`, by number; no unfinished prompts, nor disturbed ones if there are others."""
    prefill = fed[fed["phase"] == "prefill"].groupby("request")
    spans = prefill.agg(
        begin=("begin_ns", "min"), end=("end_ns", "max"), outputs=("outputs", "last"), spoilt=("disturbed", "any")
    )
    spans = spans[spans["outputs"] > 0]
    spans = spans if spans["spoilt"].all() else spans[~spans["spoilt"]]
    return (spans["end"] - spans["begin"]) / MS


def decode_tokens_per_s(itl_ms: pd.Series) -> float | None:
    """Decode tokens/s from the known ITLs; None without any."""
    spent = float(itl_ms.sum())
    return 1e3 * int(itl_ms.count()) / spent if spent > 0 else None


def prefill_tokens_per_s(steps: pd.DataFrame) -> float | None:
    """Prefill tokens/s of `complete_steps`; None without prefill tokens."""
    prefill = undisturbed_steps(steps[steps["phase"] == "prefill"])
    rows = prefill["prefill_rows"].where(prefill["prefill_rows"] >= 0, prefill["n_tokens"])
    spent, fed = float(prefill["duration_ns"].sum()), int(rows.clip(lower=0).sum())
    return 1e9 * fed / spent if spent > 0 and fed > 0 else None


def lookups(tables: Tables) -> pd.DataFrame:
    """Hits and misses of engines whose experts have no runs, as `loads` with `cache`: a missing expert is loaded at once."""
    loads = tables["loads"].query("action == 'hit' or (matrix == 0 and reason == 'demand')")
    return loads.assign(cache=loads["action"].map({"hit": "hit", "load": "miss"}).astype(object))


def cache_hits(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per (token_id, layer): `hits` and `misses`, distinct experts by the cache's state when the layer began, and `rate`.

    An expert counts once per step and layer, however many runs it was split into; a prefetched one is a hit.
    Runs whose engine does not record the state are omitted; those of an engine without runs are its cache's look-ups.
    """
    runs = pd.concat([tables["experts"].query("cache != ''"), lookups(tables)])
    if phase is not None:
        tokens = tables["tokens"]
        runs = runs[runs["token_id"].isin(tokens.loc[tokens["phase"] == phase, "token_id"])]
    first = runs.sort_values("begin_ns").drop_duplicates(["token_id", "layer", "expert"])
    missed = (first["cache"] == "miss").to_numpy(np.int64)
    rows = first.assign(hits=1 - missed, misses=missed).groupby(["token_id", "layer"], as_index=False)[["hits", "misses"]].sum()
    return rows.assign(rate=rows["hits"] / (rows["hits"] + rows["misses"]))


def hit_rate(hits: int, misses: int) -> float | None:
    """The share of hits; None if both are 0."""
    return hits / (hits + misses) if hits + misses else None
