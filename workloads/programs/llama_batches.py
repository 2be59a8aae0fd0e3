"""Runs a plan of batches (workloads/batch_plans.py) on llama.cpp: llama_batches.py MODEL SEED DRAFTS (1: with a draft's context).

Each call is a llama_batch with positions, sequences and output flags of its own arrays. Rejected rows are removed from memory
before the next call that needs their positions. Prints the calls' results as JSON.
"""

import ctypes
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from workloads.batch_plans import Call, Plan
from workloads.programs.llama_steps import BATCH, CONTEXT, PART, Batch, Opaque, declare_functions, load_library, model_params

SLOTS = 4


def context_params(lib: ctypes.CDLL) -> Opaque:
    """llama.cpp's default parameters with SLOTS sequences, the field behind the sizes of batches."""
    params = lib.llama_context_default_params()
    head = ctypes.cast(params.bytes, ctypes.POINTER(ctypes.c_uint32))
    assert head[:4] == [CONTEXT, BATCH, PART, 1], f"llama_context_params has changed: {head[:4]}"
    head[0], head[3] = 512 * SLOTS, SLOTS
    return params


def batch_of(call: Call) -> tuple[Batch, list[object]]:
    """(the call's batch, the arrays that it points to)."""
    rows = call.rows
    tokens, positions = ((ctypes.c_int32 * len(rows))(*values) for values in ([7] * len(rows), [row[1] for row in rows]))
    sequences = [(ctypes.c_int32 * 1)(row[0]) for row in rows]
    pointers = (ctypes.c_void_p * len(rows))(*(ctypes.addressof(one) for one in sequences))
    counts, outputs = (ctypes.c_int32 * len(rows))(*[1] * len(rows)), (ctypes.c_int8 * len(rows))(*(row[2] for row in rows))
    arrays = [tokens, None, positions, counts, pointers, outputs]
    fields = [ctypes.cast(array, ctypes.c_void_p) if array else None for array in arrays]
    return Batch(len(rows), *fields), [*arrays, sequences]


class Engine:
    """A context for each of the plan's."""

    def __init__(self, path: str, contexts: int):
        self.lib = declare_functions(load_library())
        self.lib.llama_get_memory.restype = ctypes.c_void_p
        self.lib.llama_memory_seq_rm.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
        self.lib.llama_backend_init()
        model = self.lib.llama_model_load_from_file(path.encode(), model_params(self.lib))
        made = [self.lib.llama_init_from_model(model, context_params(self.lib)) for _ in range(contexts)]
        self.contexts = [ctypes.c_void_p(context) for context in made]

    def run(self, call: Call) -> int:
        """Feed the rows behind what stays in memory; returns llama_decode's result."""
        context = self.contexts[call.context]
        memory = self.lib.llama_get_memory(context)
        for sequence, position in {row[0]: row[1] for row in reversed(call.rows)}.items():
            self.lib.llama_memory_seq_rm(memory, sequence, position, -1)
        batch, arrays = batch_of(call)
        result = self.lib.llama_decode(context, batch)
        del arrays
        return int(result)


def main() -> None:
    plan = Plan(int(sys.argv[2]), SLOTS, drafts=sys.argv[3] == "1")
    engine = Engine(sys.argv[1], 2)
    print(json.dumps([engine.run(call) for call in plan.calls]))


if __name__ == "__main__":
    main()
