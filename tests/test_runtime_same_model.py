"""A checkpoint never becomes another model in silence: what config and tensors disagree on is as in transformers, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from runtime.errors import MoEError, RequestError
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.package.tokens import ChatTemplate, read_tokenizer
from tests.runtime_models import random_model

IDS = [3, 500, 17, 900, 42, 7]


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def transformers_tokens(folder: Path, count: int = 6) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(torch.tensor([IDS]), max_new_tokens=count, do_sample=False)[0, len(IDS) :].tolist()


def our_tokens(folder: Path, count: int = 6) -> list[int]:
    with MoE.load(folder, package=folder / "package") as model:
        return [token.id for token in model.generate(IDS, max_new_tokens=count)]


def refused(folder: Path, **changes: Any) -> None:
    change_config(folder, **changes)
    with pytest.raises(MoEError):
        convert(folder, folder / "package")


def test_a_tied_head_that_differs_is_used_as_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_model(tmp_path / "model")
    change_config(folder, tie_word_embeddings=True)
    assert our_tokens(folder) == transformers_tokens(folder)
    assert "lm_head.weight" in capsys.readouterr().err


def test_a_tied_head_that_is_stored_twice_stays_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_model(tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    change_config(folder, tie_word_embeddings=True)
    assert our_tokens(folder) == transformers_tokens(folder)
    assert "lm_head" not in capsys.readouterr().err


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,)])
def test_biases_that_the_config_denies_are_refused(tmp_path: Path, layers: tuple[int, ...]) -> None:
    folder = random_model(tmp_path / "model")
    biases = {f"model.layers.{layer}.self_attn.q_proj.bias": np.ones(128, np.float32) for layer in layers}
    change_tensors(folder, lambda tensors: tensors.update(biases))
    refused(folder)


def test_a_bias_that_the_config_demands_and_one_layer_lacks_is_refused(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", attention_bias=True)
    convert(folder, folder / "package")
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.o_proj.bias"))
    refused(folder)


def test_of_two_settings_of_positions_the_older_counts_as_in_transformers(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    change_config(
        folder,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    assert our_tokens(folder) == transformers_tokens(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 128}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(random_model(tmp_path / "model"), **changes)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder)


def test_tokens_of_the_tokenizers_settings_alone_are_added_with_their_ids(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    settings = {"added_tokens_decoder": {str(size): {"content": "<extra>", "special": False}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(folder).decode([size]) == "<extra>"
    settings["added_tokens_decoder"] = {str(size + 5): {"content": "<extra>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(MoEError):
        read_tokenizer(folder)


def test_a_package_keeps_the_further_chat_templates(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t{{ messages[0]['content'] }}")
    package = convert(folder, folder / "package")
    template, messages = ChatTemplate(package.folder), [{"role": "user", "content": "abc"}]
    assert len(template.ids(messages, chat_template="tool_use")) > len(template.ids(messages))


def test_npu_subgraphs_that_a_family_lacks_are_refused_at_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.models.qwen3_moe import Qwen3Moe

    monkeypatch.setattr(Qwen3Moe, "PORTABLE", False)
    with pytest.raises(RequestError):
        convert(random_model(tmp_path / "model"), tmp_path / "package", None, PackageFormat(backend="qnn", bits=16))


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    with pytest.raises(RequestError, match="foo"):
        MoE.load(folder, foo=1)
    with pytest.raises(MoEError):
        MoE.load(folder, expert_cache="250%")
    with MoE.load(folder, expert_cache="1TiB") as model:
        for prompt in ([True], b"hi"):
            with pytest.raises(RequestError):
                model.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        model.generate("hi")
