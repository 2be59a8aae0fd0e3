"""Models of where a rail's energy goes: watts of a busy CPU by its kind, and a phase's joules by operator."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions import step_time
from analyzer.questions.causes import ACCELERATOR
from analyzer.questions.energy import WIDEST, RailFit, energy_summary, fed_tokens, fitted_rails
from analyzer.records.schema import Tables, declared_columns

BELIEVED = 0.5
"""Weight of explanations in which kinds of CPUs differ, from which on each has a figure of its own."""
SHOWN = 8
OTHERS = "others"


def modelled_summary(tables: Tables) -> dict[str, Any]:
    """energy.energy_summary, with what each rail's power depends on and its energy by operator."""
    fits = fitted_rails(tables)
    answer = energy_summary(tables, fits)
    rows = operator_energy(tables, fits)
    for rail, each in zip(answer.get("rails", []), fits, strict=True):
        mine = rows[rows["rail_id"] == each.row["rail_id"]]
        split = {str(phase): largest_operators(some) for phase, some in mine.groupby("phase")}
        rail |= {"model": {**clock_power(each), "terms": power_terms(each)}, "operators": split}
    return answer


def power_terms(each: RailFit) -> list[dict[str, Any]]:
    """Watts of one busy CPU, or of the accelerator, by phase, with a 95 % interval; what is not resolved is absent."""
    apart = each.fit.share(lambda one: one.by_kind) >= BELIEVED
    terms = []
    for phase in each.running.steps:
        places = each.running.places(phase)
        groups = [[where] for where in places if apart or where == ACCELERATOR]
        groups += [] if apart else [[where for where in places if where != ACCELERATOR]]
        for group in filter(None, groups):
            seconds = sum(places[where] for where in group)
            joules, low, high = each.fit.total(np.sum([each.running.amounts(phase, where) for where in group], axis=0))
            if (high - low) / 2 <= WIDEST * joules:
                where = group[0] if apart or group == [ACCELERATOR] else ""
                watts = {"watts": joules / seconds, "low": low / seconds, "high": high / seconds}
                terms.append({"phase": phase, "where": where, "seconds": seconds, **watts})
    return terms


def clock_power(each: RailFit) -> dict[str, float]:
    """The most probable power of the clock with which CPUs' watts grow, and its weight; that of kinds of CPUs that differ."""
    power = each.fit.most_likely.exponent
    weights = {
        "clock_weight": each.fit.share(lambda one: one.exponent == power),
        "kinds_weight": each.fit.share(lambda one: one.by_kind),
    }
    return {"clock_power": power, **weights}


def operator_energy(tables: Tables, fits: Sequence[RailFit] | None = None) -> pd.DataFrame:
    """A row per rail, phase, part and operator type: columns of `operator_energy` in tables.toml.

    A model: each moment of a step has the idle power and its CPU time at the phase's watts, whatever the operator computes. No
    sensor sees single operators. The rows of a phase add up to its energy; phases that are not resolved have none.
    """
    pieces, tokens, parts = operator_pieces(tables), fed_tokens(tables), []
    for each in fitted_rails(tables) if fits is None else fits:
        for phase, rows in pieces.groupby("phase"):
            total = each.fit.total(each.running.amounts(str(phase)))
            if (total[2] - total[1]) / 2 <= WIDEST * total[0]:
                parts.append(of_phase(each, rows, total[0], tokens[str(phase)]))
    names = [column.name for column in declared_columns("operator_energy")]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def operator_pieces(tables: Tables) -> pd.DataFrame:
    """`time` of the complete steps with a phase: phase, part, operator (its type, "" outside), begin_ns, end_ns."""
    steps = tables["tokens"].set_index("token_id")
    steps = steps[steps["complete"] & steps["phase"].isin(("prefill", "decode"))]
    time = step_time.step_time(tables)
    time = time[time["token_id"].isin(steps.index)]
    types = tables["operators"].set_index("op_id")["type"].reindex(time["op_id"]).fillna("").to_numpy(object)
    rows = time.assign(operator=types, phase=steps["phase"].reindex(time["token_id"]).to_numpy(object))
    return step_time.merge_stretches(rows, "token_id", "part", "operator")[["phase", "part", "operator", "begin_ns", "end_ns"]]


def of_phase(each: RailFit, rows: pd.DataFrame, joules: float, tokens: int) -> pd.DataFrame:
    """A phase's joules by part and operator, the most first."""
    begin, end = rows["begin_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
    ran, phase = each.running.seconds(begin, end), str(rows["phase"].iloc[0])
    mine = [one.phase == phase for one in each.running.activities]
    cpu = [one.where != ACCELERATOR and not one.exponent for one in each.running.activities]
    weighed = rows[["part", "operator"]].assign(
        seconds=ran[:, 0], cpu_seconds=(ran[:, 1:] * mine)[:, cpu].sum(axis=1), joules=(ran * [True, *mine]) @ each.fit.watts
    )
    sums = weighed.groupby(["part", "operator"], as_index=False, observed=True).sum()
    sums = sums.assign(share=sums["joules"] / sums["joules"].sum()).sort_values("joules", ascending=False)
    sums["joules"] = sums["share"] * joules
    named = {key: each.row[key] for key in ("rail_id", "source", "rail")}
    return sums.assign(
        **named, phase=phase, j_per_token=sums["joules"] / tokens if tokens else np.nan, residual=each.fit.residual
    )


def largest_operators(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The operators of a phase with the most energy, and the sum of the others."""
    columns = ["part", "operator", "seconds", "cpu_seconds", "joules", "j_per_token", "share"]
    first, rest = rows[columns].iloc[:SHOWN], rows[columns].iloc[SHOWN:]
    more = [{"part": "", "operator": OTHERS, **rest[columns[2:]].sum().to_dict()}] if len(rest) else []
    return [*first.to_dict("records"), *more]
