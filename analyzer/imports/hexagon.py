"""The profile in the log of llama.cpp's Hexagon backend (GGML_HEXAGON_PROFILE) as the tables of a recording.

    ggml-hex: HTP0 profile-op OPBATCH|----|n-ops 133|...|usec 1545 cycles 772614 start 9135111917939 mhz 500.1
    ggml-hex: HTP0 profile-op RMS_NORM+MUL|NAMES|DIMS|TYPES|STRIDES|KERNEL|usec 10 cycles 5008 start 4011446658 mhz 500.8

A batch's line precedes those of its operators. NAMES, DIMS and TYPES: sources separated by `x`, ` -> `, last result.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from analyzer.imports.run_folder import Run
from analyzer.tables.operators import layer_of
from tracer.recording.format import RecordingError

ENGINE, BATCH, REPEATED, RESULT = "hexagon", "OPBATCH", "_NX", " -> "
LINE = re.compile(
    r"ggml-hex: (\S+) profile-op ([^|\n]+)\|([^|\n]*)\|([^|\n]*)\|([^|\n]*)\|[^|\n]*\|[^|\n]*\|"
    r"usec (\d{1,18}) cycles (\d{1,18}) start (\d{1,18}) mhz \S+(?: pmu \[((?:\d{1,10},){7}\d{1,10})\])?\s*$",
    re.MULTILINE,
)
COLUMNS = ["session", "operator", "names", "dims", "types", "us", "cycles", "start", "pmu"]
OF_KIND = {
    "GLU": "REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK",
    "UNARY": "ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK GELU_ERF SILU HARDSWISH HARDSIGMOID EXP EXPM1 SOFTPLUS "
    "XIELU FLOOR CEIL ROUND TRUNC",
}
KINDS = {name: kind for kind, names in OF_KIND.items() for name in names.split()}
"""ggml's name of an operator by the function that it computes, which the log names instead."""
COUNTERS = 8
CLOCKS_MHZ, LONGEST_S = (1.0, 1e5), 1e9
"""What a whole log stays within."""
UNSAID = (
    "the log does not state which step sent a batch and when, nor the times for sending it and waiting for its answer",
    "batches are placed by the NPU's cycle counter at a constant {:.1f} MHz: time that it did not count is missing",
)


def is_log(text: str) -> bool:
    """Whether a text has a line of such a profile."""
    return re.search(r"ggml-hex: \S+ profile-op ", text) is not None


def read_log(path: Path, text: str) -> Run:
    """The tables of a log. Raises RecordingError if no line begins a batch, as in logs of older versions of llama.cpp."""
    rows = pd.DataFrame(LINE.findall(text), columns=COLUMNS).astype(dict.fromkeys(COLUMNS[5:8], np.int64))
    begins = rows["operator"] == BATCH
    if not begins.any():
        raise RecordingError(f"{path} contains no complete line of a batch ({BATCH}): it is from an older llama.cpp, or damaged")
    rows["batch_id"] = (begins.cumsum() - 1).where(begins)
    rows["batch_id"] = rows.groupby("session")["batch_id"].ffill()
    operators = rows[~begins & rows["batch_id"].notna()].reset_index(drop=True)
    batches = rows[begins].reset_index(drop=True)
    batches["n_ops"] = batches["dims"].str.extract(r"n-ops (\d{1,9})$")[0].fillna("0").astype(np.int64)
    cycles, us = (float(batches[name].to_numpy(np.float64).sum()) for name in ("cycles", "us"))
    mhz = cycles / max(us, 1.0)
    lasted = float((batches["start"] - batches["start"].min() + batches["cycles"]).max()) / max(mhz, 1e-3) * 1e-6
    if not (CLOCKS_MHZ[0] <= mhz <= CLOCKS_MHZ[1] and lasted < LONGEST_S):
        raise RecordingError(f"{path} is damaged: by its cycles and times the NPU ran {lasted:.3g} s at {mhz:.3g} MHz")
    missing, before = int(batches["n_ops"].sum()) - len(operators), int(rows["batch_id"].isna().sum())
    warnings = [f"{path.name} is truncated or damaged: operators missing from its batches: {missing:,}"] if missing > 0 else []
    warnings += [f"{path.name}: operators before its first batch, omitted: {before:,}"] if before else []
    tables = {"npu_batches": batch_table(batches, mhz), "npu_operators": operator_table(operators)}
    return Run(ENGINE, tables, [*warnings, UNSAID[0], UNSAID[1].format(mhz)])


def batch_table(rows: pd.DataFrame, mhz: float) -> pd.DataFrame:
    """Batches, with begin and end of the NPU's work: ns of its counter since the first batch began."""
    begin = rows["start"] - rows["start"].min()
    times = {"begin_ns": begin, "end_ns": begin + rows["cycles"], "duration_ns": rows["cycles"]}
    spans = {name: (cycles * (1e3 / mhz)).round().astype(np.int64) for name, cycles in times.items()}
    return rows[["n_ops"]].assign(engine=ENGINE, npu_us=rows["us"], **spans)


def operator_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Operators. If one computes several parallel nodes, the log has the shape of the last one, not of the first."""
    types = [ggml_types(*pair) for pair in zip(rows["operator"], rows["types"], strict=True)]
    names = [names.rpartition(RESULT)[2] for names in rows["names"]]
    counted = [list(map(int, pmu.split(","))) if pmu else [-1] * COUNTERS for pmu in rows["pmu"]]
    return rows[["batch_id", "us", "cycles"]].assign(
        position=rows.groupby("batch_id").cumcount(),
        start_cycles=rows["start"],
        type=types,
        n_nodes=[kinds.count("+") + 1 for kinds in types],
        name=names,
        layer=[layer_of(name) for name in names],
        shape=np.where(rows["operator"].str.endswith(REPEATED), "", rows["dims"].map(shape_of)),
        **{f"pmu{i}": [each[i] for each in counted] for i in range(COUNTERS)},
    )


def ggml_types(operator: str, types: str) -> str:
    """ggml's names of the nodes, joined by "+". Sources of MUL_MAT_NX: a matrix per node, and their rows; of _ID_NX also ids."""
    if not operator.endswith(REPEATED):
        return "+".join(KINDS.get(name, name) for name in operator.split("+"))
    kind = operator.removesuffix(REPEATED)
    shared = 2 if kind.endswith("_ID") else 1
    return "+".join([kind] * max(types.count(" x ") + 1 - shared, 1))


def shape_of(dims: str) -> str:
    """A result's dims in the tables' format (256:5 is 256x5x1x1); the log omits the last two if both are 1."""
    sizes = dims.rpartition(RESULT)[2].split(":")
    return "x".join([*sizes, "1", "1"][:4])
