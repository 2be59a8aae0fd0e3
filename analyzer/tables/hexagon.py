"""The tables of llama.cpp's Hexagon backend: batches sent to the NPU, their operators, and remote calls."""

import numpy as np
import pandas as pd

from analyzer.records.reading import Source
from analyzer.records.rows import Rows
from analyzer.records.schema import Columns, fill_missing
from analyzer.tables.hexagon_nodes import GivenGraph, Group, graphs_by_process, match_nodes
from analyzer.tables.operators import layer_of
from analyzer.tables.steps import Steps

CALLS = np.array(["remote_handle64_invoke", "fastrpc_mmap"], object)
"""Names by enum hexagon_call of bpf/records.h."""
PROFILE_WORDS = 12
UNKNOWN_LAYOUT = 0
IDENTITY = ["pid", "queue", "seq"]


def build_npu_tables(source: Source, steps: Steps) -> dict[str, Columns]:
    """The tables npu_batches, npu_operators and npu_calls."""
    batches = batch_table(source, steps)
    tables = {"npu_batches": batches, "npu_operators": operator_table(source, batches), "npu_calls": call_table(source, steps)}
    return {name: dict(fill_missing(name, frame)) for name, frame in tables.items()}


def begun_step(steps: Steps, rows: Rows) -> np.ndarray:
    """The step that each record's thread began last: responses are often read after the step's call has returned."""
    begun = pd.DataFrame({"ts": steps.begin["ts"], "tid": steps.begin["tid"], "token_id": np.arange(len(steps.begin))})
    return pd.merge_asof(_batch_columns(rows, "ts", "tid"), begun, "ts", by="tid").token_id.fillna(-1).to_numpy(np.int64)


def batch_table(source: Source, steps: Steps) -> pd.DataFrame:
    """The table `npu_batches`: each batch from the begin of its write until its response was read."""
    rows, sent, done = (source.rows(f"hexagon_{kind}") for kind in ("batch", "sent", "done"))
    frame = _batch_columns(rows, *IDENTITY, "tid", "n_ops", "n_tensors", "bytes", "layout", begin_ns="ts")
    frame["engine"] = source.engines(rows["engine"]).to_pandas()
    frame["batch_id"], frame["token_id"] = np.arange(len(frame)), begun_step(steps, rows)
    frame = frame.merge(_last_records(sent, sent_ns="ts"), "left", IDENTITY)
    frame = frame.merge(_last_records(done, end_ns="ts", asked_ns="began", usecs="usecs", status="status"), "left", IDENTITY)
    frame["complete"] = frame.end_ns.notna()
    frame["wait_ns"] = (frame.end_ns - frame[["asked_ns", "sent_ns"]].max(axis=1)).fillna(-1)
    frame["end_ns"] = frame.end_ns.fillna(frame.sent_ns).fillna(frame.begin_ns)
    frame["duration_ns"] = frame.end_ns - frame.begin_ns
    frame["submit_ns"] = (frame.sent_ns - frame.begin_ns).fillna(-1)
    frame = frame.merge(profile_records(source).groupby(IDENTITY, as_index=False)["us"].sum(), "left", IDENTITY)
    frame["npu_us"] = frame.usecs.where(frame.usecs > 0).fillna(frame.us)
    frame["status"] = frame.status.where(frame.layout != UNKNOWN_LAYOUT).fillna(-1)
    frame["in_flight"] = _in_flight(frame)
    return frame


def _batch_columns(rows: Rows, *fields: str, **renamed: str) -> pd.DataFrame:
    return pd.DataFrame({name: rows[field] for name, field in {**dict(zip(fields, fields, strict=True)), **renamed}.items()})


def _last_records(rows: Rows, **fields: str) -> pd.DataFrame:
    """Records of batches, indexed by process, queue and number; the last of equal ones."""
    if not len(rows):
        return pd.DataFrame({name: np.empty(0, np.int64) for name in (*IDENTITY, *fields)})
    return _batch_columns(rows, *IDENTITY, **fields).drop_duplicates(IDENTITY, keep="last")


