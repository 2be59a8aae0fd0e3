"""The tables: the contract between the analyzer and the views.

Every table is an Arrow table, texts by a dictionary; a pandas DataFrame of it for those who compute; and, on disk, a Parquet file
of the same name. `*_ns` are CLOCK_MONOTONIC nanoseconds or
durations in nanoseconds, `*_us` microseconds, `*_bytes` bytes, `*_cycles` cycles of the backend's own clock. A foreign key that
points nowhere is -1; a number that is not known is -1 (integers) or NaN (floats); a text that is not known is "".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow

Tables = Mapping[str, pd.DataFrame]
"""Tables by name, as frames."""
TEXT = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
"""A column of texts: each text once, and a number for each row."""


@dataclass(frozen=True)
class Column:
    """One column: its name, NumPy dtype (`object`: text, or lists) and meaning."""

    name: str
    dtype: str
    meaning: str

    @property
    def arrow_type(self) -> pyarrow.DataType:
        """Its type in an Arrow table."""
        if self.dtype != "object":
            return pyarrow.from_numpy_dtype(self.dtype)
        return pyarrow.list_(pyarrow.uint64()) if self.name == "sources" else TEXT


def columns(spec: str) -> tuple[Column, ...]:
    """Parse lines `name dtype meaning`."""
    rows = (line.split(None, 2) for line in spec.splitlines() if line.strip())
    return tuple(Column(name, dtype, meaning) for name, dtype, meaning in rows)


SPAN = """
begin_ns     int64  first begin over all threads
end_ns       int64  last end over all threads; not recorded: the recording's end if its thread's last, else begin_ns
duration_ns  int64  end_ns - begin_ns
complete     bool   the end was recorded
"""
THREAD = """
engine       object name of the engine, as declared in tracer/engines
pid          int64  process
tid          int64  thread
"""

WITHIN = """
token_id     int64  the step
op_id        int64  the operator that its thread was in
expert       int64  the expert that its thread ran, or the operator's only one
load_id      int64  loads.load_id: the load of an expert that its thread was in
pid          int64  process
tid          int64  thread
"""
FILE = """
file         object path, or the bare name where no path was found; "" where neither is known
device       object major:minor of the file system, as the kernel numbers it; "" for anonymous memory
ino          uint64 inode; 0 for anonymous memory
"""

IMPORTED: dict[str, tuple[Column, ...]] = {
    "qnn_imported": columns(
        """
        file         object name of the file
        row          int64  row number among the events that could be read
        execute      int64  number of the execution in the file, from 0; -1: other work
        type         int64  QNN's number; -1 where the name does not tell it
        message      object the file's own name of the type
        unit         object us | bytes | cycles | count | object | as the file says it
        value        uint64 value in `unit`
        name         object QNN's identifier
        depth        int64  0 at the top, 1 below, 2 below that
        source       object who took the time: BACKEND | NETRUN | ...
        timestamp    int64  the file's own, 0 where it has none
        """
    ),
    "qnn_optrace": columns(
        """
        name         object what ran
        qnn_op       object QNN's operation that it is part of
        thread       object name and number of the thread
        unit         object HVX | HMX | DMA (starting transfers and waiting for them) | "": by its flags, else by its thread
        begin_cycles int64  cycles of the NPU's clock
        cycles       int64  how long
        """
    ),
}
"""Tables that are read from files of others; they are no part of a recording's."""

