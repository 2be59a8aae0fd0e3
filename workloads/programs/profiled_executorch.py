"""LAYERS times Linear, ReLU, CumSum by ExecuTorch with ETDump; writes the dump, and ExecuTorch's own reading of it.

Arguments: cpu or xnnpack; the dump's path; number of runs. Needs the packages executorch and torch, and its flatc on PATH.
"""

import json
import sys
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib

LAYERS, WIDTH = 2, 32


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.relu(self.up(x)), 1)


def main() -> None:
    backend, dump, runs = sys.argv[1:]
    example = (torch.ones(1, WIDTH),)
    exported = torch.export.export(torch.nn.Sequential(*(Layer() for _ in range(LAYERS))), example)
    parts = [XnnpackPartitioner()] if backend == "xnnpack" else []
    program = to_edge_transform_and_lower(exported, partitioner=parts).to_executorch()
    module = portable_lib._load_for_executorch_from_buffer(program.buffer, enable_etdump=True)
    for _ in range(int(runs)):
        module.run_method("forward", example)
    module.write_etdump_result_to_file(dump)
    read = deserialize_from_etdump_flatcc(Path(dump).read_bytes())
    events = [[vars(event.profile_event) for event in run.events if event.profile_event] for run in read.run_data]
    told = ("name", "instruction_id", "delegate_debug_id_str", "start_time", "end_time")
    rows = [[[event[name] for name in told] for event in run] for run in events]
    Path(dump).with_suffix(".json").write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
