"""Where threads compute and wait: samples and waits with the part and cause of their moment, and their stacks as trees."""

import re
from functools import cache

import numpy as np
import pandas as pd

from analyzer.questions.causes import ASLEEP, COMPUTING, EXPERT_LOAD, OTHER_THREAD
from analyzer.questions.parts import HOST_CODE, LOAD, operator_parts
from analyzer.questions.programs import has_only_threads, lives_as_steps, thread_lives
from analyzer.questions.step_time import step_time
from analyzer.records.schema import MADE, Tables, as_frame
from analyzer.records.spans import NONE, innermost_span
from analyzer.tables.store import answered_once

TABLES = ("samples", "waits", "stacks", "frames")
SYSTEM = r"(?:^|/)(?:\[kernel\]|\[vdso\]|(?:libc|libpthread|ld-linux[^/]*|libm|libgcc_s|libstdc\+\+|libi?g?omp5?)[.-][^/]*)$"
"""Files whose functions say how a thread waits, not for what: the kernel, C, C++ and OpenMP."""
SPANS = ("op_threads", "experts", "loads")
FALLEN_ASLEEP_NS = 100_000
"""From a wait's begin to where its thread surely sleeps."""
OUTSIDE, UNKNOWN = "outside of steps", "unknown"
WHOLE, CALLERS_UNKNOWN = "whole", "[callers unknown]"
"""How a whole stack ended, and the frame that others have below their outermost one."""


