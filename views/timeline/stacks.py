"""Samples of stacks as `PerfSample` packets, which every version of Perfetto reads."""

import numpy as np
import pandas as pd
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import PerfEvents, Profiling, TracePacket

from analyzer.questions.stacks import frame_names, stack_lists
from analyzer.records.schema import Tables
from views.timeline.protobuf import VARINT, Form, encode, field_bytes, tag, valid_text, varint_bytes
from views.timeline.sequence import PACKET, SEQUENCE_ID, TIMESTAMP
from views.timeline.trace_file import Packets

MONOTONIC = 3
PERF_SAMPLE, PID, TID, CALLSTACK, UNWIND_ERROR = 66, 2, 3, 4, 16
ERRORS = {
    "cut": Profiling.UNWIND_ERROR_MEMORY_INVALID,
    "unknown": Profiling.UNWIND_ERROR_UNWIND_INFO,
    "too deep": Profiling.UNWIND_ERROR_MAX_FRAMES_EXCEEDED,
}
"""Why a stack is not whole → the same in Perfetto's terms."""


def sample_head(tables: Tables, number: int, hz: int) -> bytes:
    """The packet that opens the sequence of samples: their rate, and every stack with its frames and files."""
    packet = TracePacket(trusted_packet_sequence_id=number, sequence_flags=TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
    packet.trace_packet_defaults.timestamp_clock_id = MONOTONIC
    timebase = packet.trace_packet_defaults.perf_sample_defaults.timebase
    timebase.frequency, timebase.counter = hz, PerfEvents.SW_CPU_CLOCK
    frames, interned = tables["frames"], packet.interned_data
    files, paths = pd.factorize(frames["file"])
    functions, names = pd.factorize(frame_names(tables))
    for iid, path in enumerate(paths, 1):
        interned.mapping_paths.add(iid=iid, str=valid_text(path).encode())
        interned.mappings.add(iid=iid, path_string_ids=[iid])
    for iid, name in enumerate(names, 1):
        interned.function_names.add(iid=iid, str=valid_text(name).encode())
    for iid, (function, file, address) in enumerate(zip(functions, files, frames["address"].tolist(), strict=True), 1):
        interned.frames.add(iid=iid, function_name_id=function + 1, mapping_id=file + 1, rel_pc=address)
    for iid, stack in enumerate(stack_lists(tables), 1):
        interned.callstacks.add(iid=iid, frame_ids=(stack + 1).tolist())
    return field_bytes(PACKET, packet.SerializeToString())


def sample_packets(tables: Tables, number: int, shown: dict[int, int]) -> Packets:
    """A packet for each sample; `shown`: the process that the timeline shows each thread in."""
    rows = tables["samples"]
    ts, tid, pid, stack = (rows[name].to_numpy(np.int64) for name in ("ts_ns", "tid", "pid", "stack_id"))
    errors = rows["end"].map(ERRORS).astype(np.float64).fillna(0).to_numpy(np.int64)
    process = pd.Series(tid).map(shown).fillna(pd.Series(pid)).to_numpy(np.int64)
    parts = []
    for error in np.unique(errors).tolist():
        some = errors == error
        form = Form().open(PACKET).constant(tag(SEQUENCE_ID, VARINT) + varint_bytes(number)).varint(TIMESTAMP, ts[some])
        form.open(PERF_SAMPLE).varint(PID, process[some]).varint(TID, tid[some]).varint(CALLSTACK, stack[some] + 1)
        if error:
            form.constant(tag(UNWIND_ERROR, VARINT) + varint_bytes(error))
        parts.append(encode(form.close().close(), int(some.sum()))[0])
    return len(rows), b"".join(parts)
