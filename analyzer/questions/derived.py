"""Tables derived from the recorded ones, computed when a query names them."""

from collections.abc import Callable

import pandas as pd

from analyzer.questions import (
    backends,
    cache_curves,
    displacement,
    experts,
    figures,
    ledger,
    phases,
    requests,
    rpc,
    threads,
    trends,
)
from analyzer.records.schema import Tables

DERIVED: dict[str, tuple[str, Callable[[Tables], pd.DataFrame]]] = {
    "phases": ("ns of each group, cause and residual by token (phases.per_token)", lambda t: phases.per_token(t).reset_index()),
    "ledger": ("ns of each token by cause, which add up to it (analyzer/records/tables.toml)", ledger.ledger),
    "ledger_pieces": ("the pieces of tokens that make up the ledger, each with its cause", ledger.ledger_pieces),
    "submissions": ("submissions to an accelerator, and when their completion was known", ledger.submissions),
    "rpc_messages": ("calls from CPU to NPU as recorded by the driver, from begin to end", rpc.messages),
    "backends": ("operators of equal type, role and shape on the CPU and elsewhere: median times", backends.beside),
    "gaps": ("idle pieces of tokens with their cause and the operators around them", phases.gaps),
    "npu_gaps": ("idle pieces of the NPU within tokens, with their cause", phases.npu_gaps),
    "npu_windows": ("each run of a graph on the NPU, cut into host, accelerator and residual", phases.npu_windows),
    "displacements": ("pieces of steps in which one of their threads was ready but had no CPU", displacement.displacements),
    "operator_states": ("busy time of operator types by state of the thread", threads.operator_states),
    "decode_steps": ("decode steps with context, ms and tpot_ms", trends.decode_steps),
    "growth": ("ns per token of context, by operator type", trends.growth),
    "thread_balance": ("how evenly threads shared their operators", threads.balance),
    "displaced_by": ("threads that took CPUs from threads of steps", displacement.displaced_by),
    "activations": ("rows routed to each expert, by token and layer", experts.activations),
    "density": ("share of steps in which each expert was active", experts.density),
    "reuse": ("steps since each expert last ran", experts.reuse_distance),
    "time_by_distance": ("decode steps' expert time by steps since their experts last ran", experts.time_by_distance),
    "cache_hits": ("hits and misses of the expert cache, by token and layer", figures.cache_hits),
    "requests": ("requests with TTFT, TPOT, tokens and accepted drafts (requests.requests)", requests.requests),
    "cache_curves": ("hit rates of LRU, LFU and Belady by cache size", cache_curves.curves),
}
"""Name → (meaning, function that makes it)."""
