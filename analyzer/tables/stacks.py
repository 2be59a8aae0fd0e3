"""The tables `samples`, `waits`, `stacks` and `frames`."""

from pathlib import Path

import numpy as np

from analyzer.records.reading import Source
from analyzer.records.schema import Columns, text_array
from analyzer.records.spans import NONE, latest, shared_codes
from analyzer.stacks.unwinding import CLOCK, ENDS, WAIT, WAKER, Unwound, unwind
from analyzer.tables.steps import Steps


def build_stacks(source: Source, tokens: Steps) -> dict[str, Columns]:
    """The columns of the four tables; without rows if no stacks were recorded."""
    unwound = unwind(Path(source.contents.recording.path), source.manifest)
    if unwound is None:
        return {name: {} for name in ("samples", "waits", "stacks", "frames")}
    return {
        "samples": sample_columns(unwound, tokens),
        "waits": wait_columns(unwound, tokens),
        "stacks": stack_columns(unwound),
        "frames": frame_columns(unwound),
    }


def places(rows: np.ndarray, tokens: Steps) -> Columns:
    """Thread, step, and the stack with how its unwinding ended."""
    threads = {"pid": rows["pid"].astype(np.int64), "tid": rows["tid"].astype(np.int64)}
    return {
        **threads,
        "token_id": tokens.containing(threads, rows["ts"].astype(np.int64)),
        "stack_id": rows["stack"].astype(np.int64),
        "end": text_array(rows["end"].astype(np.int64), ENDS),
    }


def sample_columns(unwound: Unwound, tokens: Steps) -> Columns:
    """The columns of `samples`, in order of time."""
    rows = unwound.samples[unwound.samples["kind"] == CLOCK]
    return {"sample_id": np.arange(len(rows)), "ts_ns": rows["ts"].astype(np.int64), **places(rows, tokens)}


def wait_columns(unwound: Unwound, tokens: Steps) -> Columns:
    """The columns of `waits`, in order of their ends; the waker is who woke the thread last before it continued."""
    rows, wakers = (unwound.samples[unwound.samples["kind"] == kind] for kind in (WAIT, WAKER))
    waiting, waking = shared_codes([rows["tid"]], [wakers["waited"]])
    by = latest(waking, wakers["ts"].astype(np.int64), waiting, rows["ts"].astype(np.int64))
    of_same = (by != NONE) & (np.append(wakers["since"], 0)[by] == rows["since"])
    begin, end = rows["since"].astype(np.int64), rows["ts"].astype(np.int64)
    return {
        "wait_id": np.arange(len(rows)),
        "begin_ns": begin,
        "end_ns": end,
        "duration_ns": end - begin,
        **places(rows, tokens),
        "waker_tid": np.where(of_same, np.append(wakers["tid"], 0)[by], NONE),
        "waker_stack_id": np.where(of_same, np.append(wakers["stack"], 0)[by], NONE),
    }


def stack_columns(unwound: Unwound) -> Columns:
    """The columns of `stacks`: a row a frame of each distinct stack."""
    depths = np.array([len(stack) for stack in unwound.stacks], np.int64)
    return {
        "stack_id": np.repeat(np.arange(len(depths)), depths),
        "depth": np.concatenate([np.empty(0, np.int64), *(np.arange(depth) for depth in depths)]),
        "frame_id": np.concatenate([np.empty(0, np.int64), *unwound.stacks]),
    }


def frame_columns(unwound: Unwound) -> Columns:
    """The columns of `frames`."""
    frames = unwound.frames
    names = ("file", "function", "line", "found_by")
    text = {name: np.array([str(frame.get(name, "")) for frame in frames], object) for name in names}
    return {
        "frame_id": np.arange(len(frames)),
        **text,
        "address": np.array([frame.get("address", 0) % 2**64 for frame in frames], np.uint64),
    }
