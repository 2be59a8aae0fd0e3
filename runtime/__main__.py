"""python -m runtime: a Mixture-of-Experts engine for CPU and NPU."""

import sys

from moescope.command_line import Room

VERBS = {
    "generate": "generate text with a Mixture-of-Experts model on CPU and NPU",
    "chat": "talk with a model",
    "bench": "measure prefill and decode speed, as llama-bench",
    "perplexity": "measure how well a model predicts a text",
    "convert": "convert a Hugging Face model into a package of subgraphs",
    "tune": "measure each subgraph on each backend, for automatic placement",
    "train-predictor": "learn which experts a model chooses, for prefetching",
    "inspect": "show what a model or package holds",
    "demo-model": "write a small model for trying things out",
}
ABOUT = "A Mixture-of-Experts engine for CPU and NPU."
ROOM = Room("runtime", ABOUT, VERBS, before="runtime.telemetry.probes:guard_mapped_files", label="moescope")
main = ROOM.main

if __name__ == "__main__":
    sys.exit(main())
