"""Measured operators compared with the model's roofline, for engines without recorded tensor shapes."""

import pandas as pd

from analyzer.errors import PredictError
from analyzer.predict.prediction import Prediction
from analyzer.records.schema import Tables

TYPES = {
    **dict.fromkeys(("attention", "index", "delta"), "attention"),
    **dict.fromkeys(("shared", "dense"), "mlp"),
    **{"router": "router", "experts": "expert", "head": "head"},
}
"""First word of a predicted part → type of the operators that compute it."""


def compare_operators(prediction: Prediction, tables: Tables) -> pd.DataFrame:
    """One row per operator type of the mean step in the predicted phase, in ms.

    measured_ms, predicted_ms (NaN if the roofline has no such part), achieved (predicted / measured), above_ms, steps.
    """
    tokens = tables["tokens"]
    steps = tokens[(tokens["phase"] == prediction.setup.phase) & tokens["complete"]]
    operators = tables["operators"][tables["operators"]["token_id"].isin(steps["token_id"])]
    measured = operators.groupby("type")["duration_ns"].sum() / max(len(steps), 1) / 1e6
    named = [(TYPES.get(str(row["part"]).split()[0], str(row["part"])), row["step_ms"]) for row in prediction.rows()]
    by_type = pd.DataFrame(named, columns=["type", "ms"]).groupby("type")["ms"].sum()
    if not set(measured.index) & set(by_type.index):
        kinds = ", ".join(sorted(set(TYPES.values())))
        raise PredictError(f"the recording has no {prediction.setup.phase} operators of the types {kinds}: see analyzer roofline")
    rows = pd.DataFrame({"measured_ms": measured, "predicted_ms": by_type.reindex(measured.index)})
    rows = rows.assign(
        achieved=rows["predicted_ms"] / rows["measured_ms"],
        above_ms=(rows["measured_ms"] - rows["predicted_ms"]).clip(lower=0),
        steps=len(steps),
    )
    return rows.sort_values("measured_ms", ascending=False).reset_index()


def setup_differences(prediction: Prediction, tables: Tables) -> str:
    """Differences between the recording's steps and the prediction's, as text; empty if there are none."""
    tokens = tables["tokens"]
    steps = tokens[(tokens["phase"] == prediction.setup.phase) & tokens["complete"]]
    decode = prediction.setup.phase == "decode"
    recorded = float((steps["position"] if decode else steps["n_tokens"]).mean())
    predicted = prediction.setup.context if decode else prediction.setup.tokens
    name = "contexts" if decode else "prompts"
    if 0.8 <= predicted / max(recorded, 1) <= 1.25:
        return ""
    return f"the recording's {name} have {recorded:.0f} tokens, the prediction {predicted}"
