"""Tables derived from the recorded ones, computed when a query names them."""

from collections.abc import Callable
from functools import partial

import pandas as pd

from analyzer.questions import (
    accelerators,
    backends,
    cache_curves,
    displacement,
    driver_calls,
    energy,
    energy_split,
    experts,
    figures,
    npu_windows,
    requests,
    speed_curve,
    stacks,
    step_time,
    threads,
    trends,
)
from analyzer.records.schema import Tables

DERIVED: dict[str, tuple[str, Callable[[Tables], pd.DataFrame]]] = {
    "time": ("the time of steps by part and cause (analyzer/records/tables.toml)", step_time.step_time),
    "samples": ("samples with the operator, expert, part and cause of their moment", partial(stacks.joined, name="samples")),
    "waits": ("long waits, likewise", partial(stacks.joined, name="waits")),
    "counted": ("the steps that figures count: token_id, phase; not refused, warm-up or disturbed ones", step_time.counted_steps),
    "mean_steps": ("the mean step of each phase by part and cause; disturbed and refused steps left out", step_time.mean_steps),
    "operator_times": ("computing time of operators, and what they lost to each other cause", step_time.operator_times),
    "submissions": ("submissions to an accelerator, and when their completion was known", accelerators.submissions),
    "rpc_messages": ("calls from CPU to NPU as recorded by the driver, from begin to end", driver_calls.rpc_messages),
    "backends": ("operators of equal type, role and shape on the CPU and elsewhere: median times", backends.compare_backends),
    "gaps": ("pieces of `time` outside of operators and loads, with the operators around them", step_time.gap_pieces),
    "npu_gaps": ("pieces of `time` of steps that use the NPU, while no execution is on it", npu_windows.npu_gaps),
    "npu_windows": ("each run of a graph on the NPU, cut into host, accelerator and residual", npu_windows.npu_windows),
    "displacements": ("pieces of steps in which one of their threads was ready but had no CPU", displacement.displacements),
    "operator_states": ("busy time of operator types by state of the thread", threads.operator_states),
    "decode_steps": ("decode steps with context, ms and tpot_ms", trends.decode_steps),
    "growth": ("ns per token of context, by operator type", trends.context_growth),
    "thread_balance": ("how evenly threads shared their operators", threads.thread_balance),
    "displaced_by": ("threads that took CPUs from threads of steps", displacement.displaced_by),
    "activations": ("rows routed to each expert, by step and layer", experts.activations),
    "density": ("share of steps in which each expert was active", experts.activation_shares),
    "reuse": ("steps since each expert last ran", experts.reuse_distance),
    "time_by_distance": ("decode steps' expert time by steps since their experts last ran", experts.time_by_distance),
    "cache_hits": ("hits and misses of the expert cache, by step and layer", figures.cache_hits),
    "requests": ("requests with TTFT, TPOT, tokens and accepted drafts (requests.requests)", requests.request_table),
    "energy": ("energy of each phase by power rail, per token, with intervals", energy.phase_energy),
    "request_energy": ("energy of each request by power rail: by readings, and by the fit to what ran", energy.request_energy),
    "operator_energy": ("a model of the energy of operators, by rail and phase, with its residual", energy_split.operator_energy),
    "step_energy": ("energy of each step by power rail, likewise", energy.step_energy),
    "speed_over_time": (
        "decode speed in windows, with clock, heat, power and what a token took more",
        speed_curve.speed_over_time,
    ),
    "cache_curves": ("hit rates of LRU, LFU and Belady by cache size", cache_curves.hit_rate_curves),
}
"""Name → (meaning, function that makes it)."""
