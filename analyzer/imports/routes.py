"""Routes in other tools' formats: `layer,expert` rows of llama.cpp's moe-trace, BigMoeOnEdge's `route_trace v1`, expert counts,
and vLLM's and Megatron's JSON. `layer,expert` rows are also what a fork of llama.cpp takes as `--moe-cache-profile`
(github.com/thecodacus/llama.cpp, pull request 5), where several traces may follow each other.

Readers return the tables `tokens`, `routes`, `experts`, `loads` of a recording as far as the format has them, the others empty;
no format has times. A route_trace has each expert's residency, the reads, and in its head the bytes of an expert by layer.
"""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analyzer.imports import json_routes
from analyzer.records.schema import TABLES, Tables, empty_table, fill_missing
from analyzer.tables.store import LazyTables, load_tables
from tracer.recording.format import RecordingError

TRACE_HEAD = "# route_trace v1"
TRACE_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
ROW_COLUMNS, COUNT_COLUMNS = ("layer", "expert"), ("layer", "expert", "count")
PHASES = ("prefill", "decode")
RESIDENCY = {"miss": 0, "hit": 1, "prefetched": 2}
MOST = 1 << 20
"""Upper bound of layer and expert numbers: a larger one means damaged input."""
EXACT = 1 << 53
LAYER_HEAD = re.compile(r"# layer=(\d{1,7}) expert_bytes=(\d{1,15})\b")


class Format(NamedTuple):
    """A format: its writer, and its reader from the columns of the file (none: JSON)."""

    text: Callable[[Tables], str]
    tables: Callable[[pd.DataFrame], Tables]
    columns: tuple[str, ...]
    meaning: str


def tables_of(path: Path) -> Tables:
    """The tables of a recording's folder, or of a file of routes."""
    return read_routes(path) if path.is_file() else load_tables(path)


def is_routes(text: str) -> bool:
    """Whether a text begins like one of the formats."""
    if text.lstrip().startswith("{"):
        return any(key in text for key in ('"routed_experts"', '"top_indices"'))
    line = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    header = {cell.strip() for cell in line.split(",")}
    return any(form.columns and header >= set(form.columns) for form in FORMATS.values())


def read_routes(path: Path) -> Tables:
    """The tables of a file in any of the formats, recognized by its header. Raises RecordingError if it has no routes."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    head = text.partition("\n")[0].strip()
    if head.startswith("# route_trace") and head != TRACE_HEAD:
        raise RecordingError(f"{path} is a {head.strip('# ')}: only v1 can be read")
    if text.lstrip().startswith("{"):
        try:
            return LazyTables.of(_from_steps(json_routes.read_steps(text)))
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from None
    lines = text.splitlines()
    rows = [line for line in lines if line.strip() and not line.startswith("#")]
    if not rows:
        raise RecordingError(f"{path} holds no routes")
    rows = [rows[0], *(row for row in rows[1:] if row != rows[0] or row[:1].isdigit())]  # files that were joined
    header = tuple(cell.strip() for cell in rows[0].split(","))
    if all(cell.isdigit() for cell in header) and len(header) in (2, 3):  # without a header
        header, rows = (ROW_COLUMNS, COUNT_COLUMNS)[len(header) == 3], ["", *rows]
    for form in FORMATS.values():
        if form.columns and set(form.columns) <= set(header):
            if len(rows) == 1:
                raise RecordingError(f"{path} holds no routes: it ends after its header")
            tables = form.tables(_number_columns(path, header, rows[1:], form.columns))
            return LazyTables.of({**tables, "loads": _with_sizes(tables["loads"], lines)})
    heads = "; ".join(",".join(form.columns) for form in FORMATS.values() if form.columns)
    raise RecordingError(f"{path} holds no routes: its first line names none of these columns: {heads}")


def write_routes(tables: Tables, path: Path, name: str) -> None:
    """Write a recording's routes in one of FORMATS. Raises RecordingError if it has none."""
    if len(tables["routes"]) == 0 and (name != "counts" or len(tables["experts"]) == 0):
        raise RecordingError("the recording holds no routes: record an MoE engine at level expert")
    path.write_text(FORMATS[name].text(tables), encoding="utf-8")