@answered_once
def joined(tables: Tables, name: str) -> pd.DataFrame:
    """The rows of `samples`, or of `waits` (at their begin), with operator, expert, part and cause of that moment.

    A sample of a step's deciding thread, and a wait of a step's own, have the step's part and cause in `time`; other threads'
    have those of what they did themselves. Without steps, they have those of their thread's life.
    """
    rows, of_lives = tables[name], has_only_threads(tables)
    tables = lives_as_steps(tables, thread_lives(tables)) if of_lives else tables
    if not len(rows):
        return as_frame({column.name: np.empty(0, column.dtype) for column in MADE[name]})
    time = step_time(tables)
    if of_lives or name == "waits":
        time = time.assign(tid=tables["tokens"].set_index("token_id")["tid"].reindex(time["token_id"]).to_numpy())
    spans = {"time": time, **{table: tables[table] for table in SPANS}}
    # A wait ends with the way back to a CPU: its first moments tell why.
    moments = rows["ts_ns"] if name == "samples" else rows["begin_ns"] + np.minimum(rows["duration_ns"] // 2, FALLEN_ASLEEP_NS)
    moment = rows.assign(begin_ns=moments)
    within = {table: innermost_span(frame, moment) for table, frame in spans.items()}

    def of(table: str, column: str, blank: int | str = NONE) -> np.ndarray:
        return np.append(spans[table][column].to_numpy(), blank)[within[table]]

    decides, operators = within["time"] >= 0, tables["operators"]
    op = np.where(decides, of("time", "op_id"), of("op_threads", "op_id"))
    at_op = pd.Index(operators["op_id"]).get_indexer(op)
    token = np.where(decides & (not of_lives), of("time", "token_id"), rows["token_id"])
    loading, running = within["loads"] >= 0, within["experts"] >= 0
    waiting = (within["op_threads"] >= 0) & (moments.to_numpy() >= of("op_threads", "wait_ns"))
    part = np.append(operator_parts(operators), HOST_CODE)[at_op]
    own_part, own_cause = own_moments(rows, part, (token >= 0) | (at_op >= 0), loading, waiting)
    expert = np.append(operators["expert"].to_numpy(), NONE)[at_op]
    added = {
        "token_id": token,
        "phase": tables["tokens"].set_index("token_id")["phase"].reindex(token).fillna("").to_numpy(),
        "op_id": op,
        "layer": np.where(running, of("experts", "layer"), np.append(operators["layer"].to_numpy(), NONE)[at_op]),
        "expert": np.where(running, of("experts", "expert"), np.where(loading, of("loads", "expert"), expert)),
        "part": np.where(decides, of("time", "part", ""), own_part),
        "cause": np.where(decides, of("time", "cause", ""), own_cause),
        "decides": decides,
    }
    return rows.assign(**added)[[column.name for column in MADE[name]]]


def own_moments(
    rows: pd.DataFrame, part: np.ndarray, in_step: np.ndarray, loading: np.ndarray, waiting: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(part, cause) of moments in which a thread decides no step, by what it did; `waiting`: for others at a barrier."""
    if "waker_tid" in rows:
        own = np.where(rows["waker_tid"] >= 0, OTHER_THREAD, ASLEEP)
    else:
        own = np.where(waiting, OTHER_THREAD, COMPUTING)
    return np.select([loading, in_step], [LOAD, part], OUTSIDE), np.select([loading, in_step], [EXPERT_LOAD, own], OUTSIDE)


def base_name(path: str) -> str:
    """What follows the last slash."""
    return path.rpartition("/")[2]


def frame_names(tables: Tables) -> np.ndarray:
    """A name for each frame: its function, else its file in brackets, since addresses differ from build to build."""
    frames = tables["frames"]
    rows = zip(frames["function"], frames["file"], strict=True)
    return np.array([function or f"[{base_name(file).strip('[]') or UNKNOWN}]" for function, file in rows], object)


OPERATOR = re.compile(r"operator *(?:\(\)|[<>=!]+|->\*?)")
KEPT, AGAIN = str.maketrans("()<>", "\ue000\ue001\ue002\ue003"), str.maketrans("\ue000\ue001\ue002\ue003", "()<>")
"""To keep the brackets of an operator's name while others go, and back."""


@cache
def short_function(name: str) -> str:
    """A C++ function's name without arguments, result and template arguments; other names without their version."""
    name = name.partition("@@")[0]
    if name.startswith("[") or not ("(" in name or "<" in name):
        return name
    text = name.replace("(anonymous namespace)", "{anonymous}").partition(" [clone")[0].replace("[abi:cxx11]", "")
    text, before = OPERATOR.sub(lambda found: found[0].translate(KEPT), text), ""
    while text != before:
        before, text = text, re.sub(r"\([^()]*\)", "", re.sub(r"<[^<>]*>", "…", text))
    text = re.sub(r"(?: |const|volatile|&)+$", "", text)
    return re.sub(r"^.* (?=\S*operator\b)|^(?!.*operator\b).* ", "", text).translate(AGAIN).replace("…", "<…>")


def stack_lists(tables: Tables) -> list[np.ndarray]:
    """The frames of each stack, outermost first."""
    stacks = tables["stacks"]
    if not len(stacks):
        return []
    first = np.flatnonzero(np.append(True, np.diff(stacks["stack_id"].to_numpy()) != 0))
    return [frames[::-1] for frames in np.split(stacks["frame_id"].to_numpy(), first[1:])]


def named_stacks(tables: Tables) -> list[list[str]]:
    """The names of each stack's frames, outermost first; neighbours without a symbol in one file count as one."""
    names = frame_names(tables)
    stacks = (names[frames].tolist() for frames in stack_lists(tables))
    with_callers = (zip(stack, ["", *stack], strict=False) for stack in stacks)
    return [[name for name, caller in pairs if name != caller or name[0] != "["] for pairs in with_callers]


def rooted_stacks(tables: Tables, rows: pd.DataFrame) -> tuple[np.ndarray, list[list[str]]]:
    """(for each row of `samples` or `waits` the number of its stack, all stacks): `named_stacks`, then the same cut off ones."""
    stacks = named_stacks(tables)
    number = rows["stack_id"].to_numpy() + len(stacks) * (rows["end"] != WHOLE).to_numpy()
    return number, [*stacks, *([CALLERS_UNKNOWN, *stack] for stack in stacks)]


def function_shares(tables: Tables, rows: pd.DataFrame, weight: np.ndarray) -> pd.DataFrame:
    """A row a function: `self`, the sum of weights where it is innermost, and `total`, where it is anywhere in the stack."""
    lists = named_stacks(tables)
    by_stack = np.bincount(rows["stack_id"], weight, len(lists))
    own: dict[str, float] = {}
    total: dict[str, float] = {}
    for called, value in zip(lists, by_stack.tolist(), strict=True):
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
