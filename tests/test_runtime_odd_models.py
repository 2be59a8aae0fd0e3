"""Odd checkpoints, drawn: what transformers and we make of them is equal, or we refuse, and never different."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.errors import MoEError
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from workloads import drawn_models  # noqa: E402  (needs both)

Tensors = dict[str, np.ndarray]
Change = Callable[[dict[str, Any], Tensors, np.random.Generator], None]
PROMPT = 40
CASES = 66


def pick(tensors: Tensors, rng: np.random.Generator, *parts: str) -> str | None:
    """One of the text model's tensors whose name has one of these parts."""
    names = sorted(name for name in tensors if "visual" not in name and any(part in name for part in parts))
    return names[int(rng.integers(len(names)))] if names else None


def without_a_tensor(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    del tensors[str(pick(tensors, rng, "."))]


def without_one_small_tensor(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    if name := pick(tensors, rng, ".bias", "norm", "correction", "expert_bias", "shared_expert_gate"):
        del tensors[name]


def with_a_bias(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    name = str(pick(tensors, rng, "q_proj.weight", "o_proj.weight", "down_proj.weight", "gate.weight", "lm_head.weight"))
    tensors.setdefault(name.replace(".weight", ".bias"), rng.normal(0, 1, len(tensors.get(name, [0]))).astype(np.float32))


def with_biases_of_zeros(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors.setdefault(name.replace(".weight", ".bias"), np.zeros(len(tensors[name]), np.float32))


def with_an_unknown_tensor(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    tensors["model.layers.0.self_attn.extra.weight"] = np.ones((4, 4), np.float32)


def of_another_shape(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    name = str(pick(tensors, rng, "."))
    tensors[name] = np.ascontiguousarray(tensors[name][: max(len(tensors[name]) - 1, 1)])


def tied_the_other_way(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["tie_word_embeddings"] = not config.get("tie_word_embeddings", False)


def with_older_positions_too(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}


def without_positions(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)


def of_other_theta(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["rope_theta"] = 777.0


def with_a_window(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config |= {"sliding_window": 8, "use_sliding_window": True}


def with_more_experts_a_token(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["num_experts_per_tok"] = 1 if config.get("num_experts_per_tok", 1) > 1 else 2


def renormalised_otherwise(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["norm_topk_prob"] = not config.get("norm_topk_prob", True)


def without_shared_experts(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config |= {key: 0 for key in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") if key in config}


def with_the_flag_of_biases(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    for key in ("attention_bias", "use_bias", "conv_bias", "mlp_bias"):
        if key in config:
            config[key] = not config[key]


def in_float16(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    for name, value in tensors.items():
        tensors[name] = value.astype(np.float16)
    config["dtype"] = "float16"


def of_another_activation(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["hidden_act"] = "gelu"


def of_another_epsilon(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config |= {key: 0.5 for key in ("rms_norm_eps", "norm_eps") if key in config}


def said_to_be_quantised(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def with_one_layer_less(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config["num_hidden_layers"] -= 1


CHANGES: list[Change] = [
    *(without_a_tensor, without_one_small_tensor, with_a_bias, with_biases_of_zeros, with_an_unknown_tensor, of_another_shape),
    *(tied_the_other_way, with_older_positions_too, without_positions, of_other_theta, with_a_window, in_float16),
    *(with_more_experts_a_token, renormalised_otherwise, without_shared_experts, with_the_flag_of_biases),
    *(of_another_activation, of_another_epsilon, said_to_be_quantised, with_one_layer_less),
]


def theirs(folder: Path, ids: list[int]) -> np.ndarray | None:
    """transformers' logits, or None if it refuses or draws what is missing."""
    try:
        seeing = "vision_config" in json.loads((folder / "config.json").read_text())
        kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
        model, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager")
        if told["missing_keys"] or told["mismatched_keys"]:
            return None
        with torch.no_grad():
            return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
    except Exception:  # whatever it says no with
        return None


def ours(folder: Path, ids: list[int]) -> np.ndarray | None:
    """Our logits, or None if we refuse."""
    try:
        convert(folder, folder / "package", None, PackageFormat(backend="cpu"))
        with MoE.load(folder / "package") as model:
            return drawn_models.greedy_tokens(model, ids, 1)[1][0]
    except MoEError:
        return None


def verdict_of(folder: Path, ids: list[int]) -> tuple[str, float]:
    """(what became of a checkpoint, the largest difference of logits)."""
    expected, found = theirs(folder, ids), ours(folder, ids)
    if found is None:
        return "refused by both" if expected is None else "refused by us", 0.0
    if expected is None:
        return "different", float("inf")
    difference = float(np.abs(found - expected).max())
    return "equal" if difference < 1e-4 * max(1.0, float(np.abs(expected).max())) else "different", difference


def odd_model(folder: Path, case: int) -> tuple[str, str]:
    """A drawn model with one change; (its family, the change)."""
    names, rng = sorted(drawn_models.FAMILIES.keys() - drawn_models.REWRITTEN.keys()), np.random.default_rng([17, case])
    name, change = names[case * 11 % len(names)], CHANGES[case % len(CHANGES)]
    drawn_models.build_reference(folder, name, drawn_models.drawn_config(name, 500 + case), case)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config.get("text_config", config), tensors, rng)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return name, change.__name__


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", "n_shared_experts"), ("afmoe", "num_shared_experts")])
def test_no_shared_experts_at_all_are_zero_rows_of_them(family: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_models.drawn_config(family, 3) | {key: 0}
    monkeypatch.setattr(drawn_models, "drawn_config", lambda name, seed: drawn)
    agreed = drawn_models.compare_prompts(family, 3, 6, (5,))
    assert agreed.equal == agreed.tokens and agreed.difference < 1e-4


@pytest.mark.long
def test_drawn_odd_checkpoints_are_equal_to_transformers_or_refused(tmp_path: Path) -> None:
    ids, counted, different = np.random.default_rng(5).integers(0, 500, PROMPT).tolist(), Counter[str](), []
    for case in range(CASES):
        folder = tmp_path / str(case)
        name, change = odd_model(folder, case)
        verdict, difference = verdict_of(folder, ids)
        counted[verdict] += 1
        print(f"{name:18} {change:28} {verdict:16} {difference:.1e}", flush=True)
        if verdict == "different":
            different.append((case, name, change))
    print(dict(counted))
    assert not different and counted["equal"] > CASES / 4