def _number_columns(path: Path, header: tuple[str, ...], rows: list[str], columns: tuple[str, ...]) -> pd.DataFrame:
    """The columns that the format needs, as numbers; the first damaged line is an error."""
    places = [header.index(column) for column in columns]
    try:
        values = np.loadtxt(rows, delimiter=",", usecols=places, comments=None, quotechar='"', ndmin=2)
    except ValueError:
        values = np.array(_numbers_by_cell(path, rows, places))
    frame = pd.DataFrame(values, columns=list(columns), dtype=float)
    whole = frame.drop(columns="weight", errors="ignore")
    if not ((whole >= 0) & (whole % 1 == 0) & (whole < EXACT)).all(axis=None) or not (frame[["layer", "expert"]] < MOST).all(
        axis=None
    ):
        raise RecordingError(f"{path}: layers, experts and steps must be whole numbers of 0 or more: one row has something else")
    return frame.astype(dict.fromkeys(whole.columns, np.int64))


def _numbers_by_cell(path: Path, rows: list[str], places: list[int]) -> list[list[float]]:
    """The numbers of rows as Python reads them; names the first damaged one."""
    values = []
    for number, cells in enumerate(csv.reader(rows), 1):
        try:
            values.append([float(cells[place]) for place in places])
        except (ValueError, IndexError):
            raise RecordingError(f"{path}: row {number} ({','.join(cells)}) is damaged or truncated") from None
    return values


def _in_time_order(tables: Tables) -> pd.DataFrame:
    """Routes in time order, with `phase`, `position` and `turn` of their steps.

    If positions are missing (they are optional in llama.cpp's batches), a turn's tokens are counted.
    """
    tokens = tables["tokens"].sort_values("token_id")
    starts = (tokens["phase"] == "prefill") & (tokens["position"] == 0)
    turns = (starts.cumsum() - 1).clip(lower=0)
    counted = tokens["n_tokens"].groupby(turns).cumsum() - tokens["n_tokens"]
    positions = tokens["position"].where(tokens["position"] >= 0, counted)
    steps = pd.DataFrame({"token_id": tokens["token_id"], "phase": tokens["phase"].astype(str), "turn": turns})
    routed = tables["routes"].merge(steps.assign(position=positions), on="token_id")
    return routed.sort_values(["token_id", "layer", "row", "rank"]).reset_index(drop=True)


def _as_rows(tables: Tables) -> str:
    return _write_csv(_in_time_order(tables)[["layer", "expert"]])


def _as_counts(tables: Tables) -> str:
    rows = tables["routes"].assign(n_tokens=1) if len(tables["routes"]) else tables["experts"]
    counted = rows.groupby(["layer", "expert"], as_index=False)["n_tokens"].sum()
    return _write_csv(counted.rename(columns={"n_tokens": "count"}))


def _as_trace(tables: Tables) -> str:
    """The text of a `route_trace`. Without a recorded cache state, experts count as resident; bytes read are in the first row."""
    routed = _in_time_order(tables)
    states = tables["experts"].sort_values("begin_ns").drop_duplicates(["token_id", "layer", "expert"])
    states = states[["token_id", "layer", "expert", "cache"]].astype({"cache": str})
    routed = routed.merge(states, on=["token_id", "layer", "expert"], how="left")
    residency = routed["cache"].map(RESIDENCY).fillna(RESIDENCY["hit"]).astype(np.int64)
    loads = tables["loads"].query("action == 'load' and bytes > 0")
    sizes = loads.groupby("layer")["bytes"].median()
    first = ~routed.duplicated(["token_id", "layer", "expert"]) & (residency == RESIDENCY["miss"])
    size = routed["layer"].map(sizes).fillna(0).astype(np.int64)
    columns = {"turn": routed["turn"], "phase": (routed["phase"] == "decode").astype(np.int64)}
    columns |= {"step": routed["position"] + routed["row"], "layer": routed["layer"], "slot": routed["rank"]}
    columns |= {"expert": routed["expert"], "weight": routed["weight"], "residency": residency}
    body = _write_csv(pd.DataFrame(columns | {"expert_bytes": size.where(first, 0)}))
    layers = sorted(routed["layer"].unique().tolist())
    n_layer, n_expert, used = (int(routed[name].max()) + 1 for name in ("layer", "expert", "rank"))
    facts = [f"# layer={layer} expert_bytes={int(sizes.get(layer, 0))} dense_bytes=0" for layer in layers]
    about = f"# model= arch= n_layer={n_layer} n_expert={n_expert} n_expert_used={used}"
    return "\n".join([TRACE_HEAD, about, *facts, body])


