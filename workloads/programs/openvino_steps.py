"""OpenVINO GenAI pipelines of a tiny Mixture-of-Experts model, each in a thread.

Arguments: a folder for the model; number of tokens to generate; ways: attention as in the model (SDPA) or paged (PA) on the CPU,
or the NPU's plugin, whose parts run on the CPU (NPUW). Prints what each pipeline measured of its own inference, as JSON.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino
import openvino.opset13 as op
import openvino_genai
from openvino.op.util import Variable, VariableInfo

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS, TOP, CONTEXT = 256, 32, 2, 2, 4, 2, 512
PROMPTS = {"SDPA": 7, "PA": 5, "NPUW": 9}
"""Tokens of the prompt, by way."""
ON_CPU = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_LLM_OPTIMIZE_V_TENSORS": "NO", "MAX_PROMPT_LEN": 32}
"""Lets the NPU's plugin do without an NPU."""
Node: TypeAlias = openvino.Node


def whole(*values: int) -> Node:
    """A vector of whole numbers."""
    return op.constant(np.array(values, np.int64))


def named_input(name: str, shape: list[int], dtype: openvino.Type) -> Node:
    """An input of the model."""
    made = op.parameter(openvino.PartialShape(shape), dtype, name=name)
    made.output(0).get_tensor().set_names({name})
    return made


class TinyModel:
    """Builds the model, whose inputs have the names that exporters give them and whose cache is its state."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.assigns: list[Any] = []
        names = ("input_ids", "attention_mask", "position_ids")
        self.ids, self.mask, self.positions = (named_input(name, [-1, -1], openvino.Type.i64) for name in names)
        self.beam = named_input("beam_idx", [-1], openvino.Type.i32)

    def weights(self, *shape: int) -> Node:
        """A random matrix."""
        return op.constant((self.random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def product(self, x: Node, outputs: int) -> Node:
        """x times a random matrix [outputs, WIDTH]."""
        return op.matmul(x, self.weights(outputs, WIDTH), False, True)

    def heads(self, x: Node) -> Node:
        """[batch, rows, WIDTH] → [batch, HEADS, rows, WIDTH / HEADS]."""
        return op.transpose(op.reshape(x, whole(0, 0, HEADS, WIDTH // HEADS), True), whole(0, 2, 1, 3))

    def cached(self, now: Node, name: str) -> Node:
        """The keys or values of the context and of this step."""
        info = VariableInfo()
        info.variable_id, info.data_type = name, openvino.Type.f32
        info.data_shape = openvino.PartialShape([-1, HEADS, -1, WIDTH // HEADS])
        state, batch = Variable(info), op.gather(op.shape_of(self.ids), whole(0), whole(0))
        empty = op.broadcast(op.constant(np.float32(0)), op.concat([batch, whole(HEADS, 0, WIDTH // HEADS)], 0))
        both = op.concat([op.gather(op.read_value(empty, state), self.beam, whole(0)), now], 2)
        self.assigns.append(op.assign(both, state))
        return both

    def attention(self, x: Node, layer: int) -> Node:
        """Attention to all that the mask allows."""
        key, value = (
            self.cached(self.heads(self.product(x, WIDTH)), f"past_key_values.{layer}.{what}present.{layer}.{what}")
            for what in ("key", "value")
        )
        allowed = op.convert(op.unsqueeze(op.unsqueeze(self.mask, whole(1)), whole(1)), "boolean")
        attended = op.scaled_dot_product_attention(self.heads(self.product(x, WIDTH)), key, value, allowed)
        joined = op.reshape(op.transpose(attended, whole(0, 2, 1, 3)), whole(0, 0, WIDTH), True)
        return self.product(joined, WIDTH)

    def experts(self, x: Node) -> Node:
        """Each expert's output by its share among the TOP chosen."""
        shares = op.softmax(self.product(x, EXPERTS), -1)
        best = op.topk(shares, op.constant(TOP), 2, "max", "value", index_element_type="i64")
        kept = op.scatter_elements_update(
            op.multiply(shares, op.constant(np.float32(0))), best.output(1), best.output(0), whole(2)
        )
        total = None
        for expert in range(EXPERTS):
            share = op.gather(kept, whole(expert), whole(2))
            part = op.multiply(self.product(op.swish(self.product(x, WIDTH)), WIDTH), share)
            total = part if total is None else op.add(total, part)
        return total

    def normed(self, x: Node) -> Node:
        """Each row with mean 0 and variance 1."""
        return op.mvn(x, whole(2), True, 1e-6, "inside_sqrt")

    def write(self, folder: Path) -> None:
        """Write the model and its configuration."""
        places = op.gather(self.weights(CONTEXT, WIDTH), self.positions, op.constant(0))
        x = op.add(op.gather(self.weights(VOCABULARY, WIDTH), self.ids, op.constant(0)), places)
        for layer in range(LAYERS):
            x = op.add(x, self.attention(self.normed(x), layer))
            x = op.add(x, self.experts(self.normed(x)))
        logits = self.product(self.normed(x), VOCABULARY)
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self.ids, self.mask, self.positions, self.beam]
        folder.mkdir(parents=True, exist_ok=True)
        openvino.save_model(openvino.Model([op.result(logits)], self.assigns, inputs), folder / "openvino_model.xml")
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')


def generate(folder: Path, way: str, tokens: int, measured: dict[str, list[float]]) -> None:
    """Generate tokens; `measured` gets the duration of each step's inference in microseconds."""
    device, options = ("NPU", ON_CPU) if way == "NPUW" else ("CPU", {"ATTENTION_BACKEND": way})
    pipeline = openvino_genai.LLMPipeline(folder, device, **options)
    config = pipeline.get_generation_config()
    config.max_new_tokens, config.ignore_eos = tokens, True
    prompt = openvino.Tensor(np.arange(PROMPTS[way], dtype=np.int64)[None])
    raw = pipeline.generate(prompt, config).perf_metrics.raw_metrics
    measured[way] = list(raw.token_infer_durations)


if __name__ == "__main__":
    TinyModel().write(Path(sys.argv[1]))
    durations: dict[str, list[float]] = {}
    arguments = ((Path(sys.argv[1]), way, int(sys.argv[2]), durations) for way in sys.argv[3:])
    threads = [threading.Thread(target=generate, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(durations))
