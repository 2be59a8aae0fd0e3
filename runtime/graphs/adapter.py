"""A LoRA adapter in peft's layout, merged into matrices while they are read: W + scale * B A (arXiv 2106.09685)."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.graphs.checkpoint import read_json
from runtime.graphs.names import TEXT_PART

ADAPTER, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, WRAPPED = "base_model.model.", ".base_layer"
SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
FUSED = re.compile(r"(.*\.experts)\.(?:gate_up|down)_proj$")
FREE = (
    "r lora_alpha use_rslora rank_pattern alpha_pattern target_modules target_parameters exclude_modules",
    "layers_to_transform layers_pattern lora_dropout peft_type peft_version task_type auto_mapping",
    "base_model_name_or_path revision inference_mode init_lora_weights eva_config loftq_config megatron_core",
    "qalora_group_size runtime_config",
)
"""Settings that do not change what is merged, or that are followed; others must be off."""
OFF: tuple[Any, ...] = (None, False, "none", [], {})
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which training leaves the model's own weights as they are."""


class Adapter:
    """`modules`: module of the model → its pair A [r, in], B [out, r]; of wrapped parameters [E * r, in], [out, r * E]."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_json(folder / ADAPTER, "give a folder that peft wrote")
        self._refuse_variants()
        self.modules = self._read_pairs()
        self.used: set[str] = set()

    def _refuse_variants(self) -> None:
        """Raise ModelError for what is more than the sum of two products."""
        config = self.config
        other = [name for name, value in config.items() if name not in " ".join(FREE).split() and value not in OFF]
        if config.get("peft_type") != "LORA":
            other = [f"peft_type {config.get('peft_type')}"]
        if (start := config.get("init_lora_weights", True)) not in PLAIN_STARTS:
            other.append(f"init_lora_weights {start}")
        if other:
            raise ModelError(f"the adapter {self.folder} uses {', '.join(other)}: merge it with peft, then convert the result")

    def _read_pairs(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        path = self.folder / TENSORS
        halves: dict[str, dict[str, np.ndarray]] = {"A": {}, "B": {}}
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118
                    match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name.removeprefix(PREFIX))
                    if not match:
                        raise ModelError(f"tensor {name} of {path} is not merged: merge it with peft, then convert the result")
                    module, half = match[1].replace(TEXT_PART, "model.", 1), match[2]
                    halves[half][module] = file.get_tensor(name).astype(np.float32)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}): copy the adapter again") from None
        if halves["A"].keys() != halves["B"].keys() or not halves["A"]:
            raise ModelError(f"{path} does not hold lora_A and lora_B of the same modules: copy the adapter again")
        pairs = {module: (halves["A"][module], halves["B"][module]) for module in halves["A"]}
        for module, pair in pairs.items():
            if not all(half.ndim == 2 and np.isfinite(half).all() for half in pair):
                raise ModelError(f"{module} of {path} has numbers that are not finite, or no matrices: copy the adapter again")
        return pairs

    def merged(self, name: str, shape: tuple[int, ...], part: int | slice | None, value: np.ndarray) -> np.ndarray:
        """A tensor of this name, or the part of it that was read, with the adapter's product added."""
        if (module := name.removesuffix(".weight")) in self.modules:
            a, b = self.modules[module]
            if (len(b), a.shape[1]) != shape or len(a) != b.shape[1]:
                raise self._misfit(module, shape)
            self.used.add(module)
            return value + ((b if part is None else b[part]) @ a) * np.float32(self._scale(module, len(a)))
        if match := SINGLE.fullmatch(name):
            half, width = match[3], shape[0]
            outputs = shape[0] * (1 if half == "down" else 2)
            delta = self._expert(match[1], int(match[2]), outputs, shape[1])
            if delta is None:
                return value
            delta = delta[width:] if half == "up" else delta[:width]
            return value + (delta if part is None else delta[part])
        if (match := FUSED.fullmatch(name)) and len(shape) == 3 and isinstance(part, int):
            return self._into_fused(match[1], part, value)
        return value

    def _into_fused(self, module: str, expert: int, value: np.ndarray) -> np.ndarray:
        """One expert's matrix, stored [out, in] or [in, out], with its product."""
        rows, columns = value.shape
        delta, turned = self._expert(module, expert, rows, columns), self._expert(module, expert, columns, rows)
        if delta is not None and turned is not None:
            raise ModelError(f"{module} has square matrices, of which the adapter {self.folder} does not say how they lie")
        if delta is None:
            return value if turned is None else value + turned.T
        return value + delta

    def _expert(self, module: str, expert: int, outputs: int, inputs: int) -> np.ndarray | None:
        """The product [outputs, inputs] of one expert of a wrapped parameter of this shape, if the adapter has one."""
        wrapped = (name for name in self.modules if name.startswith(module) and name[len(module) :].replace(WRAPPED, "") == "")
        for name in wrapped:
            a, b = self.modules[name]
            if (len(b), a.shape[1]) == (outputs, inputs):
                self.used.add(name)
                rank = int(self.config.get("r", 8))
                count = len(a) // rank
                patterns = self.config.get("rank_pattern") or self.config.get("alpha_pattern")
                if patterns or len(a) % rank or len(a) != b.shape[1] or expert >= count:
                    raise self._misfit(name, (outputs, inputs))
                of_expert = b.reshape(outputs, rank, count)[:, :, expert] @ a.reshape(count, rank, inputs)[expert]
                return np.asarray(of_expert * np.float32(self._scale(name, rank)))
        return None

    def _scale(self, module: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) by rslora; patterns name ends of modules."""
        patterns: dict[str, Any] = self.config.get("alpha_pattern") or {}
        own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
        alpha = float(next(own, self.config.get("lora_alpha", 8)))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _misfit(self, module: str, shape: tuple[int, ...]) -> ModelError:
        sizes = [list(half.shape) for half in self.modules[module]]
        return ModelError(
            f"{module} of the adapter {self.folder} has {sizes}, which do not fit {list(shape)}: it is of another model"
        )

    def check_used(self, tensors: set[str]) -> None:
        """Raise ModelError if a module was not merged and is not one of these tensors either, which are read later."""
        if unused := sorted(name for name in self.modules.keys() - self.used if f"{name}.weight" not in tensors):
            problem = f"{unused[0]} and {len(unused) - 1} more" if len(unused) > 1 else unused[0]
            raise ModelError(f"the adapter {self.folder} changes {problem}, which this model's files do not have by that name")