TABLES: dict[str, tuple[Column, ...]] = {
    "tokens": columns(
        "token_id int64 row number\n"
        + THREAD
        + """
        seq          int64  the engine's own number of the step
        phase        object prefill | decode
        n_tokens     int64  tokens fed in this step
        position     int64  context length before the step
        result       int64  sampled token id, or the engine's return value
        maj_flt      int64  major page faults of the calling thread within the step
        min_flt      int64  minor page faults, likewise
        """
        + SPAN
    ),
    "graphs": columns(
        "graph_id int64 row number\ntoken_id int64 the step it belongs to\n"
        + THREAD
        + """
        kind         object name of the subgraph kind, as the engine declares it (attention, expert, ...)
        layer        int64  -1 where it has none
        expert       int64  -1 where it has none
        backend      object cpu | htp | cuda | ... | "": where it ran, as far as the engine tells
        tier         int64  rows of the static shape; 0: dynamic
        n_tokens     int64  rows in use
        handle       uint64 the engine's identity of the graph
        name         object path of the model that its session runs; "" where not known
        status       int64  what the run returned
        """
        + SPAN
    ),
    "operators": columns(
        "op_id int64 row number\ntoken_id int64 the step\ngraph_id int64 the graph that encloses it in time, else -1\n"
        + THREAD
        + """
        type         object name of the operator type (MUL_MAT, attention, expert, ...)
        name         object the engine's name of the result, or type.layer
        layer        int64  -1 where it has none
        expert       int64  -1 where it has none
        n_tokens     int64  rows
        tensor       uint64 identity of the result
        order        int64  position within its token, from 0
        shape        object dims innermost first, "2048x1"; "" where not known
        n_threads    int64  threads that took part
        busy_ns      int64  sum over threads of time between begin and wait (or end)
        wait_ns      int64  sum over threads of time waiting for the others
        maj_flt      int64  major page faults within, all threads
        min_flt      int64  minor page faults within, all threads
        flops        float64 floating-point operations, in closed form from the shapes (tables/complexity.py); NaN: unknown
        read_bytes   float64 bytes that it has to read at least, likewise
        written_bytes float64 bytes that it has to write, likewise
        """
        + SPAN
    ),
    "op_threads": columns(
        """
        op_id        int64  operators.op_id
        tid          int64  thread
        begin_ns     int64  begin on this thread
        wait_ns      int64  when this thread began to wait; end_ns where it did not
        end_ns       int64  end on this thread
        """
    ),
    "tensors": columns(
        """
        engine       object name of the engine
        pid          int64  process
        tensor       uint64 identity; an address used again has one row per definition
        type         object operator type that makes it
        name         object the engine's name
        shape        object dims innermost first
        dtype        object element type (F32, Q4_0, ...); "" where not known
        bytes        int64  size in memory, -1 where not known
        sources      object list of uint64: tensors it is made from
        since_ns     int64  when it was told: valid from then until the next row of the same pid and tensor
        """
    ),
    "routes": columns(
        """
        token_id     int64  the step
        layer        int64  layer of the router
        row          int64  row within the step's batch, from 0
        rank         int64  0 .. k-1
        expert       int64  chosen expert
        weight       float64 its weight, NaN where the engine does not tell
        ts_ns        int64  when it was routed
        """
    ),
    "experts": columns(
        "run_id int64 row number\ntoken_id int64 the step\nop_id int64 the operator that encloses it\n"
        + THREAD
        + """
        layer        int64  layer
        expert       int64  expert
        n_tokens     int64  rows computed
        cache        object hit | miss | prefetched | "": cache state when the layer began
        backend      object cpu | htp | ""
        tier         int64  rows of the static shape; 0: dynamic
        maj_flt      int64  major page faults within
        min_flt      int64  minor page faults within
        """
        + SPAN
    ),
    "loads": columns(
        "load_id int64 row number\ntoken_id int64 the step, -1 outside any\n"
        + THREAD
        + """
        action       object load | evict
        reason       object startup | demand | prefetch; "" for evictions
        layer        int64  layer
        expert       int64  expert
        backend      object cpu | htp | ""
        bytes        int64  size of the expert
        resident_bytes int64 held by the cache afterwards
        """
        + SPAN
    ),
    "qnn_executes": columns(
        "execute_id int64 row number\ntoken_id int64 the step\ngraph_id int64 graphs.graph_id that encloses it on its thread\n"
        + THREAD
        + """
        graph        uint64 QNN graph handle
        object_id    int64  qnn_objects.object_id of the graph; -1: made before tracing began
        graph_name   object its name
        profile      uint64 QNN profile handle, 0 for none
        profile_id   int64  qnn_objects.object_id of the profile
        profile_level int64 its level: 1 basic, 2 detailed, 7001 linting; 0: no profile, -1: a profile that is not known
        n_inputs     int64  input tensors
        n_outputs    int64  output tensors
        status       int64  QNN error code, 0 good
        first        bool   the graph's first good execution, which pays for what later ones find done
        asynchronous bool   graphExecuteAsync: end_ns is when the program was told that it is done
        returned_ns  int64  when graphExecuteAsync returned; -1 else
        kind         object subgraph kind of the enclosing graph
        layer        int64  its layer
        expert       int64  its expert
        tier         int64  its tier
        execute_us   float64 event 400
        queue_us     float64 event 405
        host_rpc_us  float64 event 3001
        htp_rpc_us   float64 event 3002
        accel_us     float64 event 3004
        accel_excl_wait_us float64 event 3012
        accel_cycles float64 event 3003
        """
        + SPAN
    ),
    "qnn_events": columns(
        """
        event_id     int64  row number
        execute_id   int64  qnn_executes.execute_id; -1: belongs to a create or finalize, or is unjoined
        call_id      int64  qnn_calls.call_id for create and finalize events; -1 else
        parent_id    int64  qnn_events.event_id of the parent; -1 at the top
        depth        int64  0 at the top
        type         int64  QNN's number
        type_name    object its name, or the number as text where unknown
        unit         object us | bytes | cycles | count | object | backend | the number as text
        value        uint64 value in `unit`
        timestamp    uint64 the backend's own time stamp, 0 for none
        name         object QNN's identifier (node name)
        pid          int64  process
        tid          int64  thread that read it
        ts_ns        int64  when it was read
        host_ns      int64  `timestamp` on the host's clock, by two snapshots of both clocks; -1 where there is none
        """
    ),
    "qnn_calls": columns(
        "call_id int64 row number\n"
        + THREAD
        + """
        call         object contextCreate | contextCreateFromBinary | graphFinalize | ...
        handle       uint64 what the call made or worked on
        object_id    int64  qnn_objects.object_id of it
        name         object name of the graph, where it has one
        bytes        int64  size of the context binary; of all of them where the call is given a list
        status       int64  QNN error code
        """
        + SPAN
    ),
    "qnn_objects": columns(
        """
        object_id    int64  row number
        pid          int64  process
        kind         object backend | device | context | graph | profile | memory
        handle       uint64 QNN's handle
        generation   int64  how many objects of this kind had the handle before
        name         object name of a graph; "" else
        owner_id     int64  object_id of the context of a graph or memory, of the backend of a context or profile
        bytes        int64  of the binary that a context was made from; of the tensor in a registered memory
        level        int64  of a profile; type of a registered memory
        call_id      int64  qnn_calls.call_id that made it
        since_ns     int64  when it had been made
        until_ns     int64  when it was freed, with its context where it has one; -1: it never was
        """
    ),
    "qnn_stages": columns(
        "stage_id int64 row number\nexecute_id int64 qnn_executes.execute_id that it encloses or precedes; -1 for none\n"
        + THREAD
        + """
        stage        object context read | context load | context create | compose | finalize | context serialize | execute |
        """.rstrip()
        + " input (before graphExecute) | output (after it and the harvest) | harvest (of profile events)\n"
        + SPAN
    ),
    "qnn_gaps": columns(
        """
        gap_id       int64  row number
        pid          int64  process
        tid          int64  thread that ended it by submitting
        execute_id   int64  qnn_executes.execute_id that it submitted
        doing        object type of the operator that this thread was in at the gap's middle; "" outside any
        begin_ns     int64  end of the last execution of the process
        end_ns       int64  begin of the next
        duration_ns  int64  end_ns - begin_ns
        running_ns   int64  of it that thread was running
        runnable_ns  int64  waiting for a cpu
        sleeping_ns  int64  sleeping
        waiting_ns   int64  in uninterruptible sleep
        cpu_ns       int64  sum over the process' threads of time running
        """
    ),
    "qnn_findings": columns(
        """
        execute_id   int64  qnn_executes.execute_id; -1 where it is about the recording
        check        object what should hold
        unit         object us | cycles | count
        found        float64 what was found
        expected     float64 what it may at most be, or must be
        text         object both in words
        """
    ),
    "sessions": columns(
        "session_id int64 row number\n"
        + THREAD
        + """
        handle       uint64 the engine's identity, used again after it was released
        name         object path of the model; "" where it came from memory
        bytes        int64  size of a model in memory, -1 for a file
        n_inputs     int64  of its first run; -1 where it never ran
        n_outputs    int64  likewise
        since_ns     int64  when it had been made
        """
    ),
    "calls": columns(
        """
        call_id      int64  row number
        token_id     int64  the step, -1 outside any
        pid          int64  process
        tid          int64  thread
        function     object name of a function that the user declared (--probes)
        library      object file that holds it
        at           object both | entry | return: where it is probed; begin_ns = end_ns where it is not both
        depth        int64  declared functions of the thread that were open when it began
        args         object JSON: name → value as declared; null where memory could not be read; "" without arguments
        """
        + SPAN
    ),
    "thread_states": columns(
        """
        tid          int64  thread of the target
        pid          int64  its process
        state        object running | runnable | sleeping | waiting (uninterruptible) | stopped (by a signal)
        cpu          int64  cpu while running, -1 else
        begin_ns     int64  begin
        end_ns       int64  end
        duration_ns  int64  end_ns - begin_ns
        """
    ),
    "threads": columns(
        """
        tid          int64  thread
        pid          int64  process
        name         object comm
        target       bool   belongs to the traced program
        """
    ),
    "sched": columns(
        """
        ts_ns        int64  time of the event
        cpu          int64  cpu it happened on
        event        object switch | waking (asked to wake) | wakeup (stands in a run queue)
        prev_tid     int64  switch: thread switched out; else the waker (wakeup: whoever ran on `cpu`)
        prev_state   int64  kernel state bits of prev; -1 but for switch
        prev_prio    int64  kernel priority; -1 but for switch
        next_tid     int64  switch: thread switched in; else the thread woken
        next_prio    int64  kernel priority of next
        target_cpu   int64  cpu chosen; -1 for switch
        """
    ),
    "pmc": columns(
        """
        op_id        int64  operators.op_id
        tid          int64  thread
        event        object the event's name, as --pmc gave it
        value        float64 counted on this thread from the operator's begin to its wait, else to its end; NaN: not read
        """
    ),
    "faults": columns(
        "fault_id int64 row number\n"
        + WITHIN
        + FILE
        + """
        kind         object major (had to be read, or retried) | minor (was in the page cache); minor ones of files only
        offset       int64  first byte of the page touched, or, where `exact` is false, of the window around it; -1: no file
        exact        bool   `offset` is that of the page touched
        bytes        int64  brought into the page cache by the thread for it, read-ahead included
        begin_ns     int64  begin; end_ns where it is not known
        end_ns       int64  end
        duration_ns  int64  end_ns - begin_ns; -1 where the begin is not known
        """
    ),
    "reads": columns(
        "read_id int64 row number\n"
        + WITHIN
        + FILE
        + """
        call         object read | pread64 | readv | preadv | preadv2
        fd           int64  descriptor
        offset       int64  byte of the file at which it begins
        asked_bytes  int64  bytes asked for, -1 for lists of buffers
        bytes        int64  bytes read
        error        int64  error number, 0 good
        missed_bytes int64  brought into the page cache within the call, read-ahead included; the rest was there (or O_DIRECT)
        """
        + SPAN
    ),
    "blocks": columns(
        "block_id int64 row number\n"
        + WITHIN
        + """
        device       object major:minor
        sector       int64  first sector, of 512 bytes
        bytes        int64  size
        operation    object read | write | discard | flush | other
        flags        object the kernel's letters: R W D F, then A read-ahead, S sync, M metadata
        error        int64  error number, 0 good
        """
        + SPAN
    ),
    "counters": columns(
        """
        ts_ns        int64  time
        name         object counter: expert cache bytes | expert cache hits | ...; major faults | minor faults
        value        float64 value from this time on
        """
    ),
    "unpaired": columns(
        """
        kind         object what ended without a recorded begin: token | graph | op | expert | load | read | call | qnn_execute
        pid          int64  process
        tid          int64  thread
        ts_ns        int64  when it ended
        """
    ),
}


