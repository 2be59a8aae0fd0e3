"""Measured operators beside what the model's roofline says of them: for engines whose tensors a recording does not describe."""

from collections.abc import Mapping

import pandas as pd

from analyzer.errors import PredictError
from analyzer.predict.prediction import Prediction

TYPES = {"attention": "attention", "router": "router", "experts": "expert", "shared": "mlp", "dense": "mlp", "head": "head"}
"""First word of a predicted part → type of the operators that do it."""

Tables = Mapping[str, pd.DataFrame]


def beside(made: Prediction, tables: Tables) -> pd.DataFrame:
    """One row per operator type, of the mean step of the predicted phase, in ms.

    measured_ms, predicted_ms (NaN where the roofline has no such part), achieved (predicted / measured), above_ms, steps.
    """
    tokens = tables["tokens"]
    steps = tokens[(tokens["phase"] == made.setup.phase) & tokens["complete"]]
    operators = tables["operators"][tables["operators"]["token_id"].isin(steps["token_id"])]
    measured = operators.groupby("type")["duration_ns"].sum() / max(len(steps), 1) / 1e6
    named = [(TYPES.get(str(row["part"]).split()[0], str(row["part"])), row["step_ms"]) for row in made.rows()]
    by_type = pd.DataFrame(named, columns=["type", "ms"]).groupby("type")["ms"].sum()
    if not set(measured.index) & set(by_type.index):
        kinds = ", ".join(sorted(set(TYPES.values())))
        raise PredictError(f"the recording has no {made.setup.phase} operators of the types {kinds}: see analyzer roofline")
    found = pd.DataFrame({"measured_ms": measured, "predicted_ms": by_type.reindex(measured.index)})
    found = found.assign(
        achieved=found["predicted_ms"] / found["measured_ms"],
        above_ms=(found["measured_ms"] - found["predicted_ms"]).clip(lower=0),
        steps=len(steps),
    )
    return found.sort_values("measured_ms", ascending=False).reset_index()


def mismatch(made: Prediction, tables: Tables) -> str:
    """What the recording's steps have otherwise than the prediction; empty where nothing."""
    tokens = tables["tokens"]
    steps = tokens[(tokens["phase"] == made.setup.phase) & tokens["complete"]]
    decode = made.setup.phase == "decode"
    seen = float((steps["position"] if decode else steps["n_tokens"]).mean())
    asked = made.setup.context if decode else made.setup.tokens
    name = "contexts" if decode else "prompts"
    return "" if 0.8 <= asked / max(seen, 1) <= 1.25 else f"the recording's {name} have {seen:.0f} tokens, predicted are {asked}"
