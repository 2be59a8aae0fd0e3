"""The roofline: achieved performance of each group of operators, compared with the machine's ceilings, and its bound.

Attainable time is the larger of flops / peak and bytes / bandwidth; the larger one is the bound. If it is less than the
time of an empty call, the bound is `launch`; if the threads mostly waited for the disk, the bound is `disk`. Measured is the
time in which an operator computes, without expert loads and without time lost to the scheduler, sleep or disk.
"""

import numpy as np
import pandas as pd

from analyzer.questions.ceilings import Ceilings
from analyzer.questions.step_time import of_counted, operator_times
from analyzer.records.intervals import Intervals, overlaps
from analyzer.records.schema import Tables
from analyzer.records.spans import distinct_sorted, innermost_span

DISK_SHARE = 0.5
GROUPINGS = {"type": ["type"], "shape": ["type", "shape", "weights"], "name": ["type", "name"], "layer": ["type", "layer"]}


def roofline_inputs(tables: Tables, by: str = "type", times: pd.DataFrame | None = None) -> pd.DataFrame:
    """Operators with the roofline's inputs: phase, backend, bytes, own_ns (computing time), disk_ns (summed over threads); with
    `by` shape, also the shapes of weights. `times`: step_time.operator_times, if already computed.
    """
    operators = tables["operators"]
    phase = tables["tokens"].set_index("token_id")["phase"].reindex(operators["token_id"]).fillna("").to_numpy()
    moved = (operators["read_bytes"] + operators["written_bytes"]).fillna(expert_bytes(tables))
    columns = {
        "backend": operator_backends(tables),
        "phase": phase,
        "bytes": moved,
        "own_ns": (operator_times(tables) if times is None else times)["computing_ns"].to_numpy(),
        "disk_ns": disk_time(tables),
    }
    if by == "shape":
        columns["weights"] = weight_shapes(operators, tables["tensors"])
    return operators.assign(**columns)


def operator_backends(tables: Tables) -> np.ndarray:
    """The backend of each operator: of the graph that encloses it, else of the graphs that it encloses, else cpu."""
    operators, graphs = tables["operators"], tables["graphs"]
    backend = graphs.set_index("graph_id")["backend"].reindex(operators["graph_id"]).fillna("").to_numpy(dtype=object, copy=True)
    around = innermost_span(operators, graphs)
    placed = graphs.assign(row=around)[(around >= 0) & (graphs["backend"] != "").to_numpy()]
    enclosed: dict[int, set[str]] = {}
    for row, name in zip(placed["row"].tolist(), placed["backend"].tolist(), strict=True):
        enclosed.setdefault(row, set()).add(name)
    for row, names in enclosed.items():
        backend[row] = backend[row] or "+".join(sorted(names))
    backend[backend == ""] = "cpu"
    return backend


def expert_bytes(tables: Tables) -> pd.Series:
    """Weight bytes of operators that run a single expert, from its recorded loads; NaN for others."""
    loads, operators = tables["loads"], tables["operators"]
    size = loads[loads["bytes"] > 0].groupby(["layer", "expert"])["bytes"].last()
    place = pd.MultiIndex.from_frame(operators[["layer", "expert"]])
    bytes_loaded = size.reindex(place).to_numpy(np.float64) if len(size) else np.full(len(operators), np.nan)
    return pd.Series(np.where(operators["expert"] >= 0, bytes_loaded, np.nan), index=operators.index)


def weight_shapes(operators: pd.DataFrame, tensors: pd.DataFrame) -> np.ndarray:
    """Shape and element type of each operator's first source, "2048x8192 Q4_0": the matrix of a product; "" if unknown."""
    described = (tensors["shape"] + " " + tensors["dtype"]).str.strip()
    first = [int(sources[0]) if len(sources) else 0 for sources in tensors["sources"]]
    keys = list(zip(tensors["pid"].tolist(), tensors["tensor"].tolist(), strict=True))
    by_tensor = dict(zip(keys, described, strict=True))
    of_result = {key: by_tensor.get((key[0], source), "") for key, source in zip(keys, first, strict=True)}
    return np.array([of_result.get(key, "") for key in zip(operators["pid"].tolist(), operators["tensor"].tolist(), strict=True)])


def disk_time(tables: Tables) -> np.ndarray:
    """ns that each operator's threads waited for the disk, from the scheduler's records or, if longer, from reads and faults."""
    shares, states = tables["op_threads"], tables["thread_states"]
    n = len(tables["operators"])
    busy, away = Intervals.of_table(shares), Intervals.of_table(states)
    away = away.where((states["state"] == "waiting").to_numpy() & np.isin(away.key, distinct_sorted(busy.key)))
    waits = overlaps(busy, away)
    waited = np.bincount(shares["op_id"].to_numpy()[waits.left], waits.length, minlength=n)[:n]
    faults = tables["faults"]
    faults = faults[(faults["kind"] == "major") & (faults["op_id"] >= 0)]
    read = np.bincount(faults["op_id"], faults["duration_ns"].clip(lower=0), minlength=n)[:n]
    return np.maximum(waited, read)