def _write_csv(frame: pd.DataFrame) -> str:
    text = io.StringIO()
    frame.to_csv(text, index=False, na_rep="nan", lineterminator="\n")
    return text.getvalue()


def _from_trace(frame: pd.DataFrame) -> Tables:
    """Tables of a `route_trace`: a turn's prompt is one step, regardless of batches, and each decoded token another."""
    frame = frame.assign(batch=frame["step"].where(frame["phase"] == 1, -1))
    steps = frame.groupby(["turn", "phase", "batch"], sort=True)["step"].agg(["min", "max"]).reset_index()
    steps["token_id"] = np.arange(len(steps))
    routed = frame.merge(steps, on=["turn", "phase", "batch"])
    routes = pd.DataFrame({name: routed[name] for name in ("token_id", "layer", "expert", "weight")})
    routes = routes.assign(row=routed["step"] - routed["min"], rank=routed["slot"])
    phases = [PHASES[min(phase, 1)] for phase in steps["phase"]]
    tables = _route_tables(phases, (steps["max"] - steps["min"] + 1).to_numpy(), steps["min"].to_numpy(), routes)
    # The first row of an expert in a step shows how the step found it: a prompt's later rows find what the first one loaded.
    asked = routed.groupby(["token_id", "layer", "expert"], sort=False, as_index=False)
    first = asked.agg(residency=("residency", "first"), n_tokens=("slot", "size"), bytes=("expert_bytes", "max"))
    states = {number: name for name, number in RESIDENCY.items()}
    experts = fill_missing("experts", first.assign(cache=first["residency"].map(states).fillna("")))
    read = first[first["bytes"] > 0]
    reasons = np.where(read["residency"] == RESIDENCY["prefetched"], "prefetch", "demand")
    return {**tables, "experts": experts, "loads": fill_missing("loads", read.assign(action="load", reason=reasons))}


def _with_sizes(loads: pd.DataFrame, lines: list[str]) -> pd.DataFrame:
    """The loads of a file, and one at startup for each layer with bytes in the head but no read."""
    heads = filter(None, (LAYER_HEAD.match(line) for line in lines if line.startswith("#")))
    stated = {int(head[1]): int(head[2]) for head in heads}
    missing = {layer: size for layer, size in stated.items() if size > 0 and layer not in set(loads["layer"])}
    if not missing:
        return loads
    startup = pd.DataFrame({"layer": [*missing], "bytes": [*missing.values()]}).assign(action="load", reason="startup")
    return pd.concat([loads, fill_missing("loads", startup)], ignore_index=True).assign(
        load_id=np.arange(len(loads) + len(startup))
    )


