"""A model of LAYERS layers with only a cache, run by onnxruntime-genai; prints each step's phase and tokens as JSON.

Arguments: a folder for the model; number of tokens to generate after each prompt, each with a separate generator.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 16, 2, 2
PROMPTS = ([5, 6, 7, 8, 9], [10, 11])


def write_model(folder: Path) -> None:
    """Write a model that looks tokens up and multiplies with a head; its cache is the embedding."""
    rng, head = np.random.default_rng(0), WIDTH // HEADS
    tables = {"embedding": rng.standard_normal((VOCABULARY, WIDTH)), "head": rng.standard_normal((WIDTH, VOCABULARY))}
    weights = [numpy_helper.from_array(values.astype(np.float32), name) for name, values in tables.items()]
    weights.append(numpy_helper.from_array(np.array([0, 0, HEADS, head], np.int64), "heads"))
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
        helper.make_node("Reshape", ["x", "heads"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["now"], perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, ["b", "s"]), value("attention_mask", TensorProto.INT64, ["b", "t"])]
    outputs = [value("logits", TensorProto.FLOAT, ["b", "s", VOCABULARY])]
    for name in (f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")):
        inputs.append(value(f"past_key_values.{name}", TensorProto.FLOAT, ["b", HEADS, "p", head]))
        outputs.append(value(f"present.{name}", TensorProto.FLOAT, ["b", HEADS, "t", head]))
        nodes.append(helper.make_node("Concat", [f"past_key_values.{name}", "now"], [f"present.{name}"], axis=2))
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(folder / "model.onnx"))
    (folder / "genai_config.json").write_text(json.dumps(genai_config(head)))


def genai_config(head: int) -> dict:
    """The model's genai_config.json."""
    cache = {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
    decoder = {
        "filename": "model.onnx",
        "head_size": head,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "session_options": {"provider_options": []},
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **cache},
        "outputs": {"logits": "logits", **{f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}},
    }
    ids = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0}
    model = {"type": "llama", "vocab_size": VOCABULARY, "context_length": 128, "decoder": decoder, **ids}
    return {"model": model, "search": {"max_length": 100, "do_sample": False, "past_present_share_buffer": False}}


def main() -> None:
    folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
    write_model(folder)
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
