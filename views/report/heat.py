"""The report's section on speed over time: decode speed, clock, heat and power, and what a token took more, by cause."""

from typing import Any

import pandas as pd

from analyzer.questions.speed_curve import rails_without
from views.report.sections import Block, Run, Section, axis, chart, finished, note, table_of

QUERY = "select * from speed_over_time order by begin_s"
LOSSES = {
    "clock_ms": "lower clock",
    "computing_ms": "other computing",
    "waiting_ms": "waiting in steps",
    "between_ms": "between steps",
}
TABLE = (
    "Decode over time",
    "select begin_s, steps, tokens_per_s, mhz, celsius, watts, 100 * limited as limited, slower_ms, clock_ms, computing_ms, "
    "waiting_ms, between_ms, cause from speed_over_time order by begin_s",
    "number begin s, number steps, number tok/s, number MHz, number °C, number W, number limited %, bar ms slower, "
    "number by clock, number computing, number waiting, number between steps, text cause",
)
LIMITED = "Shaded: clocks were limited. Clock, temperature and power as shares of their largest values."
HALF = 0.5


def heat_section(run: Run) -> Section | None:
    """Speed over time, if decode lasted long enough and a clock, a temperature or a power is known."""
    if not len(finished(run.tables["tokens"])) or not len(run.tables["clocks"]) + len(run.tables["power"]):
        return None
    windows = run.ask(QUERY)
    if len(windows) < 2:
        return None
    without = [note(f"No watts of {r['rail']} ({r['source']}): {r['why']}.") for r in rails_without(run.tables, windows)]
    return Section("heat", "Speed over time", [speed_chart(windows), loss_chart(windows), *table_of(run, *TABLE), *without])


def line(windows: pd.DataFrame, name: str, column: str, slot: int, share: bool) -> dict[str, Any]:
    """One curve; `share`: of its largest value, on the right axis."""
    values = windows[column] / windows[column].max() if share else windows[column]
    trace = {"type": "scatter", "mode": "lines", "name": name, "slot": slot, "x": middles(windows), "y": values.round(4).tolist()}
    return trace | ({"yaxis": "y2", "line": {"dash": "dot"}} if share else {})


def middles(windows: pd.DataFrame) -> list[float]:
    """The middle of each window, s."""
    return ((windows["begin_s"] + windows["end_s"]) / 2).round(3).tolist()


def speed_chart(windows: pd.DataFrame) -> Block:
    """Decode speed with clock, temperature and power; limited windows are shaded."""
    shares = [("clock", "mhz", 1), ("temperature", "celsius", 3), ("power", "watts", 4)]
    traces = [line(windows, "tok/s", "tokens_per_s", 0, False)]
    traces += [line(windows, name, column, slot, True) for name, column, slot in shares if windows[column].notna().any()]
    limited = windows[windows["limited"] > HALF]
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "opacity": 0.15, "line": {"width": 0}, "fillcolor": "#888"}
    shapes = [{**shade, "x0": row["begin_s"], "x1": row["end_s"]} for row in limited.to_dict("records")]
    scale = {"range": [0, 1.05], "tickvals": [0, 0.5, 1], "title": {"text": "share of the largest", "standoff": 8}}
    right = {"overlaying": "y", "side": "right", "automargin": True, "showgrid": False, **scale}
    axes = {"xaxis": axis("s since the first step"), "yaxis": axis("tok/s", rangemode="tozero"), "yaxis2": right}
    return chart("Decode speed over time", traces, LIMITED, 320, QUERY, **axes, shapes=shapes)


def loss_chart(windows: pd.DataFrame) -> Block:
    """What a token took more than in the fastest window, stacked by cause."""
    bar = {"type": "bar", "marker": {"line": {"width": 0}}, "x": middles(windows)}
    traces = [
        {**bar, "name": name, "slot": slot, "y": windows[column].round(4).tolist()}
        for slot, (column, name) in enumerate(LOSSES.items())
    ]
    axes = {"xaxis": axis("s since the first step"), "yaxis": axis("ms of a token"), "barmode": "relative", "bargap": 0}
    return chart("What a token took more than in the fastest window", traces, "", 280, QUERY, **axes)
