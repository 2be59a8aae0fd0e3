"""LoRA adapters that `convert` merges: equal to peft's own merge where it is installed, else to the product written out here."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.errors import MoEError
from runtime.package.convert import convert, up_to_date
from tests.conftest import rest_long
from tests.runtime_models import fuse_experts, random_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tests.test_runtime_published import our_logits, transformers_logits  # noqa: E402  (needs both)

HIDDEN, WIDTH, EXPERTS, RANK = 64, 48, 6, 4


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """An adapter in peft's layout; `tensors` by module and half."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}.weight": value for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def drawn_pairs(sizes: dict[str, tuple[int, int]], rank: int = RANK) -> dict[str, np.ndarray]:
    """Module → (outputs, inputs); tensors of both halves."""
    rng, tensors = np.random.default_rng(4), {}
    for module, (outputs, inputs) in sizes.items():
        tensors[f"{module}.lora_A"] = rng.normal(0, 0.1, (rank, inputs)).astype(np.float32)
        tensors[f"{module}.lora_B"] = rng.normal(0, 0.1, (outputs, rank)).astype(np.float32)
    return tensors


def merged_by_hand(model: Path, folder: Path, products: dict[str, np.ndarray]) -> Path:
    """The model with products added to its tensors."""
    tensors = load_file(model / "model.safetensors")
    for name, product in products.items():
        tensors[name] += product.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("rslora", rest_long([False, True], True))
def test_pairs_of_matrices_are_added_with_their_scale(rslora: bool, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", num_hidden_layers=2)
    sizes = {"model.layers.0.self_attn.q_proj": (128, HIDDEN), "model.layers.1.self_attn.o_proj": (HIDDEN, 128)}
    sizes |= {f"model.layers.1.mlp.experts.{e}.up_proj": (WIDTH, HIDDEN) for e in range(EXPERTS)}
    sizes |= {"model.layers.0.mlp.gate": (EXPERTS, HIDDEN), "lm_head": (1024, HIDDEN)}
    pairs = drawn_pairs(sizes)
    adapter = write_adapter(tmp_path / "adapter", pairs, use_rslora=rslora, alpha_pattern={"o_proj": 10})
    root = RANK**0.5 if rslora else RANK
    products = {
        f"{m}.weight": (pairs[f"{m}.lora_B"] @ pairs[f"{m}.lora_A"]) * ((10 if "o_proj" in m else 6) / root) for m in sizes
    }
    whole = merged_by_hand(model, tmp_path / "merged", products)
    package = convert(model, tmp_path / "package", adapter_folder=adapter)
    assert np.abs(our_logits(package.folder) - transformers_logits(whole)).max() < 1e-4
    assert up_to_date(model, package.folder, None, adapter) and not up_to_date(model, package.folder)


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapped_parameter_of_all_experts_is_merged_into_single_and_fused_tensors(fused: bool, tmp_path: Path) -> None:
    model, module = random_model(tmp_path / "model", num_hidden_layers=1), "model.layers.0.mlp.experts"
    sizes = {f"{module}.base_layer": (2 * WIDTH, HIDDEN), module: (HIDDEN, WIDTH)}
    pairs = drawn_pairs(sizes, RANK * EXPERTS)
    products: dict[str, np.ndarray] = {}
    adapter = write_adapter(tmp_path / "adapter", pairs, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for e in range(EXPERTS):
        both, down = (
            np.einsum(
                "or,ri->oi",
                pairs[f"{m}.lora_B"].reshape(-1, RANK, EXPERTS)[:, :, e],
                pairs[f"{m}.lora_A"].reshape(EXPERTS, RANK, -1)[e],
            )
            * (6 / RANK)
            for m in sizes
        )
        parts = {"gate": both[:WIDTH], "up": both[WIDTH:], "down": down}
        products |= {f"{module}.{e}.{name}_proj.weight": part for name, part in parts.items()}
    whole = merged_by_hand(model, tmp_path / "merged", products)
    if fused:
        fuse_experts(model)
    package = convert(model, tmp_path / "package", adapter_folder=adapter)
    assert np.abs(our_logits(package.folder) - transformers_logits(whole)).max() < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 2}}])
def test_the_package_equals_pefts_merge(changes: dict[str, Any], tmp_path: Path) -> None:
    import peft

    model = random_model(tmp_path / "model", num_hidden_layers=2)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    experts = [] if "rank_pattern" in changes else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=RANK, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=experts, init_lora_weights=False, **changes
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    package = convert(model, tmp_path / "package", adapter_folder=tmp_path / "adapter")
    assert np.abs(our_logits(package.folder) - transformers_logits(tmp_path / "merged")).max() < 1e-4
    assert np.abs(our_logits(package.folder) - transformers_logits(model)).max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"peft_type": "LOHA"},
        {"init_lora_weights": "pissa"},
        {"alora_invocation_tokens": [3]},
    ],
)
def test_other_adapters_are_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", num_hidden_layers=1)
    adapter = write_adapter(tmp_path / "adapter", drawn_pairs({"model.layers.0.self_attn.q_proj": (128, HIDDEN)}), **settings)
    with pytest.raises(MoEError, match=next(iter(settings))):
        convert(model, tmp_path / "package", adapter_folder=adapter)


@pytest.mark.parametrize(
    "sizes",
    [
        {"model.layers.0.self_attn.q_proj": (64, HIDDEN)},
        {"model.layers.3.self_attn.q_proj": (128, HIDDEN)},
        {"model.layers.0.mlp.w1": (WIDTH, HIDDEN)},
    ],
)
def test_an_adapter_of_another_model_is_refused_by_its_module(sizes: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", num_hidden_layers=1)
    adapter = write_adapter(tmp_path / "adapter", drawn_pairs(sizes))
    with pytest.raises(MoEError, match=next(iter(sizes))):
        convert(model, tmp_path / "package", adapter_folder=adapter)
