"""A model of two layers with only a cache, run by onnxruntime-genai; prints each step's phase and tokens as JSON.

Arguments: a folder for the model; number of tokens to generate after each prompt, each with a separate generator.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PROMPTS = ([5, 6, 7, 8, 9], [10, 11])


@dataclass
class Sizes:
    """Of a model; `hidden`: of the two products in each layer, 0: a layer has only its cache."""

    vocabulary: int = 64
    width: int = 16
    heads: int = 2
    layers: int = 2
    hidden: int = 0

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.width // self.heads


def layer_nodes(sizes: Sizes) -> list[onnx.NodeProto]:
    """From `x0`, the embedding, to `x`."""
    last, nodes = "x0", []
    for layer in range(sizes.layers if sizes.hidden else 0):
        up, active, down, out = (f"{layer}.{name}" for name in ("up", "active", "down", "out"))
        nodes += [
            helper.make_node("MatMul", [last, f"{up}.weight"], [up]),
            helper.make_node("Relu", [up], [active]),
            helper.make_node("MatMul", [active, f"{down}.weight"], [down]),
            helper.make_node("Add", [last, down], [out]),
        ]
        last = out
    return [*nodes, helper.make_node("Identity", [last], ["x"])]


def write_model(folder: Path, sizes: Sizes) -> None:
    """Write a model that looks tokens up, passes its layers and multiplies with a head; its cache is the embedding."""
    rng, width = np.random.default_rng(0), sizes.width
    shapes = {"embedding": (sizes.vocabulary, width), "head": (width, sizes.vocabulary)}
    for layer in range(sizes.layers if sizes.hidden else 0):
        shapes |= {f"{layer}.up.weight": (width, sizes.hidden), f"{layer}.down.weight": (sizes.hidden, width)}
    tables = {name: rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0])) for name, shape in shapes.items()}
    weights = [numpy_helper.from_array(values, name) for name, values in tables.items()]
    weights.append(numpy_helper.from_array(np.array([0, 0, sizes.heads, sizes.head], np.int64), "heads"))
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["x0"]),
        helper.make_node("Reshape", ["x0", "heads"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["now"], perm=[0, 2, 1, 3]),
        *layer_nodes(sizes),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, ["b", "s"]), value("attention_mask", TensorProto.INT64, ["b", "t"])]
    outputs = [value("logits", TensorProto.FLOAT, ["b", "s", sizes.vocabulary])]
    for name in (f"{layer}.{kind}" for layer in range(sizes.layers) for kind in ("key", "value")):
        inputs.append(value(f"past_key_values.{name}", TensorProto.FLOAT, ["b", sizes.heads, "p", sizes.head]))
        outputs.append(value(f"present.{name}", TensorProto.FLOAT, ["b", sizes.heads, "t", sizes.head]))
        nodes.append(helper.make_node("Concat", [f"past_key_values.{name}", "now"], [f"present.{name}"], axis=2))
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(folder / "model.onnx"))
    (folder / "genai_config.json").write_text(json.dumps(genai_config(sizes)))


def genai_config(sizes: Sizes) -> dict:
    """The model's genai_config.json."""
    cache = {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
    decoder = {
        "filename": "model.onnx",
        "head_size": sizes.head,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "session_options": {"provider_options": []},
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **cache},
        "outputs": {"logits": "logits", **{f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}},
    }
    ids = {"bos_token_id": 1, "eos_token_id": sizes.vocabulary - 1, "pad_token_id": 0}
    model = {"type": "llama", "vocab_size": sizes.vocabulary, "context_length": 128, "decoder": decoder, **ids}
    return {"model": model, "search": {"max_length": 100, "do_sample": False, "past_present_share_buffer": False}}


def main() -> None:
    folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
    write_model(folder, Sizes())
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    generators = [genai.Generator(model, genai.GeneratorParams(model)) for _ in PROMPTS]
    steps = []
    for generator, prompt in zip(generators, PROMPTS, strict=True):
        generator.append_tokens(prompt)
        steps.append(["prefill", len(prompt)])
        for _ in range(tokens):
            generator.generate_next_token()
            steps.append(["decode", 1])
    try:
        generators[0].append_tokens([1] * 200)
    except Exception:
        steps.append(["prefill", 200])
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
