"""python -m analyzer: tables and numbers of a recording."""

import gc
import sys

from moescope.command_line import Room

COMMANDS = {
    "summary": "key figures of a recording on one screen",
    "tables": "write the tables as Parquet",
    "query": "SQL over the tables",
    "time": "where the time of steps goes, by part and cause",
    "findings": "main costs, and the time that each remedy would save",
    "requests": "TTFT, TPOT and tokens of each request, concurrency, throughput, accepted drafts",
    "threads": "thread states, load balance, and which threads took the CPU",
    "trends": "spread, drift, jumps and growth across tokens",
    "roofline": "whether operators are bound by compute, memory, disk or launch",
    "backends": "CPU and accelerator times for operators of equal type and shape",
    "fidelity": "accuracy of the measured times against a reference",
    "ceilings": "measure this machine's peak bandwidth and compute",
    "dag": "one token's operators as a graph",
    "npu": "graphs, experts and nodes on the NPU, with consistency checks",
    "import-qnn": "import QNN profiles from other tools: CSV, optrace",
    "import-profile": "turn a profile from ONNX Runtime or llama.cpp's Hexagon backend into a recording",
    "routes": "export routes in other tools' formats",
    "experts": "expert activation, hits, reuse",
    "predict": "predict the time of a step on a device from a model's config",
    "simulate": "replay recorded routes with other settings or on another device",
    "steps": "predict decode step times from preceding steps",
    "kernels": "kernel cost models by shape: train, predict, find fusions",
    "quantization": "speed gained by quantization against quality lost",
    "prompts": "choose a subset of prompts with the same distribution of lengths",
    "device": "device profiles: list, show, measure this machine",
    "compare": "what changed between two groups of runs, with confidence intervals",
    "history": "results of many builds, and where they changed",
}
ROOM = Room("analyzer", "Turn a recording into tables and numbers. Needs no root.", COMMANDS)
main = ROOM.main

if __name__ == "__main__":
    code = main()
    if "duckdb" not in sys.modules:  # duckdb reports unfreed objects at exit
        gc.freeze()  # spares the last collections, which with pandas loaded take a fifth of a second
    sys.exit(code)
