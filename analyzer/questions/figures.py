"""Definitions of the figures that summary, comparison, report and `top` share. Only complete steps count.

Speed is that of steps in which no probes were placed or learnt (`undisturbed`), unless a phase has no other.

generation        a prompt's prefill steps and the decode steps that follow on their thread
TTFT              end of a generation's last prefill step - begin of its first; a recording's is the median over generations
ITL               end of a decode step - end of the previous step in its generation: time from one token to the next
TPOT              mean ITL: time per output token after the first; its median and quantiles are those of the ITLs
decode tokens/s   decode steps with an ITL / the sum of these ITLs, in s: 1000 / TPOT; the engine's time between steps counts
prefill tokens/s  tokens fed in prefill steps / the sum of these steps' durations, in s
hit rate          hits / (hits + misses), of distinct experts of each step and layer, by the cache's state when the layer began
"""

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables

MS = 1e6


def generations(tokens: pd.DataFrame) -> pd.Series:
    """Number of each token's generation: one starts at position 0 and when a prefill step follows a decode step."""
    ordered = tokens.sort_values(["pid", "tid", "begin_ns"])
    thread = ordered[["pid", "tid"]]
    changed = (thread != thread.shift()).any(axis=1)
    prefill = ordered["phase"] == "prefill"
    starts = changed | (prefill & (ordered["phase"].shift() == "decode")) | (prefill & (ordered["position"] == 0))
    return starts.cumsum().reindex(tokens.index)


def complete_steps(tokens: pd.DataFrame) -> pd.DataFrame:
    """Complete steps by generation and time, with `generation` and `itl_ms`; `itl_ms` is NaN outside decode."""
    done = tokens[tokens["complete"]]
    done = done.assign(generation=generations(done)).sort_values(["generation", "end_ns"])
    since_last = done.groupby("generation")["end_ns"].diff() / MS
    decode = (done["phase"] == "decode") & done["token_id"].isin(undisturbed(done)["token_id"])
    return done.assign(itl_ms=since_last.where(decode))


def undisturbed(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps that the tracer's placing and learning of probes did not disturb, and those of phases that have no others."""
    spoilt = steps["disturbed"]
    return steps[~spoilt | spoilt.groupby(steps["phase"]).transform("all")] if spoilt.any() else steps


def ttft_ms(steps: pd.DataFrame) -> pd.Series:
    """TTFT of each generation in `complete_steps`, in order of begin; without disturbed ones, unless there are no others."""
    prefill = steps[steps["phase"] == "prefill"].groupby("generation")
    spans = prefill.agg(begin=("begin_ns", "min"), end=("end_ns", "max"), spoilt=("disturbed", "any")).sort_values("begin")
    spans = spans if spans["spoilt"].all() else spans[~spans["spoilt"]]
    return (spans["end"] - spans["begin"]) / MS


def decode_tokens_per_s(itl_ms: pd.Series) -> float | None:
    """Decode tokens/s from the known ITLs; None without any."""
    spent = float(itl_ms.sum())
    return 1e3 * int(itl_ms.count()) / spent if spent > 0 else None


def prefill_tokens_per_s(steps: pd.DataFrame) -> float | None:
    """Prefill tokens/s of `complete_steps`; None without prefill tokens."""
    prefill = undisturbed(steps[steps["phase"] == "prefill"])
    spent, fed = float(prefill["duration_ns"].sum()), int(prefill["n_tokens"].clip(lower=0).sum())
    return 1e9 * fed / spent if spent > 0 and fed > 0 else None


def cache_hits(tables: Tables, phase: str | None = None) -> pd.DataFrame:
    """Per (token_id, layer): `hits` and `misses`, distinct experts by the cache's state when the layer began, and `rate`.

    An expert counts once per step and layer, however many runs it was split into; a prefetched one is a hit.
    Runs whose engine does not record the state are omitted.
    """
    runs = tables["experts"]
    runs = runs[runs["cache"] != ""]
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
