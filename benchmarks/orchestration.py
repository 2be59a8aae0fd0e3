"""Where a decoded token's time goes in our own runtime, resident on the CPU: orchestration.py [--layers N] [--bits B] ...

A seeded model of Qwen1.5-MoE's sizes (hidden 2048, experts of 1408, top-4, shared expert of 5632), converted once. Time inside
ONNX Runtime is taken around every call by kind of graph; what is left of the token is orchestration. Medians over tokens, and the
quartiles of the whole.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from runtime.convert import Target, convert
from runtime.demo_model import write_demo_model
from runtime.graph import Graph
from runtime.moe import MoE

HIDDEN, WIDTH, SHARED, HEADS, TOP_K = 2048, 1408, 5632, 16, 4
WARM_UP = 5


def write_model(folder: Path, layers: int, experts: int, vocabulary: int) -> None:
    """A Qwen2-MoE checkpoint of seeded weights in half precision, with the demo's tokenizer."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * columns**-0.5).astype(np.float16)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float16)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    tensors["lm_head.weight"] = matrix(vocabulary, HIDDEN)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors |= {p + f"{norm}_layernorm.weight": ones(HIDDEN) for norm in ("input", "post_attention")}
        for which in "qkv":
            tensors[f"{p}self_attn.{which}_proj.weight"] = matrix(HIDDEN, HIDDEN)
            tensors[f"{p}self_attn.{which}_proj.bias"] = ones(HIDDEN)
        tensors[p + "self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[p + "mlp.gate.weight"], tensors[p + "mlp.shared_expert_gate.weight"] = matrix(experts, HIDDEN), matrix(1, HIDDEN)
        for name, width in [("shared_expert", SHARED), *((f"experts.{e}", WIDTH) for e in range(experts))]:
            for part, shape in (("gate", (width, HIDDEN)), ("up", (width, HIDDEN)), ("down", (HIDDEN, width))):
                tensors[f"{p}mlp.{name}.{part}_proj.weight"] = matrix(*shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_bytes((write_demo_model(folder / "donor") / "tokenizer.json").read_bytes())
    config: dict[str, Any] = {
        "model_type": "qwen2_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_experts": experts,
    }
    config |= {
        "num_experts_per_tok": TOP_K,
        "num_attention_heads": HEADS,
        "moe_intermediate_size": WIDTH,
        "vocab_size": vocabulary,
    }
    config |= {"shared_expert_intermediate_size": SHARED, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))


class Clock:
    """Nanoseconds inside ONNX Runtime by kind of graph, since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = defaultdict(int)
        inner, spent = Graph._probed, self._spent

        def timed(graph: Graph, run: Any, first: Any, second: Any, n_tokens: int) -> Any:
            def around(*arguments: Any) -> Any:
                begin = perf_counter_ns()
                result = run(*arguments)
                spent[graph.kind.name.lower()] += perf_counter_ns() - begin
                return result

            return inner(graph, around, first, second, n_tokens)

        Graph._probed = timed  # type: ignore[method-assign]

    def take(self) -> dict[str, int]:
        taken = dict(self._spent)
        self._spent.clear()
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(path, args.layers, args.experts, args.vocabulary)
        package = convert(path, path / "package", None, Target(backend="cpu", bits=args.bits))
        model = MoE.load(package.folder, threads=args.threads)
        clock, rows, totals = Clock(), defaultdict(list), []
        for token in model.generate("The router looks at", args.tokens + WARM_UP, ignore_end=True):
            spent = clock.take()
            if token.step.seq < WARM_UP:
                continue
            totals.append(token.step.duration_ns)
            spent["orchestration"] = token.step.duration_ns - sum(spent.values())
            for kind, ns in spent.items():
                rows[kind].append(ns)
        model.close()
    whole = float(np.median(totals))
    low, high = np.percentile(totals, [25, 75]) / 1e6
    print(
        f"{args.layers} layers, {args.bits} bits, {args.threads} threads, {len(totals)} tokens: "
        f"{whole / 1e6:.3f} ms per token, quartiles {low:.3f} to {high:.3f}"
    )
    for kind, values in sorted(rows.items(), key=lambda item: -float(np.median(item[1]))):
        print(f"{kind:>14} {np.median(values) / 1e3:9.1f} us  {np.median(values) / whole:6.1%}")


if __name__ == "__main__":
    main()
