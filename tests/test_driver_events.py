"""The driver between CPU and NPU: its tracepoints are read by their formats, calls put together, and waits for them divided."""

from pathlib import Path

import numpy as np
import pytest

from analyzer.questions import driver_calls
from analyzer.tables import store
from analyzer.tables.driver import EVENTS
from tests.test_step_time import causes, execution, states, token
from tracer.kernel.definitions import enum_values
from tracer.probes.driver_events import DRIVER_EVENTS
from workloads.recorder_policies import field_in
from workloads.recordings import Writer
from workloads.tables_fixture import MAIN, PID, frame

AT, GLINK = 10_000, list(DRIVER_EVENTS).index("qcom_glink_cmd_tx_data")
CALL, MESSAGE, SCALARS = 0xFFFFFF8812345000, 0x1230, 5 << 24


def test_events_have_one_order_in_the_kernels_program_the_tracer_and_the_analyzer() -> None:
    numbers = {name.removeprefix("DRIVER_").lower(): number for name, number in enum_values("driver_event").items()}
    assert list(DRIVER_EVENTS) == EVENTS.tolist() == sorted(numbers, key=numbers.__getitem__)


FORMATS = {
    "fastrpc_transport_send": """name: fastrpc_transport_send
ID: 1234
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;

\tfield:int cid;\toffset:8;\tsize:4;\tsigned:1;
\tfield:u64 smq_ctx;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u64 ctx;\toffset:24;\tsize:8;\tsigned:0;
\tfield:u32 handle;\toffset:32;\tsize:4;\tsigned:0;
\tfield:u32 sc;\toffset:36;\tsize:4;\tsigned:0;

print fmt: "ctx %d", REC->ctx
""",
    "qcom_glink_cmd_tx_data": "\tfield:__data_loc char[] channel;\toffset:12;\tsize:4;\tsigned:0;\n"
    "\tfield:bool tx;\toffset:40;\tsize:1;\tsigned:0;\n",
    "fastrpc_perf_counters": "\tfield:u32 handle;\toffset:8;\tsize:4;\tsigned:0;\n"
    "\tfield:u64 invoke;\toffset:80;\tsize:8;\tsigned:0;\n",
    "fastrpc_dma_unmap": "\tfield:int cid;\toffset:8;\tsize:4;\tsigned:1;\n"
    "\tfield:size_t size;\toffset:24;\tsize:8;\tsigned:0;\n",
}
PLACES = {
    "fastrpc_transport_send": [(16, 8, 0), (24, 8, 0), (32, 4, 0), (36, 4, 0), (0, 0, 0)],
    "qcom_glink_cmd_tx_data": [(12, 8, 1), (0, 0, 0), (40, 1, 0), (0, 0, 0), (0, 0, 0)],
    "fastrpc_perf_counters": [(0, 0, 0), (80, 8, 0), (8, 4, 0), (0, 0, 0), (0, 0, 0)],
    "fastrpc_dma_unmap": [(0, 0, 0), (24, 8, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
}
"""Of each event's fields in DRIVER_EVENTS: offset, width, whether it is a text."""


@pytest.mark.parametrize("event", FORMATS)
def test_where_fields_stand_is_read_from_the_format_and_what_is_not_there_has_no_width(tmp_path: Path, event: str) -> None:
    (tmp_path / "format").write_text(FORMATS[event])
    assert [field_in(tmp_path / "format", name) for name in DRIVER_EVENTS[event]] == PLACES[event]


def test_memory_given_back_and_the_drivers_own_counters_are_events_of_no_call(tmp_path: Path) -> None:
    writer = told(*WHOLE)
    for value, name in enumerate(("fastrpc_dma_unmap", "fastrpc_dma_free", "fastrpc_perf_counters"), 4096):
        told((name, 500), writer=writer, call=0, value=value)
    alone, beside = messages(tmp_path / "alone", told(*WHOLE)), messages(tmp_path / "beside", writer)
    assert alone == beside and len(alone) == 1
    events = store.load_tables(tmp_path / "beside")["driver_events"]
    rows = events[events["value"].between(4096, 4098)]
    assert rows["event"].tolist() == ["fastrpc_dma_unmap", "fastrpc_dma_free", "fastrpc_perf_counters"]
    assert set(rows["method"]) == {5} and set(rows["handle"]) == {9}


def told(*events: tuple[str, int], writer: Writer | None = None, call: int = CALL, **fields: int) -> Writer:
    """Records of a call's events at these times; answers come in on thread 7 of another process."""
    writer = writer or Writer()
    for name, ts in events:
        number = EVENTS.tolist().index(name)
        where = {"pid": 6, "tid": 7} if "response" in name or "complete" in name else {}
        known = {"context": 0 if "response" in name else call, "value": MESSAGE + (0 if "response" in name else 2)}
        writer.add("driver_event", ts=AT + ts, event=number, handle=9, scalars=SCALARS, **{**known, **where, **fields})
    return writer


WHOLE = (
    ("fastrpc_context_alloc", 310),
    ("fastrpc_transport_send", 350),
    ("fastrpc_transport_response", 590),
    ("fastrpc_context_complete", 600),
    ("fastrpc_context_free", 680),
)


def messages(folder: Path, writer: Writer) -> list[list[object]]:
    """(token, method, begin, sent, answered, end) of each call."""
    writer.add("token_begin", ts=AT, seq=0, phase=2, n_tokens=1).add("token_end", ts=AT + 1000, seq=0)
    rows = driver_calls.rpc_messages(store.load_tables(writer.write(folder)))
    since = [np.where(rows[f"{name}_ns"] < 0, -1, rows[f"{name}_ns"] - AT) for name in ("begin", "sent", "answered", "end")]
    return np.column_stack([rows["token_id"], rows["method"], *since]).tolist()


def test_a_call_is_put_together_from_its_events_and_one_of_the_same_identity_is_another(tmp_path: Path) -> None:
    again = [(name, ts + 400) for name, ts in WHOLE]
    assert messages(tmp_path, told(*WHOLE, *again)) == [[0, 5, 310, 350, 600, 680], [0, 5, 710, 750, 1000, 1080]]


def test_an_answer_is_known_by_the_messages_number_where_its_call_is_not_told(tmp_path: Path) -> None:
    some = [(name, ts) for name, ts in WHOLE if not name.endswith("complete")]
    assert messages(tmp_path, told(*some)) == [[0, 5, 310, 350, 590, 680]]
    assert messages(tmp_path / "without", told(WHOLE[1], WHOLE[4])) == [[0, 5, 350, 350, -1, 680]]


def test_a_message_of_glink_is_answered_by_the_next_unless_another_was_sent_meanwhile(tmp_path: Path) -> None:
    def glink(writer: Writer, *sent_and_ts: tuple[int, int], channel: bytes = b"fastrpcglink") -> Writer:
        name = int.from_bytes(channel[:8], "little")
        for is_sent, ts in sent_and_ts:
            where = {} if is_sent else {"pid": 6, "tid": 7}
            writer.add("driver_event", ts=AT + ts, event=GLINK, context=name, handle=is_sent, **where)
        return writer

    writer = glink(glink(Writer(), (1, 100), (0, 190)), (0, 150), channel=b"sensors!")
    glink(writer, (1, 300), (1, 310), (0, 400), (0, 410), (1, 500), (0, 600))
    assert messages(tmp_path, writer) == [
        [0, -1, 100, 100, 190, 190],
        [0, -1, 300, 300, -1, -1],
        [0, -1, 310, 310, -1, -1],
        [0, -1, 500, 500, 600, 600],
    ]


def test_an_execution_is_divided_by_its_calls_events() -> None:
    names, ts = zip(*WHOLE, strict=True)
    events = frame("driver_events", event=list(names), ts_ns=np.array(ts) + AT, token_id=0, pid=PID, tid=MAIN, context=CALL)
    asleep = states(("running", 0, 360), ("sleeping", 360, 605), ("runnable", 605, 640), ("running", 640, 1000))
    tables = token(qnn_executes=execution(), driver_events=events, thread_states=asleep)
    assert causes(tables) == {"submission": 40, "accelerator": 280, "completion": 80, "host code": 600}
    alone = token(driver_events=events, thread_states=asleep)
    assert causes(alone) == {"submission": 40, "accelerator": 250, "completion": 80, "host code": 630}
