"""Requests: the life of each sequence from its prompt to its last token, as an engine that serves several at once ran them."""

from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import figures
from analyzer.questions.causes import ASLEEP, COMPUTING, DISK, RUN_QUEUE, STOPPED
from analyzer.questions.deciders import StepThreads
from analyzer.records.intervals import Intervals, overlaps, split_intervals
from analyzer.records.schema import Tables, declared_columns

MS = 1e6
DOING = {"running": COMPUTING, "runnable": RUN_QUEUE, "sleeping": ASLEEP, "waiting": DISK, "stopped": STOPPED}
"""State of a thread between steps → the cause of its time."""
UNKNOWN = "between steps"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def request_table(tables: Tables) -> pd.DataFrame:
    """One row per request with a complete step, in order of begin; the columns are those of `requests` in tables.toml."""
    fed = figures.fed_sequences(tables)
    fed = fed.merge(tables["tokens"][["token_id", "pid", "context"]], on="token_id").sort_values(["request", "end_ns"])
    decode, prefill = fed[fed["phase"] == "decode"], fed[fed["phase"] == "prefill"]
    groups = fed.groupby("request")
    rows = groups[["pid", "context", "sequence"]].first()
    first, answered = prefill.groupby("request").first(), prefill.groupby("request")["outputs"].last() > 0
    checks = decode[decode["rows"] > 1]
    known = checks[checks["kept"] >= 0]
    kept = decode["kept"].clip(lower=1).groupby(decode["request"]).sum()
    counted = {
        "steps": groups.size(),
        "prompt": prefill.groupby("request")["rows"].sum(),
        "generated": answered.astype(np.int64).add(kept, fill_value=0),
        "checks": checks.groupby("request").size(),
        "drafted": (checks["rows"] - 1).groupby(checks["request"]).sum(),
        "judged": (known["rows"] - 1).groupby(known["request"]).sum(),
        "accepted": (known["kept"] - 1).groupby(known["request"]).sum(),
    }
    for name, values in counted.items():
        rows[name] = values.reindex(rows.index).fillna(0).astype(np.int64)
    rows["cached"] = first["position"].reindex(rows.index).fillna(-1).astype(np.int64)
    rows["begin_ns"], rows["end_ns"] = groups["begin_ns"].min(), groups["end_ns"].max()
    rows["ttft_ms"] = figures.ttft_ms(fed).reindex(rows.index)
    rows["tpot_ms"] = tpot_ms(decode).reindex(rows.index)
    rows["held_ms"] = held_by_prompts_ms(fed, tables["tokens"]).reindex(rows.index).fillna(0.0)
    return rows.reset_index()[[column.name for column in declared_columns("requests")]]


def tpot_ms(decode: pd.DataFrame) -> pd.Series:
    """TPOT of each request from its decode rows in `turns`."""
    known = decode.dropna(subset=["itl_ms"])
    spent = (known["itl_ms"] * known["kept"]).groupby(known["request"]).sum()
    return spent / known["kept"].groupby(known["request"]).sum()


def held_by_prompts_ms(fed: pd.DataFrame, tokens: pd.DataFrame) -> pd.Series:
    """By request, ms of the time between its tokens in which the process ran steps with rows of other requests' prompts."""
    before = fed.groupby("request")["end_ns"].shift()
    known = fed["itl_ms"].notna() & before.notna()
    between = Intervals(fed["pid"].to_numpy()[known], before[known].to_numpy(np.int64), fed["end_ns"].to_numpy()[known])
    prompts = tokens[tokens["token_id"].isin(fed.loc[fed["phase"] == "prefill", "token_id"])]
    met = overlaps(between, Intervals.of_table(prompts, key="pid"))
    return pd.Series(met.length / MS).groupby(fed["request"].to_numpy()[known][met.left]).sum()


