"""Published quantised checkpoints: the same matrices as their own layout says, requantised with a loss that is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from runtime.errors import MoEError
from runtime.graphs.checkpoint import Checkpoint
from runtime.moe import MoE
from runtime.package.convert import PackageFormat, convert
from runtime.step.sampling import Sampler, Sampling
from tests.conftest import rest_long
from tests.runtime_models import random_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402  (needs torch)

Tensors = dict[str, Any]
Writer = Callable[[np.ndarray, str], tuple[Tensors, np.ndarray]]
"""(a matrix, its module's name) → (the tensors that stand for it, what they stand for)."""
IDS = [3, 500, 17, 900, 42, 7]
GROUP = 32
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48]}


def quantised(folder: Path, settings: dict[str, Any], write: Writer) -> Path:
    """Rewrite the matrices of a model's layers in a layout, and beside it in `plain` as the floats that they stand for."""
    tensors: Tensors = {name: torch.tensor(value) for name, value in load_file(folder / "model.safetensors").items()}
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and ".layers." in name and "mlp.gate." not in name:
            del stored[name]
            parts, meant = write(weight.numpy(), name.removesuffix(".weight"))
            stored |= parts
            plain[name] = torch.tensor(np.ascontiguousarray(meant))
    config = json.loads((folder / "config.json").read_text())
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    (folder / "plain" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def fp8(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
    """Blocks of 32 times 48, of which the last ones are smaller."""
    n, k = weight.shape
    scales = np.empty((-(-n // 32), -(-k // 48)), np.float32)
    whole = np.empty_like(weight)
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[32 * i : 32 * (i + 1), 48 * j : 48 * (j + 1)]
        scales[i, j] = np.abs(weight[block]).max() / 448
        whole[block] = weight[block] / scales[i, j]
    codes = torch.tensor(whole).to(torch.float8_e4m3fn)
    meant = codes.float().numpy().copy()
    for i, j in np.ndindex(*scales.shape):
        meant[32 * i : 32 * (i + 1), 48 * j : 48 * (j + 1)] *= scales[i, j]
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": torch.tensor(scales)}, meant


def groups(weight: np.ndarray, columns: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(codes of 4 bits [N, K], scales [N, G] in float16, zero points [N, G], what they stand for), by each column's group."""
    codes, meant = np.empty(weight.shape, np.int64), np.empty_like(weight)
    scales = np.empty((len(weight), columns.max() + 1), np.float16)
    zeros = np.full(scales.shape, 8)
    for g in range(scales.shape[1]):
        part = weight[:, columns == g]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scales[:, g] = np.abs(part).max(axis=1) / 7 if symmetric else (high - low) / 15
        scale = scales[:, g, None].astype(np.float32)
        if not symmetric:
            zeros[:, g] = np.clip(np.rint(-low / scale[:, 0]), 1, 15)
        codes[:, columns == g] = np.clip(np.rint(part / scale) + zeros[:, g, None], 0, 15)
        meant[:, columns == g] = (codes[:, columns == g] - zeros[:, g, None]) * scale
    return codes, scales, zeros, meant


def words(codes: np.ndarray, order: list[int] | None = None) -> Any:
    """Eight codes of 4 bits along the last axis in a word, the first one lowest, or in this order."""
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.int64)
    for place, column in enumerate(order or range(8)):
        packed |= codes[..., column::8] << (4 * place)
    return torch.tensor(packed.astype(np.uint32).view(np.int32).copy())


def gptq(act_order: bool, symmetric: bool) -> Writer:
    """Words along the transposed matrix's rows; zero points less 1; with `act_order` the groups' columns are scattered."""

    def write(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
        columns = np.arange(weight.shape[1]) // GROUP
        if act_order:
            columns = np.random.default_rng(2).permutation(columns)
        codes, scales, zeros, meant = groups(weight, columns, symmetric)
        parts = {"qweight": words(codes).T, "qzeros": words(zeros.T - 1), "scales": torch.tensor(scales.T.copy())}
        parts |= {"g_idx": torch.tensor(columns.astype(np.int32)), "bias": torch.zeros(len(weight))}
        return {f"{module}.{name}": value for name, value in parts.items()}, meant

    return write


def awq(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
    """Words along the transposed matrix's columns, eight in their own order."""
    codes, scales, zeros, meant = groups(weight, np.arange(weight.shape[1]) // GROUP, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": torch.tensor(scales.T.copy())}
    return {f"{module}.{name}": value for name, value in parts.items()}, meant


def packed(symmetric: bool) -> Writer:
    """compressed-tensors' words along the matrix's rows, zero points along its columns."""

    def write(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
        codes, scales, zeros, meant = groups(weight, np.arange(weight.shape[1]) // GROUP, symmetric)
        parts = {"weight_packed": words(codes), "weight_scale": torch.tensor(scales)}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T.copy()).T
        return {f"{module}.{name}": value for name, value in parts.items()}, meant

    return write


def int8(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
    """Bytes with a scale for each row."""
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(weight / scales).astype(np.int8)
    return {f"{module}.weight": torch.tensor(codes), f"{module}.weight_scale": torch.tensor(scales)}, codes * scales


def of_compressed(layout: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {}}


LAYOUTS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8": (FP8, fp8),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq(False, True)),
    "gptq by activations": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq(True, False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "int4": (of_compressed("pack-quantized"), packed(True)),
    "int4 with zero points": (of_compressed("pack-quantized"), packed(False)),
    "int8": (of_compressed("int-quantized"), int8),
}


def transformers_logits(folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0, -1].numpy()
    return logits


def our_logits(package: Path) -> np.ndarray:
    with MoE.load(package) as model:
        sequence = model.engine.begin_sequence(16)
        return np.asarray(model.engine.step(sequence, IDS, Sampler(Sampling()))[1])


@pytest.mark.parametrize("name", rest_long(LAYOUTS, "fp8", "gptq by activations", "awq", "int4 with zero points"))
def test_a_quantised_checkpoint_is_the_model_that_its_numbers_stand_for(name: str, tmp_path: Path) -> None:
    settings, write = LAYOUTS[name]
    model = quantised(random_model(tmp_path / "model", num_hidden_layers=2, moe_intermediate_size=64), settings, write)
    plain = load_file(model / "plain" / "model.safetensors")
    read = Checkpoint(model)
    for tensor, value in plain.items():
        assert np.array_equal(read.tensor(tensor, value.shape), value), tensor
        assert np.array_equal(read.tensor(tensor, value.shape, slice(3, 20)), value[3:20]), tensor
    package = convert(model, tmp_path / "package")
    assert np.abs(our_logits(package.folder) - transformers_logits(model / "plain")).max() < 1e-4
    assert not package.manifest["rounding"]


@pytest.mark.parametrize("name", ["gptq", "awq", "int4"])
def test_four_bits_stay_the_same_weights_in_a_package_of_four_bits(name: str, tmp_path: Path) -> None:
    settings, write = LAYOUTS[name]
    model = quantised(random_model(tmp_path / "model", num_hidden_layers=2, moe_intermediate_size=64), settings, write)
    target = PackageFormat("cpu", 4, 32, symmetric=name != "awq", head_bits=8)
    kept, anew = (convert(folder, tmp_path / f"{folder.name}.package", None, target) for folder in (model, model / "plain"))
    assert max(kept.manifest["rounding"][use] for use in ("experts", "attention")) < 1e-4
    assert anew.manifest["rounding"]["experts"] > (0.03 if target.symmetric else 1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        of_compressed("nvfp4-pack-quantized"),
        of_compressed("pack-quantized") | {"transform_config": {"config_groups": {"R1": {}}}},
        {"bits": 4},
    ],
)
def test_other_layouts_are_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    model = quantised(random_model(tmp_path / "model", num_hidden_layers=1), settings, gptq(False, True))
    with pytest.raises(MoEError, match=str(settings.get("checkpoint_format", settings.get("quant_method")))):
        convert(model, tmp_path / "package")


@pytest.mark.parametrize("part", ["scales", "qzeros", "g_idx"])
def test_a_part_that_is_missing_or_of_another_size_is_refused(part: str, tmp_path: Path) -> None:
    settings, write = LAYOUTS["gptq by activations"]
    model = quantised(random_model(tmp_path / "model", num_hidden_layers=1, moe_intermediate_size=64), settings, write)
    tensors = {name: torch.tensor(value) for name, value in load_file(model / "model.safetensors").items()}
    name = f"model.layers.0.mlp.experts.3.down_proj.{part}"
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(MoEError, match="down_proj"):
        convert(model, tmp_path / "package")
    del tensors[name]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(MoEError, match=f"down_proj.{'weight' if part == 'g_idx' else part}"):
        convert(model, tmp_path / "package")


def of_transformers(scale_format: str) -> Writer:
    """fp8 blocks as transformers writes and reads them."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt=scale_format)
    library: Any = SimpleNamespace(quantization_config=config)
    writer: Any = Fp8Quantize(library)
    reader: Any = Fp8Dequantize(library)

    def write(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
        parts = writer.convert({f"{module}.weight": torch.tensor(weight)})
        named = {name.removeprefix(f"{module}."): value for name, value in parts.items()}
        meant = reader.convert(named, full_layer_name="whole")["whole"]
        return parts, meant.float().numpy()

    return write


def of_its_library(layout: str, **settings: Any) -> Writer:
    """A layout as compressed-tensors writes and reads it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**settings)
    library = BaseCompressor.get_value_from_registry(layout)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def write(weight: np.ndarray, module: str) -> tuple[Tensors, np.ndarray]:
        whole = torch.tensor(weight)
        grouped = whole.reshape(len(whole), -1, arguments.group_size or whole.shape[1])
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
        state = {"weight": whole, "weight_scale": scale} | ({} if arguments.symmetric else {"weight_zero_point": zero})
        parts = library.compress(state, scheme)
        meant = library.decompress({name: value.clone() for name, value in parts.items()}, scheme)["weight"]
        return {f"{module}.{name}": value for name, value in parts.items()}, meant.float().numpy()

    return write


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
def test_fp8_as_transformers_writes_it_is_read_as_transformers_reads_it(scale_format: str, tmp_path: Path) -> None:
    same_as_its_library(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, of_transformers(scale_format))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ],
)
def test_layouts_that_compressed_tensors_writes_are_read_as_it_reads_them(
    layout: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    same_as_its_library(tmp_path, of_compressed(layout), of_its_library(layout, **settings))


def same_as_its_library(folder: Path, settings: dict[str, Any], write: Writer) -> None:
    model = quantised(
        random_model(folder / "model", num_hidden_layers=1, hidden_size=128, moe_intermediate_size=64), settings, write
    )
    read = Checkpoint(model)
    for name, value in load_file(model / "plain" / "model.safetensors").items():
        assert np.array_equal(read.tensor(name, value.shape), value), name
