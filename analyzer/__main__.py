"""python -m analyzer: tables and numbers of a recording."""

import gc
import sys

from moescope.command_line import Room

COMMANDS = {
    "summary": "numbers of a recording on one screen",
    "tables": "write the tables as Parquet",
    "query": "SQL over the tables",
    "phases": "where every moment of a token goes",
    "ledger": "what every moment of a token was spent on: one cause each",
    "findings": "what costs most, in words, with the size of the prize",
    "threads": "states, balance, and who took the CPU",
    "trends": "spread, drift, jumps and growth across tokens",
    "roofline": "what bounds the operators",
    "fidelity": "measured times against a truth",
    "ceilings": "what this machine can do at most",
    "dag": "one token's operators as a graph",
    "npu": "graphs, experts and nodes on the NPU, and whether its numbers add up",
    "import-qnn": "read QNN profiles that others wrote: CSV, optrace",
    "routes": "write routes in formats that others read",
    "experts": "expert activation, hits, reuse",
    "predict": "what a step should take on a device, from a model's config",
    "simulate": "replay recorded routes with other settings or on another device",
    "steps": "decode steps predicted from the ones before them",
    "kernels": "what kernels cost by shape: train, predict, fusion",
    "quantization": "what a quantized model gained in speed against what it lost",
    "prompts": "a subset of prompts with the whole's token lengths",
    "device": "device profiles: list, show, measure this machine",
    "compare": "what changed between two groups of runs, and how sure that is",
    "history": "results of many builds, and where they changed",
}
ROOM = Room("analyzer", "Turn a recording into tables and numbers. Needs no root.", COMMANDS)
main = ROOM.main

if __name__ == "__main__":
    code = main()
    if "duckdb" not in sys.modules:  # which reports at exit what it could not free
        gc.freeze()  # spares the last collections, which with pandas loaded take a fifth of a second
    sys.exit(code)