def roofline_rows(
    tables: Tables, ceilings: Ceilings | None, by: str = "type", phase: str | None = None, times: pd.DataFrame | None = None
) -> pd.DataFrame:
    """One row for each group of operators and backend, costliest first, without those of steps that figures leave out.

    Times are computing times (step_time.operator_times).

    count, ms, mean_us, flops and bytes (of one, on average), intensity (flop/byte), gflops, gbytes_per_s, threads,
    roof_us (attainable time of one), share_of_roof (roof / measured), above_ms (time of all beyond the attainable), bound.
    """
    rows = of_counted(tables, roofline_inputs(tables, by, times))
    rows = rows if phase is None else rows[rows["phase"] == phase]
    grouped = rows.groupby([*GROUPINGS[by], "backend"], as_index=False, sort=False)
    table = grouped.agg(
        count=("op_id", "size"),
        ns=("own_ns", "sum"),
        median_ns=("own_ns", "median"),
        flops=("flops", "mean"),
        bytes=("bytes", "mean"),
        threads=("n_threads", "max"),
        busy=("busy_ns", "sum"),
        wait=("wait_ns", "sum"),
        disk=("disk_ns", "sum"),
    )
    table = table.assign(
        ms=table["ns"] / 1e6,
        mean_us=table["ns"] / table["count"] / 1e3,
        median_us=table["median_ns"] / 1e3,
        intensity=table["flops"] / table["bytes"],
        gflops=table["flops"] * table["count"] / table["ns"],
        gbytes_per_s=table["bytes"] * table["count"] / table["ns"],
        wait_share=table["wait"] / (table["busy"] + table["wait"]).clip(lower=1),
        disk_share=table["disk"] / (table["busy"] + table["wait"]).clip(lower=1),
    )
    table = with_bounds(table, ceilings)
    return table.drop(columns=["ns", "median_ns", "busy", "wait", "disk"]).sort_values("ms", ascending=False, ignore_index=True)


def with_bounds(rows: pd.DataFrame, ceilings: Ceilings | None) -> pd.DataFrame:
    """Add roof_us, share_of_roof, above_ms and bound; without ceilings, or off the CPU, the only known bound is the disk."""
    disk = rows["disk_share"] > DISK_SHARE
    if ceilings is None:
        return rows.assign(roof_us=np.nan, share_of_roof=np.nan, above_ms=np.nan, bound=np.where(disk, "disk", ""))
    speeds = np.array([ceilings.of(int(n)) for n in rows["threads"]]).reshape(-1, 2)
    memory, compute = rows["bytes"] / speeds[:, 0], rows["flops"] / speeds[:, 1]
    roof = np.where(rows["backend"] == "cpu", np.fmax(memory, compute) * 1e6, np.nan)
    launch = roof * 1e3 < ceilings.launch_ns
    named = np.where(np.isnan(roof), "", np.where(launch, "launch", np.where(compute > memory, "compute", "memory")))
    share, above = roof / rows["median_us"], (rows["ms"] - roof * rows["count"] / 1e3).clip(lower=0)
    return rows.assign(roof_us=roof, share_of_roof=share, above_ms=above, bound=np.where(disk, "disk", named))


def complexity_fits(tables: Tables, phase: str = "decode") -> pd.DataFrame:
    """Time against complexity (ProfInfer's Figure 10): for each type, time = launch_us + flops / gflops, over shapes, with r2."""
    rows = roofline_inputs(tables)
    rows = rows[(rows["phase"] == phase) & (rows["flops"] > 0)]
    points = rows.groupby(["type", "flops"])["own_ns"].agg(["median", "size"]).reset_index()
    answer = []
    for kind, shapes in points.groupby("type"):
        if len(shapes) < 3:
            continue
        x, y = shapes["flops"].to_numpy(), shapes["median"].to_numpy()
        slope, start = np.polyfit(x, y, 1)
        residual, spread = y - (start + slope * x), y - y.mean()
        r2 = 1 - (residual @ residual) / (spread @ spread) if spread @ spread else 1.0
        speed = 1 / slope if slope > 0 else np.nan
        answer.append({"type": kind, "shapes": len(shapes), "launch_us": start / 1e3, "gflops": speed, "r2": r2})
    return pd.DataFrame(answer, columns=["type", "shapes", "launch_us", "gflops", "r2"])


def subgraph_backends(tables: Tables) -> pd.DataFrame:
    """Subgraphs of one kind and size that ran on several backends (Figure 12): median us on each, and the ratio to the CPU."""
    graphs = tables["graphs"]
    finished = graphs[graphs["complete"] & (graphs["backend"] != "")]
    keys = ["kind", "n_tokens"]
    middle = finished.groupby([*keys, "backend"])["duration_ns"].agg(["median", "size"]).reset_index()
    shared = middle[middle.groupby(keys)["backend"].transform("nunique") > 1]
    cpu = shared[shared["backend"] == "cpu"].set_index(keys)["median"]
    place = pd.MultiIndex.from_frame(shared[keys])
    ratio = shared["median"].to_numpy() / cpu.reindex(place).to_numpy(np.float64) if len(shared) else np.empty(0)
    return pd.DataFrame(
        {
            **{name: shared[name].to_numpy() for name in (*keys, "backend")},
            "runs": shared["size"].to_numpy(),
            "median_us": shared["median"].to_numpy() / 1e3,
            "times_cpu": ratio,
        }
    )
