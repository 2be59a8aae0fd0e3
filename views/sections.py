"""The report's sections as data: each function selects from the tables and says what to show; static/report.js draws it.

A section is a title and a list of blocks. A block is one of
    note      text
    cards     label, value, note: the figures to read first
    findings  level (good | warn | bad | info) and text
    pairs     label and value
    table     columns (name, kind: text | number | bar) and rows; sortable by every column
    chart     Plotly traces; `slot` numbers the colour of the theme
    heat      iteration by expert, one matrix per layer
"""

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

Tables = dict[str, pd.DataFrame]
Block = dict[str, Any]
MS, US = 1e6, 1e3
MAX_POINTS = 1500
MAX_ROWS = 400


@dataclass
class Run:
    """What the report is made from."""

    manifest: dict[str, Any]
    tables: Tables
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass
class Section:
    """One section of the report."""

    name: str
    title: str
    blocks: list[Block]


def note(text: str) -> Block:
    """A sentence."""
    return {"kind": "note", "text": text}


def cards(items: list[tuple[str, str, str]]) -> Block:
    """Figures to read first."""
    return {"kind": "cards", "items": [{"label": label, "value": value, "note": remark} for label, value, remark in items]}


def pairs(items: list[tuple[str, Any]]) -> Block:
    """Labels and values."""
    return {"kind": "pairs", "items": [[label, str(value)] for label, value in items if value not in (None, "")]}


def heads(spec: str) -> list[tuple[str, str]]:
    """Columns from `kind name, kind name`."""
    pairs_of = (one.split(None, 1) for one in spec.split(", "))
    return [(name, kind) for kind, name in pairs_of]


def table(columns: list[tuple[str, str]], rows: pd.DataFrame | list[list[Any]], title: str = "") -> Block:
    """A sortable table; only the first MAX_ROWS rows travel, and no column of texts that are all unknown."""
    body = rows.to_numpy(object).tolist() if isinstance(rows, pd.DataFrame) else rows
    told = [i for i, (_, kind) in enumerate(columns) if kind != "text" or any(row[i] for row in body)]
    heads = [{"name": columns[i][0], "kind": columns[i][1]} for i in told]
    return {
        "kind": "table",
        "title": title,
        "columns": heads,
        "rows": [[row[i] for i in told] for row in body[:MAX_ROWS]],
        "total": len(body),
    }


def chart(title: str, traces: list[dict[str, Any]], remark: str = "", height: int = 300, **layout: Any) -> Block:
    """A Plotly chart."""
    return {"kind": "chart", "title": title, "note": remark, "traces": traces, "layout": layout, "height": height}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """A labelled axis."""
    return {"title": {"text": title}, **more}


def label(text: object, width: int = 48) -> str:
    """A name for Plotly, which reads a little markup in its texts."""
    whole, half = str(text), width // 2
    return html.escape(whole if len(whole) <= width else f"{whole[:half]}…{whole[-half:]}", quote=False)


def labels(texts: Iterable[object], width: int = 28) -> list[str]:
    """Distinct labels of distinct names: Plotly adds up the bars of one label."""
    made: dict[str, int] = {}
    out = []
    for text in texts:
        short = label(text, width)
        made[short] = made.get(short, 0) + 1
        out.append(short if made[short] == 1 else f"{short} ({made[short]})")
    return out