Columns = dict[str, Any]
"""Columns of a table by name: NumPy arrays; texts as pyarrow.DictionaryArray."""


def text(codes: np.ndarray, values: Sequence[str] | np.ndarray) -> pyarrow.DictionaryArray:
    """A column of texts of which row i reads values[codes[i]], by NumPy's rules; values may repeat."""
    once = pyarrow.array(values, pyarrow.string()).dictionary_encode()
    if len(codes) == 0 or (len(once.dictionary) == len(values) and codes.min() >= 0):
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(codes.astype(np.int32)), once.dictionary)
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(once.indices.to_numpy()[codes]), once.dictionary, safe=False)


def equals_any(column: pyarrow.DictionaryArray, *words: str) -> np.ndarray:
    """Which rows of a column of texts read one of these words."""
    return np.array([*(value in words for value in column.dictionary.to_pylist()), False])[column.indices.to_numpy()]


def arrow_table(table: str, columns: Mapping[str, Any]) -> pyarrow.Table:
    """Exactly the declared columns, in their order and types; raises KeyError on a missing column."""
    declared = declared_columns(table)
    arrays = [_array(columns[column.name], column) for column in declared]
    fields = [pyarrow.field(column.name, column.arrow_type, nullable=False) for column in declared]
    return pyarrow.table(arrays, pyarrow.schema(fields))


