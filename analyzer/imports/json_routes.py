"""Routes as JSON: vLLM's `routed_experts` of a response, and Megatron's router trace.

vLLM (`--enable-return-routed-experts`, pull requests 28284 and 38939): `choices[0].routed_experts` is the base64 text of a
NumPy file [tokens - 1, layers, k], no forward pass following the last token; `usage.prompt_tokens` of these rows are the
prompt's. It has a row for every layer, of zeros for dense ones.

Megatron (`--moe-routing-trace-path`, module core.transformer.moe.router_trace): lines of {"step", "block", "layer", "num_tokens",
"topk", "top_indices": [num_tokens][topk]}; records of MTP layers have `mtp_idx` and are left out.
"""

import base64
import io
import json
import tokenize
from typing import Any, NamedTuple

import numpy as np

from tracer.recording.format import RecordingError

DAMAGED = (ValueError, EOFError, OSError, SyntaxError, tokenize.TokenError, MemoryError, OverflowError, TypeError)
"""What a damaged NumPy file raises."""


class RoutedStep(NamedTuple):
    """A step: the experts [rows, k] of each layer that has some."""

    decode: bool
    layers: dict[int, np.ndarray]


def read_steps(text: str) -> list[RoutedStep]:
    """The steps of either format. Raises RecordingError."""
    try:
        first = json.loads(text)
    except ValueError:
        first = None
    if isinstance(first, dict) and "choices" in first:
        return _of_response(first)
    return _of_trace(text)


def _of_response(response: dict[str, Any]) -> list[RoutedStep]:
    choices, usage = response["choices"], response.get("usage")
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RecordingError("a response with one choice is needed: the routes of several belong to several sequences")
    encoded = choices[0].get("routed_experts")
    if not isinstance(encoded, str):
        raise RecordingError("the response has no routed_experts: start the server with --enable-return-routed-experts")
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except DAMAGED as error:
        raise RecordingError(f"routed_experts is damaged: {error}") from None
    if not isinstance(experts, np.ndarray) or experts.ndim != 3 or experts.dtype.kind not in "iu" or 0 in experts.shape:
        raise RecordingError("routed_experts must be an array of whole numbers [tokens, layers, k]")
    if not isinstance(prompt, int) or not 0 < prompt <= len(experts) or experts.min() < 0:
        raise RecordingError(f"usage.prompt_tokens is {prompt!r}, and there are routes of {len(experts)} tokens")
    # Distinct experts are never all 0.
    routed = [layer for layer in range(experts.shape[1]) if experts.shape[2] == 1 or experts[:, layer].any()]
    if not routed:
        raise RecordingError("routed_experts holds only zeros")
    experts = experts.astype(np.int64)
    parts = [experts[:prompt], *(experts[row : row + 1] for row in range(prompt, len(experts)))]
    return [RoutedStep(i > 0, {layer: part[:, layer] for layer in routed}) for i, part in enumerate(parts)]


def _of_trace(text: str) -> list[RoutedStep]:
    steps: dict[int, dict[int, np.ndarray]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if record.get("block", "decoder") != "decoder" or "mtp_idx" in record:
                continue
            step, layer, rows = (int(record[name]) for name in ("step", "layer", "num_tokens"))
            experts = np.array(record["top_indices"], np.int64)
            if experts.shape != (rows, int(record["topk"])) or rows < 1 or min(step, layer, experts.min()) < 0:
                raise ValueError("top_indices")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise RecordingError(f"line {number} is damaged, truncated or not a record of a router trace") from None
        if layer in steps.setdefault(step, {}):
            raise RecordingError(f"line {number}: layer {layer} of step {step} occurs twice: give the file of one rank")
        steps[step][layer] = experts
    if not steps:
        raise RecordingError("the file holds no routes")
    if len({experts.shape[1] for layers in steps.values() for experts in layers.values()}) > 1:
        raise RecordingError("the layers choose different numbers of experts")
    return [RoutedStep(max(map(len, layers.values())) == 1, layers) for _, layers in sorted(steps.items())]


def as_response(steps: list[RoutedStep]) -> str:
    """The text of a vLLM response with these routes: one sequence, whose prompt's steps come first."""
    layers, (_, k) = max(max(step.layers) for step in steps) + 1, next(iter(steps[0].layers.values())).shape
    decoded = [step.decode for step in steps]
    rows = [max(map(len, step.layers.values())) for step in steps]
    if decoded != sorted(decoded) or not decoded.count(False):
        raise RecordingError("a response holds one sequence: record one prompt and its tokens")
    experts = np.zeros((sum(rows), layers, k), np.int32)
    begin = 0
    for step, count in zip(steps, rows, strict=True):
        for layer, chosen in step.layers.items():
            if len(chosen) != count:
                raise RecordingError("a response has every row of every layer: the last layer of the prompt lacks some")
            experts[begin : begin + count, layer] = chosen
        begin += count
    prompt = sum(count for count, is_decode in zip(rows, decoded, strict=True) if not is_decode)
    file = io.BytesIO()
    np.save(file, experts)
    choice = {"index": 0, "routed_experts": base64.b64encode(file.getvalue()).decode()}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": prompt}}) + "\n"


def as_trace(steps: list[RoutedStep]) -> str:
    """The text of a Megatron router trace of one rank."""
    lines = []
    for number, step in enumerate(steps):
        for layer, chosen in sorted(step.layers.items()):
            about = {"step": number, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
            about |= {"num_tokens": len(chosen), "topk": chosen.shape[1], "top_indices": chosen.tolist()}
            lines.append(json.dumps(about))
    return "\n".join(lines) + "\n"