def bytes_text(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def binned(n: int) -> np.ndarray:
    """The bin of each of n points such that at most MAX_POINTS bins remain."""
    return np.arange(n) // -(-max(n, 1) // MAX_POINTS)


def per_bin(n: int) -> str:
    """What to say about bins, if anything."""
    width = -(-max(n, 1) // MAX_POINTS)
    return f"Each point is the mean of {width} steps." if width > 1 else ""


def finished(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows whose end was recorded: others have no duration."""
    return frame[frame["complete"]]


def phases(run: Run) -> Section | None:
    """Steps by phase."""
    tokens = finished(run.tables["tokens"])
    if not len(tokens):
        return None
    grouped = tokens.assign(ms=tokens["duration_ns"] / MS).groupby("phase")
    rows = []
    for name, part in grouped:
        ms, n_tokens = part["ms"], int(part["n_tokens"].clip(lower=0).sum())
        quantiles = [float(ms.quantile(q)) for q in (0.5, 0.95, 0.99)]
        rows.append(
            [
                name or "unknown",
                len(part),
                n_tokens,
                float(ms.sum()),
                float(ms.mean()),
                *quantiles,
                float(ms.max()),
                int(part["maj_flt"].clip(lower=0).sum()),
            ]
        )
    columns = heads(
        "text phase, number steps, number tokens fed, bar total ms, number mean ms, "
        "number median ms, number p95 ms, number p99 ms, number max ms, number major faults"
    )
    left_out = len(run.tables["tokens"]) - len(tokens)
    blocks = [table(columns, rows)]
    if left_out:
        blocks.append(note(f"{left_out} steps are left out: their end was not recorded."))
    return Section("phases", "Phases", blocks)


def composition(run: Run, tokens: pd.DataFrame, bins: np.ndarray, what: str) -> Block | None:
    """Operator time per step, stacked by type."""
    operators = finished(run.tables["operators"])
    row = pd.Index(tokens["token_id"]).get_indexer(operators["token_id"])
    operators, row = operators[row >= 0], row[row >= 0]
    if not len(row):
        return None
    order = operators.groupby("type")["duration_ns"].sum().sort_values(ascending=False).index
    kind = pd.Index(order).get_indexer(operators["type"])
    top = min(len(order), 7)
    kind = np.minimum(kind, top)
    width = int(bins[-1]) + 1
    sums = np.bincount(kind * width + bins[row], operators["duration_ns"] / MS, (top + 1) * width).reshape(top + 1, width)
    ms = sums / np.bincount(bins, minlength=width)
    names = [*order[:top], "other types"][: top + (len(order) > top)]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "one",
            "name": label(name),
            "y": np.round(ms[i], 4),
            "slot": i,
            "line": {"width": 0},
        }
        for i, name in enumerate(names)
    ]
    return chart(
        f"Where a {what}'s time goes", traces, per_bin(len(tokens)), 340, xaxis=axis(what), yaxis=axis("ms by operator type")
    )


def series(run: Run) -> Section | None:
    """Every step in order."""
    tokens = finished(run.tables["tokens"]).sort_values("begin_ns")
    if not len(tokens):
        return None
    traces = []
    step = np.arange(len(tokens))
    for slot, phase in enumerate(sorted(set(tokens["phase"]), key=lambda p: p != "decode")):
        mine = (tokens["phase"] == phase).to_numpy()
        ms = (tokens["duration_ns"] / MS)[mine]
        bins = binned(int(mine.sum()))
        x, y = (pd.Series(np.asarray(v)).groupby(bins).mean() for v in (step[mine], ms))
        mode = "lines+markers" if len(x) < 200 else "lines"
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": label(phase or "unknown"),
                "x": x.to_numpy(),
                "y": y.round(4).to_numpy(),
                "slot": slot,
            }
        )
    scale = {"type": "log"} if len(traces) > 1 else {"rangemode": "tozero"}
    blocks = [chart("Duration of every step", traces, per_bin(len(tokens)), 300, xaxis=axis("step"), yaxis=axis("ms", **scale))]
    decode = tokens[tokens["phase"] == "decode"]
    shown, what = (decode, "decode step") if len(decode) else (tokens, "step")
    stacked = composition(run, shown, binned(len(shown)), what)
    return Section("series", "Steps over time", [*blocks, stacked] if stacked else blocks)


def operators_by_name(frame: pd.DataFrame) -> Block:
    """Every operator of the model, costliest first."""
    grouped = frame.groupby(["type", "name", "shape", "backend"], sort=False)
    rows = grouped.agg(
        runs=("op_id", "size"),
        total=("duration_ns", "sum"),
        mean=("duration_ns", "mean"),
        worst=("duration_ns", "max"),
        busy=("busy_ns", "sum"),
        wait=("wait_ns", "sum"),
        faults=("maj_flt", "sum"),
    )
    rows = rows.reset_index().sort_values("total", ascending=False)
    known = (rows["busy"] >= 0) & (rows["busy"] + rows["wait"] > 0)
    shown = rows[["type", "name", "shape", "backend", "runs"]].assign(
        total=rows["total"] / MS,
        share=100 * rows["total"] / max(float(rows["total"].sum()), 1.0),
        mean=rows["mean"] / US,
        worst=rows["worst"] / US,
        wait=np.where(known, 100 * rows["wait"] / (rows["busy"] + rows["wait"]).where(known, 1), np.nan),
        faults=rows["faults"].clip(lower=0),
    )
    columns = heads(
        "text type, text name, text shape, text backend, number runs, bar total ms, number share %, number mean µs, "
        "number max µs, number waiting %, number major faults"
    )
    return table(columns, shown, "Operators by name")


def operators(run: Run) -> Section | None:
    """Operators by type, and by name."""
    frame = finished(run.tables["operators"])
    if not len(frame):
        return None
    backends = run.tables["graphs"].set_index("graph_id")["backend"]
    frame = frame.assign(backend=frame["graph_id"].map(backends).fillna("") if len(backends) else "")
    shown = frame.groupby("type")["duration_ns"].sum().sort_values(ascending=False).head(16).iloc[::-1]
    bars = {"type": "bar", "orientation": "h", "x": shown / MS, "y": labels(shown.index), "slot": 0}
    bars["hovertemplate"] = "%{y}: %{x:.3f} ms<extra></extra>"
    axes = {"xaxis": axis("ms, all steps"), "yaxis": {"automargin": True}}
    by_type = chart("Time by operator type", [bars], "", 90 + 24 * len(shown), **axes, showlegend=False)
    return Section("operators", "Operators", [by_type, operators_by_name(frame)])


def threads(run: Run) -> Section | None:
    """What every thread of the program did with its time."""
    states = run.tables["thread_states"]
    if not len(states):
        return None
    names = dict(zip(run.tables["threads"]["tid"], run.tables["threads"]["name"], strict=True))
    ms = states.pivot_table(index="tid", columns="state", values="duration_ns", aggfunc="sum", fill_value=0) / MS
    ms = ms.reindex(columns=["running", "runnable", "waiting", "sleeping", "stopped"], fill_value=0).sort_values(
        "running", ascending=False
    )
    switches = states[states["state"] == "running"].groupby("tid").size()
    shown = ms.head(24).iloc[::-1]
    share = shown.div(shown.sum(axis=1).clip(lower=1e-9), axis=0) * 100
    y = [f"{label(names.get(tid, ''), 20)} {tid}" for tid in shown.index]
    traces = [
        {"type": "bar", "orientation": "h", "name": state, "x": share[state].round(3), "y": y, "slot": slot}
        for slot, state in ((0, "running"), (2, "runnable"), (3, "waiting"), (7, "sleeping"), (4, "stopped"))
    ]
    rows = [[names.get(tid, ""), str(tid), *ms.loc[tid].tolist(), int(switches.get(tid, 0))] for tid in ms.index]
    columns = heads(
        "text thread, text tid, bar running ms, number runnable ms, number waiting ms, number sleeping ms, "
        "number stopped ms, number times on cpu"
    )
    height = 110 + 26 * len(shown)
    return Section(
        "threads",
        "Threads",
        [
            chart(
                "Share of each thread's time", traces, "", height, barmode="stack", xaxis=axis("%"), yaxis={"automargin": True}
            ),
            table(columns, rows),
            note(
                "Waiting is uninterruptible sleep: disk, page faults. Runnable is waiting for a cpu. "
                "Stopped is held by a signal, as the tracer does while it places probes."
            ),
        ],
    )


SectionMaker = Callable[[Run], Section | None]
