"""Replays the online predictor over a recording's decode steps, with a prediction before each."""

import pandas as pd

from analyzer.errors import PredictError
from analyzer.predict.step_latency import StepLatency
from analyzer.questions.figures import cache_hits
from analyzer.records.schema import Tables


def replay_steps(tables: Tables) -> tuple[pd.DataFrame, StepLatency]:
    """(one row per complete decode step: context, missed, ms, predicted_ms; the predictor, whose unit is seconds, afterwards)."""
    tokens = tables["tokens"]
    decode = tokens[(tokens["phase"] == "decode") & tokens["complete"]].sort_values("begin_ns")
    if len(decode) == 0:
        raise PredictError("the recording has no complete decode step: record longer")
    missed = cache_hits(tables).groupby("token_id")["misses"].sum() if len(tables["experts"]) else pd.Series(dtype="int64")
    counted = missed.reindex(decode["token_id"]).fillna(0).astype("int64").to_numpy()
    rows = pd.DataFrame(
        {
            "token_id": decode["token_id"].to_numpy(),
            "context": decode["position"].to_numpy() + 1,
            "missed": counted,
            "ms": decode["duration_ns"].to_numpy() / 1e6,
        }
    )
    learner = StepLatency()
    predictions = [1e3 * learner.update(r.context, r.missed, r.ms / 1e3) for r in rows.itertuples()]
    return rows.assign(predicted_ms=predictions), learner