def _in_flight(frame: pd.DataFrame) -> np.ndarray:
    """For each batch, the number of unanswered batches of its queue when it was written, itself included."""
    answer = np.zeros(len(frame), np.int64)
    for rows in frame.groupby(["pid", "queue"]).indices.values():
        begin, end = frame.begin_ns.to_numpy()[rows], np.sort(frame.end_ns.to_numpy()[rows])
        answer[rows] = np.arange(1, len(rows) + 1) - np.searchsorted(end, begin, "right")
    return answer


def operator_table(source: Source, batches: pd.DataFrame) -> pd.DataFrame:
    """The table `npu_operators`: each operator of each batch, with the nodes that it computes and the NPU's measurements."""
    rows = source.rows("hexagon_op")
    frame = _batch_columns(rows, "ts", "tid", "opcode", "data", position="at")
    frame["shape"] = ["x".join(map(str, dims)) for dims in rows.records["ne"].tolist()] if len(rows) else []
    begun = batches[["tid", "batch_id", "token_id", *IDENTITY, "layout"]].assign(ts=batches.begin_ns)
    frame = pd.merge_asof(frame, begun, "ts", by="tid").merge(profile_records(source), "left", [*IDENTITY, "position"])
    took = (frame.second - frame["first"]) % (1 << 32)
    stopped = frame.second > 0  # the oldest profiles hold how many cycles an operator took, and 0, not from when to when
    frame["cycles"] = took.where(stopped, frame["first"]).fillna(-1)
    frame["start_cycles"] = frame["first"].where(stopped).fillna(-1)
    frame["us"] = frame.us.fillna(-1)
    groups = nodes_of_operators(frame, graphs_by_process(source))
    frame["type"] = ["+".join(node.type for node in nodes) for nodes in groups]
    frame["name"] = [nodes[-1].name if nodes else "" for nodes in groups]
    frame["tensor"] = np.array([nodes[-1].tensor if nodes else 0 for nodes in groups], np.int64).view(np.uint64)
    frame["n_nodes"] = [len(nodes) for nodes in groups]
    frame["layer"] = [layer_of(name) for name in frame.name]
    return frame


def nodes_of_operators(frame: pd.DataFrame, given: dict[int, list[GivenGraph]]) -> list[Group]:
    """The nodes of each operator row."""
    answer: list[Group] = [()] * len(frame)
    for (pid, _), rows in frame.groupby(["pid", "queue"]).indices.items():
        each = frame.iloc[rows]
        begins = np.flatnonzero(each.position.to_numpy() == 0)
        groups = match_nodes(each.ts.to_numpy(), each.opcode.to_numpy(), each.data.to_numpy(), begins, given.get(pid, []))
        for row, group in zip(rows.tolist(), groups, strict=True):
            answer[row] = group
    return answer


def profile_records(source: Source) -> pd.DataFrame:
    """The NPU's measurements, by batch and position."""
    rows = source.rows("hexagon_profile")
    if not len(rows):
        return pd.DataFrame({name: np.empty(0, np.int64) for name in (*IDENTITY, "position", "us", "first", "second")})
    words = np.ascontiguousarray(rows.records["ops"]).view("<u4").reshape(len(rows), -1, PROFILE_WORDS).astype(np.int64)
    of, place = np.nonzero(np.arange(words.shape[1]) < rows["count"][:, None])
    frame = _batch_columns(rows, *IDENTITY).iloc[of].reset_index(drop=True)
    _, frame["us"], frame["first"], frame["second"] = words[of, place, :4].T
    frame["position"] = rows["first"][of] + place
    for i in range(8):
        frame[f"pmu{i}"] = words[of, place, 4 + i]
    return frame


def call_table(source: Source, steps: Steps) -> pd.DataFrame:
    """The table `npu_calls`: remote calls of the driver."""
    rows = source.rows("hexagon_call")
    frame = _batch_columns(rows, "pid", "tid", "subject", "detail", "status", begin_ns="began", end_ns="ts")
    frame["engine"], frame["token_id"] = source.engines(rows["engine"]).to_pandas(), steps.of(rows)
    frame["function"] = CALLS[np.minimum(rows["what"], len(CALLS) - 1)]
    frame["duration_ns"] = frame.end_ns - frame.begin_ns
    return frame
