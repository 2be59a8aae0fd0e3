"""Where threads compute and wait: samples and waits with the part and cause of their moment, and their stacks as trees."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from analyzer.questions.parts import operator_parts
from analyzer.questions.programs import has_only_threads, lives_as_steps, thread_lives
from analyzer.questions.step_time import step_time
from analyzer.records.schema import Tables
from analyzer.records.spans import NONE, innermost_span

TABLES = ("samples", "waits", "stacks", "frames")
SYSTEM = r"(?:^|/)(?:\[kernel\]|\[vdso\]|(?:libc|libpthread|ld-linux[^/]*|libm|libgcc_s|libstdc\+\+)[.-][^/]*)$"
"""Files whose functions say how a thread waits, not for what."""
OUTSIDE, COMPUTING, UNKNOWN = "outside of steps", "computing", "unknown"


def with_moments(tables: Tables, rows: pd.DataFrame, at: str) -> pd.DataFrame:
    """`rows` (samples or waits) with the operator, phase, part and cause at their time `at` on their own thread.

    A sample of a step's deciding thread, and a wait of a step's own thread, have the step's part and cause; another thread's are
    in an operator or not. Without steps, they have those of their thread's life.
    """
    moment = rows.assign(begin_ns=rows[at])
    of_lives = has_only_threads(tables)
    tables = lives_as_steps(tables, thread_lives(tables)) if of_lives else tables
    pieces, threads, operators = step_time(tables), tables["op_threads"], tables["operators"]
    if of_lives or "wait_id" in rows:
        pieces = pieces.assign(tid=tables["tokens"].set_index("token_id")["tid"].reindex(pieces["token_id"]).to_numpy())
    piece, share = (innermost_span(spans, moment) for spans in (pieces, threads))
    op = np.append(threads["op_id"].to_numpy(), NONE)[share]
    op = np.where(piece >= 0, np.append(pieces["op_id"].to_numpy(), NONE)[piece], op)
    at_op = pd.Index(operators["op_id"]).get_indexer(op)
    token = np.where((piece >= 0) & ~np.array(of_lives), np.append(pieces["token_id"].to_numpy(), NONE)[piece], rows["token_id"])
    phase = tables["tokens"].set_index("token_id")["phase"].reindex(token).fillna("").to_numpy()
    part = np.append(operator_parts(operators), OUTSIDE)[at_op]
    part = np.where(piece >= 0, np.append(pieces["part"].to_numpy(), "")[piece], part)
    cause = np.where(piece >= 0, np.append(pieces["cause"].to_numpy(), "")[piece], np.where(at_op >= 0, COMPUTING, OUTSIDE))
    return rows.assign(op_id=op, token_id=token, phase=phase, part=part, cause=cause)


def base_name(path: str) -> str:
    """What follows the last slash."""
    return path.rpartition("/")[2]


def frame_names(tables: Tables) -> np.ndarray:
    """A name for each frame: its function, else the file with the address in it."""
    frames = tables["frames"]
    rows = zip(frames["function"], frames["file"], frames["address"].tolist(), strict=True)
    return np.array([function or f"{base_name(file) or UNKNOWN}+0x{address:x}" for function, file, address in rows], object)


def stack_lists(tables: Tables) -> list[np.ndarray]:
    """The frames of each stack, outermost first."""
    stacks = tables["stacks"]
    if not len(stacks):
        return []
    first = np.flatnonzero(np.append(True, np.diff(stacks["stack_id"].to_numpy()) != 0))
    return [frames[::-1] for frames in np.split(stacks["frame_id"].to_numpy(), first[1:])]


def function_shares(tables: Tables, rows: pd.DataFrame, weight: np.ndarray) -> pd.DataFrame:
    """A row a function: `self`, the sum of weights where it is innermost, and `total`, where it is anywhere in the stack."""
    names, lists = frame_names(tables), stack_lists(tables)
    by_stack = np.bincount(rows["stack_id"], weight, len(lists))
    own: dict[str, float] = {}
    total: dict[str, float] = {}
    for frames, value in zip(lists, by_stack.tolist(), strict=True):
        called = names[frames].tolist()
        if value and called:
            own[called[-1]] = own.get(called[-1], 0.0) + value
            for name in set(called):
                total[name] = total.get(name, 0.0) + value
    answer = pd.DataFrame({"function": list(total), "self": [own.get(n, 0.0) for n in total], "total": list(total.values())})
    return answer.sort_values(["self", "total"], ascending=False, ignore_index=True)


def plain_function(name: str) -> str:
    """A function of the C library without the version and prefixes of its symbol: `pthread_cond_wait`, `pread`."""
    return re.sub(r"^(__GI_)?__(libc_)?_*(?=[a-z])", "", name.partition("@")[0])


def own_depths(tables: Tables) -> list[int]:
    """By stack_id, the index (outermost first) of the innermost frame outside of the kernel and the C library; -1: none."""
    of_system = tables["frames"]["file"].str.contains(SYSTEM).to_numpy(bool)
    return [int(np.flatnonzero(~of_system[stack])[-1]) if (~of_system[stack]).any() else NONE for stack in stack_lists(tables)]


def waiting_places(tables: Tables) -> np.ndarray:
    """By stack_id, what the program called to wait, its own function, and the line of it, or place in the file; "" at the end."""
    frames, names = tables["frames"], frame_names(tables)
    places = zip(frames["line"], frames["file"], frames["address"].tolist(), strict=True)
    line = [base_name(text) or f"{base_name(file)}+0x{address:x}" for text, file, address in places]
    answer = []
    for stack, own in zip(stack_lists(tables), own_depths(tables), strict=True):
        inner = plain_function(names[stack[min(own + 1, len(stack) - 1)]]) if len(stack) else UNKNOWN
        where = f" ({line[stack[own]]})" if own != NONE and line[stack[own]] else ""
        answer.append(f"{inner} in {names[stack[own]]}{where}" if 0 <= own < len(stack) - 1 else f"{inner}{where}")
    return np.array([*answer, ""], object)


def own_functions(tables: Tables) -> np.ndarray:
    """By stack_id, the program's innermost function, else the innermost one; "" at the end."""
    names = frame_names(tables)
    inner = [
        names[stack[own]] if len(stack) else UNKNOWN for stack, own in zip(stack_lists(tables), own_depths(tables), strict=True)
    ]
    return np.array([*inner, ""], object)


def counts_of(values: Iterable[Any]) -> dict[str, int]:
    """Value → how often it occurs, the most frequent first."""
    return {str(name): int(count) for name, count in pd.Series(list(values), dtype=object).value_counts().items()}


def stack_summary(tables: Tables, manifest: dict[str, Any]) -> dict[str, Any]:
    """What was recorded of stacks, and how much of it is whole."""
    recorded, samples, waits = manifest.get("stacks") or {}, tables["samples"], tables["waits"]
    return {
        "hz": recorded.get("hz", 0),
        "long_wait_us": recorded.get("long_wait_us", 0),
        "lost": recorded.get("lost", 0),
        "samples": len(samples),
        "waits": len(waits),
        "waits_ms": float(waits["duration_ns"].sum() * 1e-6),
        "whole": float((samples["end"] == "whole").mean()) if len(samples) else None,
        "ends": counts_of(samples["end"]),
    }
