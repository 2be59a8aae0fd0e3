"""Calls from CPU to NPU as the driver reports them: made, sent, answered, done."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analyzer.records.schema import Tables, conform
from analyzer.records.spans import NONE, following, latest

SENT = ("fastrpc_transport_send", "fastrpc_transport_send_ipcmsg")
NUMBER = ~np.uint64(0xF)
"""The bits of a message's number that its response also has; the others are the destination on the NPU."""
CHANNEL = int.from_bytes(b"fastrpcg", "little")


@dataclass(frozen=True)
class CallMoments:
    """The times of one kind of event, with the call of each."""

    call: np.ndarray
    ts: np.ndarray

    def _at(self, row: np.ndarray) -> np.ndarray:
        return np.append(self.ts, NONE)[row]

    def behind(self, call: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """For each call, the first event at or after a time; -1: none."""
        return self._at(following(self.call, self.ts, call, ts - 1))

    def before(self, call: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """For each call, the last event at or before a time; -1: none."""
        return self._at(latest(self.call, self.ts, call, ts))


def rpc_messages(tables: Tables) -> pd.DataFrame:
    """The table `rpc_messages`, from FastRPC's events, or from GLINK's if FastRPC reports none."""
    events = tables["driver_events"].sort_values("ts_ns", kind="stable", ignore_index=True)
    rows = of_fastrpc(events) if events["event"].isin(SENT).any() else of_glink(events)
    return conform("rpc_messages", rows.sort_values("begin_ns", kind="stable", ignore_index=True))


def as_int64(column: pd.Series) -> np.ndarray:
    """The column's 64-bit values as int64."""
    return np.ascontiguousarray(column.to_numpy(np.uint64)).view(np.int64)


def known_or(known: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`known`; `other` where that is -1."""
    return np.where(known >= 0, known, other)


def of_fastrpc(events: pd.DataFrame) -> pd.DataFrame:
    """Calls by the driver's context number, which is reused after their end."""

    def moments(name: str) -> CallMoments:
        rows = events[events["event"] == f"fastrpc_{name}"]
        key = rows["value"] & NUMBER if name == "transport_response" else rows["context"]
        return CallMoments(as_int64(key), rows["ts_ns"].to_numpy(np.int64))

    sent = events[events["event"].isin(SENT)]
    call, ts = as_int64(sent["context"]), sent["ts_ns"].to_numpy(np.int64)
    begin = known_or(moments("context_alloc").before(call, ts), ts)
    response = moments("transport_response").behind(as_int64(sent["value"] & NUMBER), begin)
    answered = known_or(moments("context_complete").behind(call, begin), response)
    end = moments("context_free").behind(call, ts)
    answered = np.where((end < 0) | (answered <= end), answered, NONE)
    sent_ns = np.where(answered >= 0, np.minimum(ts, answered), ts)  # the event is reported after the sending
    return sent.assign(driver="fastrpc", begin_ns=begin, sent_ns=sent_ns, answered_ns=answered, end_ns=end)


def of_glink(events: pd.DataFrame) -> pd.DataFrame:
    """Messages on FastRPC's channel, which have no number: the next incoming one is the response if no other was sent between."""
    on_channel = events[(events["event"] == "qcom_glink_cmd_tx_data") & (events["context"] == CHANNEL)]
    is_sent = on_channel["handle"] > 0
    sent, come = on_channel[is_sent], on_channel.loc[~is_sent, "ts_ns"].to_numpy(np.int64)
    ts = sent["ts_ns"].to_numpy(np.int64)
    answered = CallMoments(np.zeros_like(come), come).behind(np.zeros_like(ts), ts)
    crossed = np.append(ts[1:] < answered[:-1], False)[: len(ts)] | np.insert(ts[1:] < answered[:-1], 0, False)[: len(ts)]
    answered = np.where(crossed, NONE, answered)
    rows = sent.assign(driver="qcom_glink", handle=NONE, method=NONE, begin_ns=ts, sent_ns=ts, answered_ns=answered)
    return rows.assign(end_ns=answered)[sent["token_id"] >= 0]


def rpc_summary(tables: Tables) -> dict[str, Any]:
    """Number of calls and medians in µs of their parts; {} if the driver reported none."""
    rows = rpc_messages(tables)
    if not len(rows):
        return {}
    whole = rows[(rows["answered_ns"] >= 0) & (rows["end_ns"] >= 0)]
    parts = {"before": ("begin_ns", "sent_ns"), "answer": ("sent_ns", "answered_ns"), "behind": ("answered_ns", "end_ns")}
    medians = {f"{name}_us": float((whole[end] - whole[begin]).median()) / 1e3 for name, (begin, end) in parts.items()}
    return {"driver": str(rows["driver"].iloc[0]), "calls": len(rows), "answered": len(whole), **(medians if len(whole) else {})}