def between_tokens_ms(tables: Tables) -> dict[str, float]:
    """The part of TPOT outside the steps that decode: ms per token in other steps, and by what the step's thread did without one.

    Largest first; {} without decoded tokens.
    """
    fed, tokens, steps = figures.fed_sequences(tables), tables["tokens"], StepThreads(tables)
    known = fed["itl_ms"].notna()
    before = fed.groupby("request")[["token_id", "end_ns"]].shift()[known].astype(np.int64)
    fed, mine, last = fed[known], steps.rows(fed["token_id"][known]), steps.rows(before["token_id"])
    parts = split_intervals(Intervals(steps.owner[mine], before["end_ns"].to_numpy(), fed["end_ns"].to_numpy()), steps.windows)
    free = Intervals(steps.owner[mine][parts.left], parts.begin, parts.end).where(parts.right < 0)
    by_state = split_intervals(free, Intervals.of_table(tables["thread_states"]))
    other = (parts.right >= 0) & (parts.right != mine[parts.left]) & (parts.right != last[parts.left])
    doing = np.append(tables["thread_states"]["state"].map(DOING).to_numpy(object), UNKNOWN)[by_state.right]
    what = np.append((tokens["phase"].astype(object) + " steps").to_numpy()[parts.right[other]], doing)
    ns = pd.Series(np.append((parts.end - parts.begin)[other], by_state.end - by_state.begin))
    spent = ns.groupby(what).sum().sort_values(ascending=False) / MS / max(int(fed["kept"].sum()), 1)
    return {str(name): float(ms) for name, ms in spent.items()}


def request_concurrency(rows: pd.DataFrame) -> dict[str, float]:
    """`mean` and `most` requests in progress at once, from the first begin to the last end."""
    edges = np.concatenate((rows["begin_ns"], rows["end_ns"]))
    change = np.repeat([1, -1], len(rows))
    open_now = np.cumsum(change[np.lexsort((change, edges))])
    span = edges.max() - edges.min()
    return {"mean": float((rows["end_ns"] - rows["begin_ns"]).sum() / span) if span else 1.0, "most": int(open_now.max())}


def quantiles(values: pd.Series) -> dict[str, float | None]:
    """Mean and quantiles of the known values; None without any."""
    known = values.dropna()
    names = {"mean": known.mean(), **{name: known.quantile(q) for name, q in QUANTILES.items()}, "most": known.max()}
    return {name: float(value) if len(known) else None for name, value in names.items()}


def request_summary(tables: Tables) -> dict[str, Any]:
    """`count`, `concurrency`, quantiles of `ttft_ms` and `tpot_ms`, tokens, throughput, and `speculative` decoding if any.

    `held_ms` and its share of the time from first to last tokens: other requests' prompts ran meanwhile.
    """
    rows = request_table(tables)
    if len(rows) == 0:
        return {}
    decoding_ms = float((rows["end_ns"] - rows["begin_ns"]).sum() / MS - rows["ttft_ms"].sum())
    seconds = (rows["end_ns"].max() - rows["begin_ns"].min()) / 1e9
    return {
        "count": len(rows),
        "concurrency": request_concurrency(rows),
        "ttft_ms": quantiles(rows["ttft_ms"]),
        "tpot_ms": quantiles(rows["tpot_ms"]),
        "prompt": int(rows["prompt"].sum()),
        "cached": int(rows["cached"].clip(lower=0).sum()),
        "generated": int(rows["generated"].sum()),
        "generated_per_s": float(rows["generated"].sum() / seconds) if seconds else None,
        "held_ms": float(rows["held_ms"].sum()),
        "held_share": float(rows["held_ms"].sum()) / decoding_ms if decoding_ms > 0 else None,
        "speculative": speculation_figures(tables, rows),
    }


def speculation_figures(tables: Tables, rows: pd.DataFrame) -> dict[str, Any]:
    """Speculative decoding: drafted and accepted tokens, verifications and drafts with their time; {} without any.

    `acceptance` is that of the `judged` tokens: nothing shows how many a request's last verification accepted.
    """
    if not rows["checks"].sum():
        return {}
    fed = figures.fed_sequences(tables)
    checks = fed[(fed["phase"] == "decode") & (fed["rows"] > 1)].drop_duplicates("token_id")
    known = checks[checks["kept"] >= 0]
    drafts = tables["tokens"][tables["tokens"]["phase"] == "draft"]
    judged, accepted = int(rows["judged"].sum()), int(rows["accepted"].sum())
    return {
        "checks": int(rows["checks"].sum()),
        "drafted": int(rows["drafted"].sum()),
        "judged": judged,
        "accepted": accepted,
        "acceptance": accepted / judged if judged else None,
        "kept_per_check": float(known["kept"].mean()) if len(known) else None,
        "check_ms": float(checks["duration_ns"].mean()) / MS,
        "draft_steps": len(drafts),
        "draft_step_ms": float(drafts["duration_ns"].mean()) / MS if len(drafts) else None,
        "draft_ms": float(drafts["duration_ns"].sum()) / MS,
    }
