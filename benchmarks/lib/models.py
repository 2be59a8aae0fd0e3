"""Models that benchmarks run, written under build/ the first time."""

from pathlib import Path

from runtime.package.demo_model import write_demo_model
from workloads import ROOT
from workloads.gguf_model import SHAPES, write_model

MODELS = ROOT / "build" / "models"


def seeded_gguf(name: str, tokenizer: bool = False) -> Path:
    """A shape of workloads/gguf_model.py in Q4_0, for llama.cpp; with a tokenizer of bytes for engines that take text."""
    path = MODELS / f"{name}{'-bytes' if tokenizer else ''}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        write_model(partial, SHAPES[name], quantized=True, tokenizer=tokenizer)
        partial.rename(path)
    return path


def demo_model() -> Path:
    """The runtime's demo model."""
    folder = ROOT / "build" / "demo-model"
    return folder if (folder / "config.json").exists() else write_demo_model(folder)