def _array(values: Any, column: Column) -> pyarrow.Array:
    if isinstance(values, pyarrow.DictionaryArray):
        return values
    if column.dtype != "object":
        return pyarrow.array(np.asarray(values).astype(column.dtype, copy=False))
    array = pyarrow.array(np.asarray(values, object), pyarrow.string() if column.arrow_type == TEXT else column.arrow_type)
    return array.dictionary_encode() if column.arrow_type == TEXT else array


def frame_of(table: pyarrow.Table) -> pd.DataFrame:
    """An Arrow table as pandas has it: numbers as they lie in memory, texts as objects that equal rows share."""
    return framed({name: frame_column(column) for name, column in zip(table.column_names, table.columns, strict=True)})


def framed(columns: dict[str, np.ndarray | pd.Series]) -> pd.DataFrame:
    """The columns as a frame. Their names are objects: pandas' own kind of text is a conversion for every small frame."""
    frame = pd.DataFrame(dict(enumerate(columns.values())), copy=False)
    frame.columns = pd.Index(list(columns), dtype=object)
    return frame


def frame_column(column: pyarrow.ChunkedArray) -> np.ndarray | pd.Series:
    """A column as pandas takes it without making strings of its own of every row."""
    if column.num_chunks != 1:
        column = pyarrow.chunked_array([column.unify_dictionaries().combine_chunks()])
    chunk = column.chunk(0)
    if pyarrow.types.is_dictionary(column.type):
        values = np.array([*chunk.dictionary.to_pylist(), ""], object)
        return pd.Series(values[chunk.indices.to_numpy()], dtype=object, copy=False)
    if pyarrow.types.is_list(column.type):
        return pd.Series(chunk.to_pandas().to_numpy(object), dtype=object, copy=False)
    return chunk.to_numpy(zero_copy_only=False)


def declared_columns(table: str) -> tuple[Column, ...]:
    """The columns of a table."""
    return TABLES.get(table) or IMPORTED[table]


def empty(table: str) -> pd.DataFrame:
    """The table with no rows and the declared dtypes."""
    return conform(table, {c.name: np.empty(0, c.dtype) for c in TABLES[table]})


def conform(table: str, frame: pd.DataFrame | Mapping[str, Any]) -> pd.DataFrame:
    """`frame` with exactly the declared columns, order and dtypes; raises KeyError on a missing column."""
    return framed({c.name: _column(frame[c.name], c.dtype) for c in declared_columns(table)})


def _column(values: Any, dtype: str) -> np.ndarray | pd.Series:
    """Text stays `object`: pandas would make it its own string type, which costs a copy of every column."""
    array = values.to_numpy(dtype=dtype) if isinstance(values, pd.Series) else np.asarray(values).astype(dtype, copy=False)
    return pd.Series(array, dtype=dtype, copy=False) if dtype == "object" else array
