"""The settings of a recorded run for the simulator, and the error of a simulation with these settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analyzer.predict.costs import UNIT_OF
from analyzer.predict.simulator import RECORDED, Outcome, Settings
from analyzer.predict.sizes import byte_count
from analyzer.predict.trace import Trace
from analyzer.questions import expert_loads, figures
from analyzer.records.schema import Tables

NEXT_LAYER = 1
"""Layers ahead at most, at which the runtime requests experts without a trained predictor."""


@dataclass(frozen=True)
class RecordedRun:
    """Settings and figures of a recording, for the steps in its trace; `remarks` list what a simulation does not vary."""

    settings: Settings
    ttft_ms: float | None
    tpot_ms: float | None
    hit_rate: float | None
    remarks: tuple[str, ...]

    def against(self, outcome: Outcome) -> dict[str, Any]:
        """The simulation of `settings` compared with the recording: figures of both, and relative errors."""
        simulated = outcome.summary()
        row: dict[str, Any] = {"recorded_hit_rate": self.hit_rate, "simulated_hit_rate": simulated["hit_rate"]}
        for name, real in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            error = simulated[name] / real - 1 if real and simulated[name] is not None else None
            row |= {f"recorded_{name}": real, f"simulated_{name}": simulated[name], f"error_{name}": error}
        return row


def prefetch_warnings(trace: Trace, known: RecordedRun | None, settings: Sequence[Settings], expert_bytes: int) -> list[str]:
    """Why recorded prefetches do not show what caches of other sizes would prefetch; [] if they do, or none are replayed.

    A recording holds requests for what was not in its cache. Those that no trained predictor made, one layer ahead at most, are
    mostly wrong, and others in another cache. known: None for another device.
    """
    size = known.settings.cache_bytes if known else None
    others = [each.cache_bytes for each in settings if each.prefetch == RECORDED and each.cache_bytes is not None]
    others = [other for other in others if size is None or abs(other - size) >= expert_bytes]
    if not others:
        return []
    if trace.farthest_request <= NEXT_LAYER:
        return [
            "the recorded prefetches do not carry over to another cache size: none was requested more than one layer ahead, as "
            "without a trained predictor; train one (`moescope tune predictor PACKAGE --text FILE`) and record again, or give "
            "--prefetch off"
        ]
    if size is not None and min(others) < size:
        return [
            "a smaller cache than the recorded one would prefetch more: what was in memory was not requested; record the "
            "prefetches with the smallest cache (--expert-cache) and give that recording first"
        ]
    return []


def recorded_run(tables: Tables, trace: Trace, command: Sequence[str]) -> RecordedRun:
    """Settings and figures from the tables, with the exact budget and the eviction policy from the `command`."""
    tokens = tables["tokens"].set_index("token_id").loc[[step.token_id for step in trace.steps]]
    spent = {phase: rows["duration_ns"] / 1e6 for phase, rows in tokens.groupby("phase")}
    prefill, decode = spent.get("prefill"), spent.get("decode")
    hits = figures.cache_hits(tables)[["hits", "misses"]].sum()
    return RecordedRun(
        recorded_settings(tables, command),
        None if prefill is None else float(prefill.sum()),
        None if decode is None else float(decode.mean()),
        figures.hit_rate(int(hits["hits"]), int(hits["misses"])),
        unvaried_costs(tables),
    )


def recorded_settings(tables: Tables, command: Sequence[str]) -> Settings:
    """The settings of the recorded run."""
    phase = tables["tokens"].set_index("token_id")["phase"]
    operators, runs = tables["operators"], tables["experts"]
    chunks = operators[(operators["type"] == "attention") & (operators["token_id"].map(phase) == "prefill")]["n_tokens"]
    backend = runs.groupby(runs["token_id"].map(phase))["backend"].agg(lambda names: names.mode().iloc[0])
    tiers = tuple(sorted(int(tier) for tier in runs["tier"].unique() if tier > 0))
    loads, usual = tables["loads"], Settings()
    ahead = ((loads["action"] == "load") & (loads["reason"] == "prefetch")).any()
    return Settings(
        recorded_budget(tables, option_value(command, "--expert-cache")),
        int(chunks.max()) if len(chunks) else usual.chunk,
        tiers or usual.tiers,
        RECORDED if ahead else None,
        UNIT_OF.get(str(backend.get("prefill")), "cpu"),
        UNIT_OF.get(str(backend.get("decode")), "cpu"),
        option_value(command, "--cache-policy") or usual.policy,
    )


def recorded_budget(tables: Tables, asked: str | None) -> int | None:
    """Bytes of the recorded cache: the size in the command, else the maximum content; None if nothing was evicted.

    A share in the command is ignored: no table has the size that it refers to.
    """
    held = expert_loads.observed_budget(tables)
    return byte_count(asked) if held is not None and asked and not asked.endswith("%") else held


def option_value(command: Sequence[str], name: str) -> str | None:
    """The value of an option in a command line; None if absent."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            return following or None
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def unvaried_costs(tables: Tables) -> tuple[str, ...]:
    """Remarks on the costs that remain as recorded for all settings."""
    counts = expert_loads.load_counts(expert_loads.within_steps(tables))
    compiled = f"loads on the NPU take as long as recorded, including the compiling of {counts['compiled']} graphs"
    return ("threads are as recorded", *([compiled] if counts["compiled"] else []))