def _from_rows(frame: pd.DataFrame) -> Tables:
    """Tables of `layer,expert` rows: a step begins where the layer restarts. A layer's shortest run of rows is one token's."""
    layer = frame["layer"].to_numpy()
    begins = np.flatnonzero(np.diff(layer, prepend=-1))
    if len(begins) == 1 and len(layer) > 1:
        raise RecordingError("all rows are of one layer: where a token's rows end is unknown; counts and JSON formats have it")
    lengths = np.diff(begins, append=len(layer))
    k = int(lengths.min())
    if (lengths % k).any():
        raise RecordingError(
            f"a layer's rows are not a multiple of {k}, the smallest count of any layer: the file is truncated or of another kind"
        )
    run_step = np.cumsum(np.diff(layer[begins], prepend=layer.max() + 1) < 0) - 1
    run, place = np.repeat(np.arange(len(begins)), lengths), np.arange(len(layer)) - np.repeat(begins, lengths)
    rows = np.array([lengths[run_step == step].max() // k for step in range(run_step[-1] + 1)])
    routes = frame.assign(token_id=run_step[run], row=place // k, rank=place % k, weight=np.nan)
    return _route_tables([PHASES[int(n == 1)] for n in rows], rows, np.cumsum(rows) - rows, routes)


def _from_steps(steps: list[json_routes.RoutedStep]) -> Tables:
    """Tables of JSON's steps, one after another."""
    parts = []
    for token, step in enumerate(steps):
        for layer, chosen in step.layers.items():
            if max(layer, int(chosen.max())) >= MOST:
                raise RecordingError(f"layer {layer} or an expert of it is above {MOST}")
            row, rank = np.indices(chosen.shape).reshape(2, -1)
            columns = {"token_id": token, "layer": layer, "row": row, "rank": rank, "expert": chosen.ravel(), "weight": np.nan}
            parts.append(pd.DataFrame(columns))
    rows = np.array([max(map(len, step.layers.values())) for step in steps])
    return _route_tables(
        [PHASES[step.decode] for step in steps], rows, np.cumsum(rows) - rows, pd.concat(parts, ignore_index=True)
    )


def _steps_of(tables: Tables) -> list[json_routes.RoutedStep]:
    """The steps of tables as JSON's, in order."""
    routed = _in_time_order(tables)
    k = int(routed["rank"].max()) + 1
    steps = []
    for _, part in routed.groupby("token_id", sort=True):
        layers = {int(layer): rows["expert"].to_numpy() for layer, rows in part.groupby("layer")}
        if any(len(experts) % k for experts in layers.values()):
            raise RecordingError("routes of a step are incomplete: record again with a larger --ring-mib")
        is_decode = str(part["phase"].iloc[0]) == "decode"
        steps.append(json_routes.RoutedStep(is_decode, {layer: rows.reshape(-1, k) for layer, rows in layers.items()}))
    return steps


def _from_json(frame: pd.DataFrame) -> Tables:
    raise RecordingError("JSON has no columns")


def _from_counts(frame: pd.DataFrame) -> Tables:
    """Tables of expert counts: a single step, since counts have no order."""
    frame = frame.rename(columns={"count": "n_tokens"})
    runs = fill_missing("experts", frame.assign(token_id=0))
    tokens = int(frame.groupby("layer")["n_tokens"].sum().max())
    return {**_route_tables(["prefill"], np.array([tokens]), np.array([0]), frame.iloc[:0]), "experts": runs}


def _route_tables(phases: list[str], rows: np.ndarray, positions: np.ndarray, routes: pd.DataFrame) -> Tables:
    steps = {"token_id": np.arange(len(phases)), "phase": phases, "n_tokens": rows, "position": positions}
    nothing = {name: empty_table(name) for name in TABLES}
    routes = routes.reindex(columns=[*routes.columns.union(["token_id", "row", "rank", "weight"])])
    routes = routes.sort_values(["token_id", "layer", "row", "rank"]).reset_index(drop=True)
    return {**nothing, "tokens": fill_missing("tokens", pd.DataFrame(steps)), "routes": fill_missing("routes", routes)}


FORMATS = {
    "route-trace": Format(_as_trace, _from_trace, TRACE_COLUMNS, "route_trace v1 of BigMoeOnEdge: a row per token and expert"),
    "counts": Format(
        _as_counts, _from_counts, COUNT_COLUMNS, "tokens routed to each expert, as an importance matrix counts them"
    ),
    "layer-expert": Format(_as_rows, _from_rows, ROW_COLUMNS, "layer,expert of llama.cpp's moe-trace, in the order of choice"),
    "routed-experts": Format(
        lambda tables: json_routes.as_response(_steps_of(tables)), _from_json, (), "routed_experts of a vLLM response"
    ),
    "router-trace": Format(lambda tables: json_routes.as_trace(_steps_of(tables)), _from_json, (), "Megatron's router trace"),
}
"""Formats by name; if a header has the columns of two, the first applies."""
