"""What operators do for the model, by their names, and how much of each token's time each such group has."""

import re

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables
from analyzer.records.spans import Nest

GROUPS = (
    *("embedding", "attention", "softmax", "copy", "routing", "expert compute", "expert load", "combine"),
    *("feed-forward", "head", "sampling", "other"),
)
COPIES = ("CPY", "DUP", "CONT", "CONCAT", "SET", "SET_ROWS", "copy")
"""Operators that only move data: they are of the group "copy" where they belong to no expert and no router."""

BY_NAME: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("embedding", re.compile(r"^(inp_)?embd\b|^embed(ding)?s?\b|^(wpe|tok_embd|token_embd)\b")),
    (
        "routing",
        re.compile(
            r"ffn_moe_(logits|probs|argsort|topk|weights|group|biased)|selected_experts|^(router|gate|routing|topk|dispatch)\b"
        ),
    ),
    ("combine", re.compile(r"ffn_moe_(weighted|out|add)|^combine\b|^(scatter|unpermute)\b")),
    ("expert compute", re.compile(r"ffn_moe|^experts?\b")),
    ("expert load", re.compile(r"^(expert_)?load\b|^prefetch\b")),
    ("feed-forward", re.compile(r"ffn_|^(mlp|dense|shared_experts?|feed_forward)\b|shexp")),
    ("softmax", re.compile(r"soft_?max\b|soft_?max-", re.I)),
    ("attention", re.compile(r"attn|^[QKV]cur\b|^k?qv?\b|kq|cache_[kv]|fattn|^(attention|attn|qkv|rope)\b|^[qkv]-|^kv", re.I)),
    ("head", re.compile(r"^result_(norm|output)|^(lm_)?head\b|^logits\b")),
    ("sampling", re.compile(r"^(sampling|sampler|sample)\b")),
)
"""The first pattern found in an operator's name decides."""


def group_of(name: str) -> str:
    """The group of an operator by its name ("ffn_moe_gate-3", "attention.0"); "other" where no pattern fits."""
    return next((group for group, pattern in BY_NAME if pattern.search(name)), "other")


def operator_groups(operators: pd.DataFrame) -> np.ndarray:
    """The group of each operator: by name, else by type."""
    names, types = pd.factorize(operators["name"].to_numpy()), pd.factorize(operators["type"].to_numpy())
    by_name = np.array([*(group_of(n) for n in names[1]), "other"], object)[names[0]]
    by_type = np.array([*(group_of(t.lower()) for t in types[1]), "other"], object)[types[0]]
    group = np.where(by_name == "other", by_type, by_name)
    moves = np.isin(operators["type"].to_numpy(), COPIES) & np.isin(group, ("attention", "other"))
    return np.where(moves, "copy", group)


def working(tables: Tables) -> pd.DataFrame:
    """What every thread does for its token: segments (token_id, tid, group, begin, end) that do not overlap on a thread.

    A load within an operator is taken out of it; segments end with their token.
    """
    operators, threads = tables["operators"], tables["op_threads"]
    op = threads["op_id"].to_numpy()
    loads = tables["loads"][tables["loads"]["action"] == "load"]
    loads = loads[loads["token_id"] >= 0]
    token = np.concatenate((operators["token_id"].to_numpy()[op], loads["token_id"].to_numpy()))
    group = np.concatenate((operator_groups(operators)[op], np.full(len(loads), "expert load", object)))
    tid, begin, end = (np.concatenate((threads[c].to_numpy(), loads[c].to_numpy())) for c in ("tid", "begin_ns", "end_ns"))
    segment = Nest(tid, begin, end).segments()
    span = segment.span
    token_end = tables["tokens"].set_index("token_id")["end_ns"].reindex(token[span], fill_value=-1).to_numpy()
    rows = pd.DataFrame(
        {"token_id": token[span], "tid": tid[span], "begin": segment.begin, "end": np.minimum(segment.end, token_end)}
    )
    rows["group"] = pd.Series(group[span], dtype=object)
    return rows[rows["end"] > rows["begin"]].reset_index(drop=True)


def group_times(tables: Tables, rows: pd.DataFrame) -> pd.DataFrame:
    """ns of each group in each token (rows: token_id, columns: GROUPS): every moment of a token is counted once.

    `rows` are what `working` answers. What the token's own thread does counts; while it does nothing, what the others do for the
    token, shared evenly among them. The rest of the token's time is nobody's: the residual.
    """
    owner = tables["tokens"].set_index("token_id")["tid"].reindex(rows["token_id"], fill_value=-1).to_numpy()
    column = pd.Categorical(rows["group"], categories=GROUPS).codes + np.where(rows["tid"].to_numpy() == owner, 0, len(GROUPS))
    token = np.concatenate((rows["token_id"], rows["token_id"])).astype(np.int64)
    ts = np.concatenate((rows["begin"], rows["end"])).astype(np.int64)
    order = np.lexsort((ts, token))
    steps = np.zeros((len(order), 2 * len(GROUPS)))
    steps[np.arange(len(order)), np.concatenate((column, column))] = np.repeat([1.0, -1.0], len(rows))
    active = np.cumsum(steps[order], axis=0)
    of_owner, of_others = active[:, : len(GROUPS)], active[:, len(GROUPS) :]
    shown = np.where(of_owner.sum(axis=1)[:, None] > 0, of_owner, of_others)
    share = shown / np.maximum(shown.sum(axis=1), 1.0)[:, None]
    token, ts = token[order], ts[order]
    lasting = np.append(np.where(token[1:] == token[:-1], np.diff(ts), 0), 0)[: len(ts)]
    return pd.DataFrame(share * lasting[:, None], columns=list(GROUPS)).groupby(token).sum()
