"""Reads a Hugging Face model folder: config.json and safetensors, one file or shards with an index."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.graphs.names import shared_name
from runtime.graphs.published import FLOAT8, Float8, kinds_of, quantization_of

Merge = Callable[[str, tuple[int, ...], int | slice | None, np.ndarray], np.ndarray]
"""(name, shape, part, value) → the value with an adapter."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}
AT_ONCE = 1 << 24
"""Number of values checked at once."""


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; raises a ModelError that ends with `remedy` if the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object: {remedy}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json."""
    if not folder.is_dir():
        remedy = "give a folder with a Hugging Face model, or make one with `moescope convert demo`"
        raise ModelError(f"{folder} is not a folder: {remedy}")
    if not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
        remedy = "give a folder with safetensors, or trace the engine that runs the file: moescope run -- llama-cli -m FILE"
        raise ModelError(f"{folder} holds a GGUF file, which is llama.cpp's format: {remedy}")
    return read_json(folder / "config.json", "give a folder with a Hugging Face model")


class Checkpoint:
    """The tensors of a model folder by the names that families share (runtime.graphs.names), in whatever file.

    merge: changes a tensor of floats, or the part of it that was read.
    """

    def __init__(self, folder: Path, merge: Merge | None = None):
        self.folder, self.merge = folder, merge
        self.files = self._files()
        self._open: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        config = read_config(folder)
        for path in self.files:
            for stored in self._reader(path).keys():  # noqa: SIM118
                self._places[shared_name(config.get("model_type"), stored)] = path, stored
        self.quantization = quantization_of(config)
        self._layouts = kinds_of(self.quantization, self._places)
        self.names = self._places.keys() - self._layouts.keys() | {name for name, layout in self._layouts.items() if layout}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.exists():
            shards = read_json(index, "copy the index again").get("weight_map")
            if not isinstance(shards, dict):
                raise ModelError(f"{index} has no weight_map: copy the index again")
            if wrong := [name for name in shards.values() if not isinstance(name, str) or Path(name).name != name]:
                raise ModelError(f"{index} names {wrong[0]!r}, not a file in its folder: copy the index again")
            return [self.folder / name for name in sorted(set(shards.values()))]
        return [self.folder / SINGLE]

    def _reader(self, path: Path) -> Any:
        if path not in self._open:
            if not path.exists():
                raise ModelError(f"{path} is missing: copy every safetensors file of the model into {self.folder}")
            try:
                self._open[path] = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is truncated or damaged ({error}): copy it again") from None
        return self._open[path]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str, shape: tuple[int, ...], part: int | slice | None = None) -> np.ndarray:
        """The tensor as float32, or a part along its first axis; `shape`: the whole tensor's shape by config.json."""
        value = self._part(name, shape, part, FLOATS).astype(np.float32, copy=False)
        return self.merge(name, shape, part, value) if self.merge else value

    def check_finite(self, name: str) -> None:
        """Raise ModelError if a tensor of floats contains NaN or infinity."""
        stored = self._stored(name)
        if stored.get_dtype() not in FLOATS:
            return
        exponent, (count, *row) = EXPONENTS.get(stored.get_dtype(), 0), stored.get_shape()
        rows = max(AT_ONCE // max(math.prod(row), 1), 1)
        for first in range(0, count, rows):
            part = stored[first : min(first + rows, count)]
            # All exponent bits are set in infinities and NaN; NumPy itself checks 16-bit floats one by one.
            if not (int((part.view(np.uint16) & exponent).max()) < exponent if exponent else np.isfinite(part).all()):
                raise ModelError(f"tensor {name} contains non-finite numbers: copy the checkpoint again")

    def is_zero(self, name: str) -> bool:
        """Whether all numbers of a small tensor are 0."""
        return not np.any(self._stored(name)[:])

    def packed(self, name: str, shape: tuple[int, ...], part: int) -> np.ndarray:
        """A part of a tensor of bytes, as uint8."""
        return self._part(name, shape, part, ("U8",))

    def _part(self, name: str, shape: tuple[int, ...], part: int | slice | None, types: tuple[str, ...]) -> np.ndarray:
        stored = self.stored(name, shape, types)
        if isinstance(part, slice):
            part = slice(*part.indices(shape[0]))
        value: np.ndarray = stored[:] if part is None else stored[part]
        return value

    def stored(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> Any:
        """The unread tensor, after a check of its name, shape and type."""
        stored = self._stored(name)
        stored_shape = tuple(stored.get_shape())
        if stored_shape != shape:
            problem = f"tensor {name} has shape {list(stored_shape)}, config.json says {list(shape)}"
            raise ModelError(f"{problem}: the files are from different models")
        if stored.get_dtype() not in types:
            problem = f"tensor {name} is stored as {stored.get_dtype()}"
            raise ModelError(f"{problem}: save the model once in bfloat16 or float16 with transformers, then convert that")
        return stored

    def _stored(self, name: str) -> Any:
        if name not in self.names:
            raise ModelError(f"{self.folder} has no tensor {name}: the checkpoint is incomplete or of another architecture")
        layout = self._layouts.get(name)
        return layout(name, self._raw, self._places, self.quantization) if layout else self._raw(name)

    def _raw(self, name: str) -> Any:
        """The unread tensor as it is stored."""
        path, stored_name = self._places[name]
        stored = self._reader(path).get_slice(stored_name)
        return Float8(path, stored_name, stored.get_dtype()) if stored.get_dtype() in FLOAT8 else stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, for families that accept several."""
        return tuple(self._stored(name).get_shape())

    def optional(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The tensor, or None if the checkpoint has none of this name."""
        return self.tensor(name, shape) if name in self else None


class Outline(Checkpoint):
    """The tensors as zeros that take no memory: shows what a conversion would read, without reading it."""

    def __init__(self, folder: Path, merge: Merge | None = None):
        super().__init__(folder, merge)
        self.used: set[str] = set()
        self.optional_names: set[str] = set()

    def optional(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The tensor, or None; that it was asked for is noted."""
        self.optional_names.add(name)
        return super().optional(name, shape)

    def _part(self, name: str, shape: tuple[int, ...], part: int | slice | None, types: tuple[str, ...]) -> np.ndarray:
        self.stored(name, shape, types)
        self.used.add(name)
        if isinstance(part, int):
            shape = shape[1:]
        return np.broadcast_to(np.zeros((), np.uint8 if types == ("U8",) else np.float32), shape)
