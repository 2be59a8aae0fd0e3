"""python -m runtime: a Mixture-of-Experts engine for CPU and NPU."""

import sys

from moescope.command_line import Room

VERBS = {
    "generate": "generate text with a Mixture-of-Experts model on CPU and NPU",
    "chat": "chat with a model",
    "bench": "measure prefill and decode speed, as llama-bench",
    "perplexity": "measure how well a model predicts a text",
    "convert": "convert a Hugging Face model into a package of subgraphs",
    "tune": "measure each subgraph on each backend, for automatic placement",
    "train-predictor": "train a predictor of expert choices, for prefetching",
    "inspect": "show the contents of a model or package",
    "demo-model": "write a small demo model",
}
ABOUT = "A Mixture-of-Experts engine for CPU and NPU."
ROOM = Room("runtime", ABOUT, VERBS, before="runtime.telemetry.probes:guard_mapped_files", label="moescope")
main = ROOM.main

if __name__ == "__main__":
    sys.exit(main())
