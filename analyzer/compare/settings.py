"""Speed against energy of several settings: the medians of each one's runs, and which settings none beats in both."""

from dataclasses import replace

import pandas as pd

from analyzer.compare.results import Result
from analyzer.questions.pareto import on_front

POINT = ["device", "rail", "setting", "tokens_per_s", "j_per_token", "j_mean", "j_sd", "runs", "pareto"]


def named_settings(results: list[Result]) -> list[Result]:
    """Results whose path has no build get one: the words of their command that not all commands have."""
    commands = [str(result.environment.get("command") or "").split() for result in results]
    common = set.intersection(*map(set, commands)) if commands else set()
    names = [" ".join(word for word in words if word not in common) for words in commands]
    return [replace(result, build=result.build or name) for result, name in zip(results, names, strict=True)]


def setting_points(speed: pd.DataFrame, energy: pd.DataFrame) -> pd.DataFrame:
    """A row per device, power rail and setting (build), columns POINT, of decode; the frames are of history.read_runs."""
    fast = speed[speed["metric"] == "decode speed"].groupby(["device", "build"])["value"].median().rename("tokens_per_s")
    spent = energy[(energy["metric"] == "energy per token") & (energy["phase"] == "decode")]
    spent = spent.groupby(["device", "type", "build"], sort=False)["value"].agg(
        j_per_token="median", j_mean="mean", j_sd="std", runs="size"
    )
    rows = spent.reset_index().merge(fast.reset_index(), on=["device", "build"])
    rows = rows.rename(columns={"type": "rail", "build": "setting"}).sort_values(["device", "rail", "tokens_per_s"])
    flags = pd.Series(False, rows.index)
    for _, part in rows.groupby(["device", "rail"], sort=False):
        flags[part.index] = on_front(list(zip(-part["tokens_per_s"], part["j_per_token"], strict=True)))
    return rows.assign(pareto=flags)[POINT].reset_index(drop=True)
